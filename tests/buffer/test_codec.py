"""Records survive their bytes; bytes that are not records are refused by name."""

import contextlib
import itertools
import struct
from dataclasses import fields

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outloop.buffer import codec
from outloop.buffer.errors import RecordError, SchemaMismatch
from outloop.buffer.records import (
    Episode,
    Opening,
    Reward,
    Sampling,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

TEXT = st.text(max_size=12)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda x: np.array(x, np.int32))


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Any valid turn, sampled or for SFT."""
    output_ids = draw(IDS)
    n = len(output_ids)
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
        parent_turn_id=draw(st.none() | TEXT),
        choice_index=draw(st.integers(0, 9)),
        prompt_ids=draw(IDS),
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
    )


REWARDS = st.builds(Reward, value=FLOAT, components=st.dictionaries(TEXT, FLOAT, max_size=3))
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
    for field in fields(Turn):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


@given(turns())
@settings(max_examples=60, deadline=None)
def test_a_turn_survives_its_bytes(turn: Turn) -> None:
    """Every field, dtype and bit of a turn comes back, and again gives the same bytes."""
    data = codec.encode_turn(turn)
    decoded = codec.decode_turn(data)
    _assert_equal_turns(turn, decoded)
    assert codec.encode_turn(decoded) == data


@given(EPISODES, st.lists(turns(), max_size=3))
@settings(max_examples=30, deadline=None)
def test_a_trajectory_survives_its_bytes(episode: Episode, some_turns: list[Turn]) -> None:
    """An episode and its turns come back together."""
    trajectory = Trajectory(episode=episode, turns=tuple(some_turns))
    decoded = codec.decode_trajectory(codec.encode_trajectory(trajectory))
    assert decoded.episode == episode
    for left, right in zip(some_turns, decoded.turns, strict=True):
        _assert_equal_turns(left, right)


@given(OPENINGS, REWARDS, st.dictionaries(TEXT, st.none() | TEXT | FLOAT | st.booleans()))
@settings(max_examples=30, deadline=None)
def test_small_records_survive_their_bytes(
    opening: Opening, reward: Reward, payload: dict[str, object]
) -> None:
    """Openings, rewards, closures and tasks come back."""
    assert codec.decode_opening(codec.encode_opening(opening)) == opening
    assert codec.decode_reward(codec.encode_reward(reward)) == reward
    closure = codec.decode_closure(codec.encode_closure("failed", "agent", reward, "why"))
    assert (closure.outcome, closure.failure_kind, closure.error) == ("failed", "agent", "why")
    assert codec.reward_from_wire(closure.reward) == reward
    task = Task(task_id="t", payload=payload)
    assert codec.decode_task(codec.encode_task(task)) == task


@given(turns(), st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_bytes_are_refused_and_nothing_else(turn: Turn, data: st.DataObject) -> None:
    """Whatever happens to the bytes, decoding gives a turn or a typed error."""
    good = bytearray(codec.encode_turn(turn))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    bad = bytes(good[: data.draw(st.integers(0, len(good)))])
    with contextlib.suppress(RecordError, SchemaMismatch):
        codec.decode_turn(bad)


def test_an_unknown_schema_is_refused_by_both_numbers() -> None:
    """The message names what was written and what this release reads."""
    data = codec.encode_reward(Reward(value=1.0))
    with pytest.raises(SchemaMismatch, match="schema=7, this release reads schema=1"):
        codec.decode_reward(struct.pack("<H", 7) + data[2:])


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
    row = msgspec.msgpack.decode(codec.encode_turn(turn)[2:])
    assert row[4:9] == [
        b"\x01\0\0\0",
        b"\x02\x01\0\0\x03\0\0\0",
        struct.pack("<2f", -1.0, 0.0),
        [[5, 0, 2]],
        [[0, 2]],
    ]


def test_bytes_that_break_a_records_invariants_are_refused() -> None:
    """NaN, odd lengths and unequal lengths name the field."""
    good = msgspec.msgpack.decode(codec.encode_reward(Reward(value=1.0))[2:])
    nan = b"\x01\0" + msgspec.msgpack.encode([float("nan"), good[1]])
    with pytest.raises(RecordError, match="value=nan"):
        codec.decode_reward(nan)
    for field, name in ((4, "prompt_ids"), (6, "behavior_logprobs")):
        row: list[object] = [
            "t",
            "e",
            None,
            0,
            b"",
            b"",
            b"",
            [],
            [],
            "",
            None,
            "stop",
            "",
            None,
            0.0,
            0.0,
        ]
        row[10] = [1.0, 1.0, -1, 0.0, 0.0, 0.0, 1.0, 8, [], None]
        row[field] = b"\x01\x02\x03"
        with pytest.raises(RecordError, match=f"{name} has 3 bytes"):
            codec.decode_turn(b"\x01\0" + msgspec.msgpack.encode(row))


def test_a_payload_that_is_not_json_is_refused() -> None:
    """Tasks travel as data."""
    with pytest.raises(RecordError, match="task t cannot be stored"):
        codec.encode_task(Task(task_id="t", payload={"f": print}))


def test_integer_rewards_are_stored_as_floats() -> None:
    """A verifier may return 1; the trainer reads 1.0."""
    assert codec.decode_reward(codec.encode_reward(Reward(value=1))) == Reward(value=1.0)


def test_scores_of_turns_survive_and_older_bytes_are_read() -> None:
    """Rewards and closures of a release without turn scores and output have empty ones."""
    reward = Reward(value=1, components={"a": 2}, turns={"t": 0.5}, branches={"u": -1})
    assert codec.decode_reward(codec.encode_reward(reward)) == reward
    header = codec.encode_reward(reward)[:2]
    older = header + msgspec.msgpack.encode([1.0, {"a": 2.0}])
    assert codec.decode_reward(older) == Reward(value=1.0, components={"a": 2.0})
    closure = header + msgspec.msgpack.encode(["completed", None, None, "why"])
    assert codec.decode_closure(closure).output == ""
