"""Records survive their bytes; bytes that are not records are refused by name."""

import contextlib
import itertools
import struct
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from outloop.buffer.codec import records_codec
from outloop.buffer.errors import RecordError, SchemaMismatch
from outloop.buffer.records import (
    MAX_REWARD,
    Episode,
    Opening,
    Reward,
    Sampling,
    Task,
    TokenReward,
    Trajectory,
    Turn,
    VersionSpan,
)
from outloop.buffer.routed_experts import RoutedExperts, RoutingShape

TEXT = st.text(max_size=12)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
NUMBER = st.floats(-MAX_REWARD, MAX_REWARD)
"""Of a reward."""
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda x: np.array(x, np.int32))


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Any valid turn, sampled or for SFT."""
    prompt_ids, output_ids, parent = draw(IDS), draw(IDS), draw(st.none() | TEXT)
    n = len(output_ids)
    num_rows = len(prompt_ids) + n - (parent is None)
    is_sampled = draw(st.booleans())
    cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))})
    spans = tuple(
        VersionSpan(policy_version=draw(st.integers(0, 2**40)), start=start, end=end)
        for start, end in itertools.pairwise(cuts)
    )
    start = draw(st.integers(0, n))
    logprobs = draw(
        st.lists(st.floats(-100, 0, width=32), min_size=n, max_size=n).map(
            lambda x: np.array(x, np.float32)
        )
    )
    return Turn(
        turn_id=draw(TEXT),
        episode_id=draw(TEXT),
        parent_turn_id=parent,
        choice_index=draw(st.integers(0, 9)),
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        behavior_logprobs=logprobs if is_sampled else None,
        version_spans=spans if is_sampled else (),
        loss_spans=((start, draw(st.integers(start, n))),),
        mask_reason=draw(TEXT),
        sampling=Sampling(
            temperature=draw(st.floats(0, 2)),
            stop=tuple(draw(st.lists(TEXT, max_size=2))),
            seed=draw(st.none() | st.integers(0, 2**63)),
        ),
        finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls", "abort"])),
        branch_cause=draw(TEXT),
        retry_key=draw(st.none() | TEXT),
        started_at=draw(FLOAT),
        finished_at=draw(FLOAT),
        routed_experts=draw(st.none() | routed_experts(num_rows)) if num_rows >= 0 else None,
    )


@st.composite
def routed_experts(draw: st.DrawFn, num_rows: int) -> RoutedExperts:
    """Experts of so many tokens, some of them unknown."""
    num_experts = draw(st.sampled_from([1, 4, 255, 256, 65535]))
    shape = RoutingShape(
        num_layers=draw(st.integers(1, 3)),
        top_k=draw(st.integers(1, min(num_experts, 3))),
        num_experts=num_experts,
    )
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = (num_rows, shape.num_layers, shape.top_k)
    return RoutedExperts.of(shape, generator.integers(-1, num_experts, size))


NUMBERS = st.dictionaries(TEXT, NUMBER, max_size=3)
SPANS = st.builds(
    lambda starts, value: tuple(TokenReward(f"t{s}", s, s + 2, value) for s in sorted(starts)),
    st.sets(st.integers(0, 50), max_size=3),
    NUMBER,
)
REWARDS = st.builds(
    Reward, value=NUMBER, components=NUMBERS, turns=NUMBERS, branches=NUMBERS, tokens=SPANS
)
EPISODES = st.builds(
    Episode,
    episode_id=TEXT,
    task_id=TEXT,
    group_id=st.none() | TEXT,
    attempt=st.integers(0, 99),
    purpose=st.sampled_from(["train", "eval", "sft"]),
    outcome=st.sampled_from(["completed", "truncated", "failed", "aborted"]),
    failure_kind=st.sampled_from([None, "agent", "environment", "infrastructure"]),
    reward=st.none() | REWARDS,
    metadata=st.dictionaries(TEXT, TEXT, max_size=3),
    opened_at=FLOAT,
    closed_at=FLOAT,
)
OPENINGS = st.builds(
    Opening,
    episode_id=TEXT,
    task_id=TEXT,
    group_id=st.none() | TEXT,
    attempt=st.integers(0, 99),
    purpose=st.sampled_from(["train", "eval"]),
    deadline_at=FLOAT,
    sampling=st.none() | st.dictionaries(TEXT, FLOAT, max_size=3),
    eval_name=TEXT,
    metadata=st.dictionaries(TEXT, TEXT, max_size=3),
    opened_at=FLOAT,
)


def _assert_equal_turns(left: Turn, right: Turn) -> None:
    for name in Turn.__struct_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


@pytest.mark.medium
@given(turns())
@settings(max_examples=60, deadline=None)
def test_a_turn_survives_its_bytes(turn: Turn) -> None:
    """Every field, dtype and bit of a turn comes back, and again gives the same bytes."""
    data = records_codec.encode_turn(turn)
    decoded = records_codec.decode_turn(data)
    _assert_equal_turns(turn, decoded)
    assert records_codec.encode_turn(decoded) == data


@pytest.mark.medium
@given(EPISODES, st.lists(turns(), max_size=3))
@settings(max_examples=30, deadline=None)
def test_a_trajectory_survives_its_bytes(episode: Episode, some_turns: list[Turn]) -> None:
    """An episode and its turns come back together."""
    trajectory = Trajectory(episode=episode, turns=tuple(some_turns))
    decoded = records_codec.decode_trajectory(records_codec.encode_trajectory(trajectory))
    assert decoded.episode == episode
    for left, right in zip(some_turns, decoded.turns, strict=True):
        _assert_equal_turns(left, right)


@given(OPENINGS, REWARDS, st.dictionaries(TEXT, st.none() | TEXT | FLOAT | st.booleans()))
@settings(max_examples=30, deadline=None)
def test_small_records_survive_their_bytes(
    opening: Opening, reward: Reward, payload: dict[str, object]
) -> None:
    """Openings, rewards, closures and tasks come back."""
    assert records_codec.decode_opening(records_codec.encode_opening(opening)) == opening
    assert records_codec.decode_reward(records_codec.encode_reward(reward)) == reward
    closure = records_codec.decode_closure(
        records_codec.encode_closure("failed", "agent", reward, "why")
    )
    assert (closure.outcome, closure.failure_kind, closure.error) == ("failed", "agent", "why")
    assert closure.reward == reward
    task = Task(task_id="t", payload=payload)
    assert records_codec.decode_task(records_codec.encode_task(task)) == task


@pytest.mark.medium
@given(turns(), st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_bytes_are_refused_and_nothing_else(turn: Turn, data: st.DataObject) -> None:
    """Whatever happens to the bytes, decoding gives a turn or a typed error."""
    good = bytearray(records_codec.encode_turn(turn))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    bad = bytes(good[: data.draw(st.integers(0, len(good)))])
    with contextlib.suppress(RecordError, SchemaMismatch):
        records_codec.decode_turn(bad)


def test_an_unknown_schema_is_refused_by_both_numbers() -> None:
    """The message names what was written and what this release reads."""
    data = records_codec.encode_reward(Reward(value=1.0))
    with pytest.raises(SchemaMismatch, match="schema=7, this release reads schema=4"):
        records_codec.decode_reward(struct.pack("<H", 7) + data[2:])


def test_the_form_of_arrays_is_fixed() -> None:
    """Ids are int32 and logprobs float32, little-endian: other readers depend on it."""
    turn = Turn(
        turn_id="t",
        episode_id="e",
        parent_turn_id=None,
        prompt_ids=np.array([1], np.int32),
        output_ids=np.array([258, 3], np.int32),
        behavior_logprobs=np.array([-1.0, 0.0], np.float32),
        version_spans=(VersionSpan(policy_version=5, start=0, end=2),),
        loss_spans=((0, 2),),
        sampling=Sampling(temperature=1.0),
        finish_reason="stop",
        started_at=0.0,
        finished_at=0.0,
    )
    data = records_codec.encode_turn(turn)
    assert data[:2] == struct.pack("<H", records_codec.SCHEMA)
    fields = msgspec.msgpack.decode(data[2:])
    assert set(fields) == set(Turn.__struct_fields__)
    assert fields["prompt_ids"] == struct.pack("<i", 1)
    assert fields["output_ids"] == struct.pack("<2i", 258, 3)
    assert fields["behavior_logprobs"] == struct.pack("<2f", -1.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"output_ids": struct.pack("<2i", -2, 3)}, "must be non-negative"),
        ({"behavior_logprobs": struct.pack("<2f", float("nan"), 0)}, "behavior_logprobs holds NaN"),
        ({"behavior_logprobs": struct.pack("<2f", 0, float("inf"))}, "behavior_logprobs holds NaN"),
        ({"behavior_logprobs": struct.pack("<1f", 0.0)}, "they must be equal"),
        ({"prompt_ids": b"odd"}, "turn is damaged"),
        ({"prompt_ids": [1]}, "list in the place of an array"),
        ({"version_spans": [[5, 0, 1]]}, "version_spans end at 1"),
        ({"loss_spans": [[0, 3]]}, "loss_spans"),
        ({"sampling": 7}, "turn is damaged"),
    ],
)
def test_bytes_that_break_a_turns_invariants_are_refused(
    changes: dict[str, object], sentence: str, make_turn: Callable[..., Turn]
) -> None:
    """Negative ids, NaN, unequal lengths and gaps name the field."""
    data = records_codec.encode_turn(make_turn("e", num_output=2))
    bad = data[:2] + msgspec.msgpack.encode(msgspec.msgpack.decode(data[2:]) | changes)
    with pytest.raises(RecordError, match=sentence):
        records_codec.decode_turn(bad)


def test_turns_of_all_sizes_decode_to_themselves(make_turn: Callable[..., Turn]) -> None:
    """Small and large records, with and without logprobs, keep their own arrays."""
    many = [make_turn("e", index, num_output=size) for index, size in enumerate((4, 9000, 0, 5, 1))]
    many[3] = replace(many[3], behavior_logprobs=None, version_spans=())
    decoded = [records_codec.decode_turn(record) for record in map(records_codec.encode_turn, many)]
    for turn, again in zip(many, decoded, strict=True):
        _assert_equal_turns(turn, again)
        assert not again.output_ids.flags.writeable
        assert again.output_ids.flags.aligned


def test_arrays_of_another_form_are_stored_like_any(make_turn: Callable[..., Turn]) -> None:
    """Views with gaps and float64 logprobs are float32 without gaps in the turn and its bytes."""
    turn = make_turn("e", num_output=8)
    odd = replace(
        turn,
        output_ids=np.repeat(turn.output_ids, 2)[::2],
        behavior_logprobs=turn.behavior_logprobs.astype(np.float64),
    )
    assert odd.output_ids.flags.c_contiguous
    assert odd.behavior_logprobs.dtype == np.float32
    assert records_codec.encode_turn(odd) == records_codec.encode_turn(turn)
    gaps_only = replace(turn, prompt_ids=np.repeat(turn.prompt_ids, 2)[::2])
    assert records_codec.encode_turn(gaps_only) == records_codec.encode_turn(turn)


def test_what_was_decoded_is_as_frozen_as_what_was_built(make_turn: Callable[..., Turn]) -> None:
    """It is a Turn whose fields cannot be set, nor its arrays written."""
    decoded = records_codec.decode_turn(records_codec.encode_turn(make_turn("e")))
    assert type(decoded) is Turn
    with pytest.raises(AttributeError):
        decoded.turn_id = "f"  # type: ignore[misc]
    assert replace(decoded, turn_id="f").turn_id == "f"
    with pytest.raises(ValueError, match="read-only"):
        decoded.output_ids[0] = 1


def test_a_reward_that_is_not_finite_is_refused_by_field() -> None:
    """Its value, its components, and those of turns and branches."""
    rows: dict[str, dict[str, object]] = {
        "value=nan": {"value": float("nan")},
        "components.style=inf": {"value": 0.0, "components": {"style": float("inf")}},
        "turns.t1=nan": {"value": 0.0, "turns": {"t1": float("nan")}},
        "branches.t2=-inf": {"value": 0.0, "branches": {"t2": float("-inf")}},
    }
    head = struct.pack("<H", records_codec.SCHEMA)
    for sentence, row in rows.items():
        with pytest.raises(RecordError, match=sentence):
            records_codec.decode_reward(head + msgspec.msgpack.encode(row))


def test_a_payload_that_is_not_json_is_refused() -> None:
    """Tasks travel as data."""
    with pytest.raises(RecordError, match="task t cannot be stored"):
        records_codec.encode_task(Task(task_id="t", payload={"f": print}))


def test_integer_rewards_are_stored_as_floats() -> None:
    """A verifier may return 1; the trainer reads 1.0."""
    assert records_codec.decode_reward(records_codec.encode_reward(Reward(value=1))) == Reward(
        value=1.0
    )


def test_scores_of_turns_survive_and_older_bytes_are_read() -> None:
    """Rewards and closures of a release without turn scores and output have empty ones."""
    reward = Reward(value=1, components={"a": 2}, turns={"t": 0.5}, branches={"u": -1})
    assert records_codec.decode_reward(records_codec.encode_reward(reward)) == reward
    header = records_codec.encode_reward(reward)[:2]
    older = header + msgspec.msgpack.encode({"value": 1.0, "components": {"a": 2.0}})
    assert records_codec.decode_reward(older) == Reward(value=1.0, components={"a": 2.0})
    closure = header + msgspec.msgpack.encode(
        {"outcome": "completed", "failure_kind": None, "reward": None, "error": "why"}
    )
    assert records_codec.decode_closure(closure).output == ""
