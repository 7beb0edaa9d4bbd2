"""Trajectories as lines of JSON: exact both ways, bad lines by number, through Redis and back."""

import contextlib
import itertools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from outloop.buffer.codec.jsonl import format_line, parse_line
from outloop.buffer.errors import RecordError, SchemaMismatch, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import (
    MAX_REWARD,
    Episode,
    Opening,
    Purpose,
    Reward,
    Sampling,
    Trajectory,
    Turn,
    VersionSpan,
)

TEXT = st.text(max_size=12)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
NUMBER = st.floats(-MAX_REWARD, MAX_REWARD)
"""Of a reward."""
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda x: np.array(x, np.int32))


@st.composite
def turns(draw: st.DrawFn, episode_id: str, index: int) -> Turn:
    """Any turn that may be the `index`-th of an episode."""
    output_ids = draw(IDS)
    n = len(output_ids)
    is_sampled = draw(st.booleans())
    cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))})
    spans = tuple(
        VersionSpan(policy_version=draw(st.integers(0, 2**40)), start=start, end=end)
        for start, end in itertools.pairwise(cuts)
    )
    logprobs = np.array(draw(st.lists(FLOAT32, min_size=n, max_size=n)), np.float32)
    start = draw(st.integers(0, n))
    return Turn(
        turn_id=f"t{index}",
        episode_id=episode_id,
        parent_turn_id=draw(st.sampled_from([None, *(f"t{i}" for i in range(index))])),
        choice_index=draw(st.integers(0, 9)),
        prompt_ids=draw(IDS),
        output_ids=output_ids,
        behavior_logprobs=logprobs if is_sampled else None,
        version_spans=spans if is_sampled else (),
        loss_spans=((start, draw(st.integers(start, n))),),
        mask_reason=draw(TEXT),
        sampling=Sampling(
            temperature=draw(FLOAT),
            stop=tuple(draw(st.lists(TEXT, max_size=2))),
            seed=draw(st.none() | st.integers(0, 2**63)),
        ),
        finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls", "abort"])),
        branch_cause=draw(TEXT),
        retry_key=draw(st.none() | TEXT),
        started_at=draw(FLOAT),
        finished_at=draw(FLOAT),
    )


@st.composite
def trajectories(
    draw: st.DrawFn, purposes: Sequence[Purpose] = ("train", "eval", "sft")
) -> Trajectory:
    """Any trajectory whose turns make one episode."""
    episode_id = draw(TEXT)
    episode = Episode(
        episode_id=episode_id,
        task_id=draw(TEXT),
        group_id=draw(st.none() | TEXT),
        attempt=draw(st.integers(0, 99)),
        purpose=draw(st.sampled_from(purposes)),
        outcome=draw(st.sampled_from(["completed", "truncated", "failed", "aborted"])),
        failure_kind=draw(st.sampled_from([None, "agent", "environment", "infrastructure"])),
        reward=draw(
            st.none()
            | st.builds(Reward, value=NUMBER, components=st.dictionaries(TEXT, NUMBER, max_size=3))
        ),
        metadata=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        opened_at=draw(FLOAT),
        closed_at=draw(FLOAT),
    )
    number = draw(st.integers(0, 3))
    return Trajectory(
        episode=episode, turns=tuple(draw(turns(episode_id, index)) for index in range(number))
    )


def assert_equal(left: Trajectory, right: Trajectory) -> None:
    """Every field, dtype and bit."""
    assert left.episode == right.episode
    for one, other in zip(left.turns, right.turns, strict=True):
        for name in Turn.__struct_fields__:
            a, b = getattr(one, name), getattr(other, name)
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype
                assert a.tobytes() == b.tobytes()
            else:
                assert a == b


@pytest.mark.medium
@given(trajectories())
@settings(max_examples=60, deadline=None)
def test_a_trajectory_survives_its_line(trajectory: Trajectory) -> None:
    """Ids, logprobs and spans come back bit by bit; the line is one line."""
    line = format_line(trajectory)
    assert line.count(b"\n") == 1
    parsed = parse_line(line)
    assert_equal(trajectory, parsed)
    assert format_line(parsed) == line


def small(
    make_turn: Callable[..., Turn], episode_id: str = "e", purpose: Any = "sft"
) -> Trajectory:
    """A trajectory of two turns."""
    return Trajectory(
        episode=Episode(
            episode_id=episode_id,
            task_id="t",
            group_id=None,
            attempt=0,
            purpose=purpose,
            outcome="completed",
            failure_kind=None,
            reward=Reward(value=0.1),
            metadata={},
            opened_at=1.0001,
            closed_at=2.0003,
        ),
        turns=(make_turn(episode_id, 0), make_turn(episode_id, 1, parent=0)),
    )


def change(line: bytes, *path: str | int, value: Any) -> bytes:
    """The line with one value changed."""
    tree = json.loads(line)
    at = tree
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return json.dumps(tree).encode()


T = ("trajectory", "turns", 0)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ((*T, "prompt_ids"), [1, 2**31], "token ids from 0 .*prompt_ids"),
        ((*T, "prompt_ids"), [1, -1], "token ids from 0"),
        ((*T, "prompt_ids"), [10**400], "not a trajectory"),
        ((*T, "behavior_logprobs"), [-0.5, -1, -1, 10**400], "not a trajectory|NaN or infinity"),
        ((*T, "prompt_ids"), [1, 1.5], "Expected `int`, got `float`.*prompt_ids"),
        ((*T, "prompt_ids"), "abc", "Expected `array`"),
        ((*T, "output_ids"), [[1], 2], "Expected `int`, got `array`"),
        ((*T, "behavior_logprobs"), [-0.5], r"len\(behavior_logprobs\)=1"),
        ((*T, "behavior_logprobs"), [-0.5, -1, -1, 1e300], "NaN or infinity"),
        ((*T, "behavior_logprobs"), [None] * 4, "Expected `float`"),
        ((*T, "version_spans"), [], "version_spans end at 0"),
        ((*T, "loss_spans"), [[0, 9]], "loss_spans"),
        ((*T, "episode_id"), "other", "episode_id=other"),
        ((*T, "parent_turn_id"), "e.1", "parent_turn_id=e.1"),
        ((*T, "finish_reason"), "tired", "Invalid enum value 'tired'"),
        (("trajectory", "episode", "reward", "value"), None, "Expected `float`"),
        (("trajectory", "episode"), {}, "missing required field"),
        (("outloop_trajectory",), "1", "Expected `int`"),
    ],
)
def test_a_wrong_line_is_refused_by_field(
    make_turn: Callable[..., Turn], path: tuple[str | int, ...], value: Any, sentence: str
) -> None:
    """The sentence names the field."""
    with pytest.raises(RecordError, match=sentence):
        parse_line(change(format_line(small(make_turn)), *path, value=value))


@pytest.mark.medium
@given(st.binary(max_size=200), st.integers(0, 900), st.booleans())
@settings(max_examples=80, deadline=None)
def test_rubbish_raises_nothing_else(rubbish: bytes, at: int, inside: bool) -> None:
    """Whatever a line holds, it is a trajectory or a RecordError or SchemaMismatch."""
    episode = Episode(
        episode_id="e",
        task_id="t",
        group_id=None,
        attempt=0,
        purpose="sft",
        outcome="completed",
        failure_kind=None,
        reward=None,
        metadata={},
        opened_at=1.0,
        closed_at=2.0,
    )
    line = format_line(Trajectory(episode=episode, turns=()))
    with contextlib.suppress(RecordError, SchemaMismatch):
        parse_line(line[:at] + rubbish + line[at:] if inside else rubbish)


def test_what_json_cannot_hold_is_refused(make_turn: Callable[..., Turn]) -> None:
    """Infinity is no JSON: it would come back as null."""
    trajectory = small(make_turn)
    turn = replace(trajectory.turns[0], sampling=Sampling(temperature=float("inf")))
    with pytest.raises(RecordError, match="sampling.temperature=inf"):
        format_line(replace(trajectory, turns=(turn,)))


def test_lines_of_another_release_are_named(make_turn: Callable[..., Turn]) -> None:
    """Both schema numbers are in the sentence."""
    line = change(format_line(small(make_turn)), "outloop_trajectory", value=7)
    with pytest.raises(SchemaMismatch, match="outloop_trajectory=7; this release reads 1"):
        parse_line(line)


async def test_a_run_is_exported_and_its_sft_data_imported(
    start: Callable[..., Any], make_turn: Callable[..., Turn], tmp_path: Path
) -> None:
    """Groups, evaluations, dead letters and SFT data are written; only SFT data is read back, and
    the other lines are refused by name."""
    loop = await start(env__max_replacements=0, buffer__max_staleness=1)
    loop.reader.request_eval(
        "0:greedy", policy_version=0, num_episodes=2, sampling={}, blocks_training=True
    )
    claims = (await loop.claim(2)).claims
    for claim in claims:
        await loop.play(claim)
    first, second = (await loop.claim(2)).claims
    await loop.play(first)
    await loop.close(await loop.open(second), None, failure_kind="environment", outcome="failed")
    await loop.play_all()
    loop.take(1)
    await loop.writer.put_trajectories(
        [small(make_turn, f"s{i}") for i in range(3)], key="k", final=True
    )
    file, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert loop.reader.archive.write(file) == (14, 0)
    purposes = [
        json.loads(line)["trajectory"]["episode"]["purpose"]
        for line in file.read_text().splitlines()
    ]
    assert purposes == ["train"] * 8 + ["eval"] * 2 + ["train"] + ["sft"] * 3

    other = await start(run__name="other")
    with pytest.raises(RecordError, match=r"11 bad lines.*line 1: purpose='train'; 'sft' is"):
        other.reader.archive.read(file)
    for _ in range(2):
        assert other.reader.archive.read(file, skip_bad=True, final=True) == (3, 11)
        assert other.reader.sft_progress() == (3, True)
    assert other.reader.archive.write(again) == (3, 0)
    assert again.read_bytes().splitlines() == file.read_bytes().splitlines()[11:]
    assert list(tmp_path.glob(".a.jsonl*")) == list(tmp_path.glob(".b.jsonl*")) == []
    assert (await other.claim()).claims[0].group_id == "g0-1"


@pytest.mark.medium
def test_whatever_was_exported_comes_back_from_another_run(
    url: str, make_run: Callable[..., Any], tmp_path: Path, clients: Any
) -> None:
    """Export, import, export: the same lines, and so the same ids, logprobs and spans."""
    names = itertools.count()

    @given(st.lists(trajectories(["sft"]), max_size=4, unique_by=lambda t: t.episode.episode_id))
    @settings(max_examples=25, deadline=None)
    def hold(some: list[Trajectory]) -> None:
        file, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
        file.write_bytes(b"".join(map(format_line, some)))
        exports = []
        for path in (file, again):
            run = make_run(url, run__name=f"x{next(names)}")
            reader = BufferReader.connect(run, connect_client=clients.sync)
            reader.archive.read(path)
            assert reader.archive.write(again) == (len(some), 0)
            exports.append(sorted(again.read_bytes().splitlines()))
            reader.close()
        assert exports[0] == exports[1]
        found = {t.episode.episode_id: t for t in map(parse_line, exports[0])}
        for trajectory in some:
            assert_equal(trajectory, found.pop(trajectory.episode.episode_id))
        assert not found

    hold()


async def test_bad_lines_are_named_and_nothing_is_imported(
    start: Callable[..., Any], make_turn: Callable[..., Turn], tmp_path: Path
) -> None:
    """Without --skip-bad a file goes in whole or not at all."""
    loop = await start()
    file = tmp_path / "a.jsonl"
    good = format_line(small(make_turn))
    file.write_bytes(good + b"{}\n\n" + good.replace(b'"e"', b'"f"') + b"rubbish\n" + good[:40])
    with pytest.raises(RecordError, match=r"3 bad lines.*line 2: .*line 5: .*line 6: "):
        loop.reader.archive.read(file)
    assert loop.reader.sft_progress() == (0, False)
    assert loop.reader.archive.read(file, skip_bad=True) == (2, 3)


async def test_damaged_episodes_are_left_out_of_an_export(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """They are counted; the others are written."""
    loop = await start()
    await loop.play_all()
    turns = loop.reader.key("episode:g0-1-0:turns")
    loop.reader.client.lset(turns, 0, b"\x01\x00" + struct.pack("<I", 7))
    assert loop.reader.archive.write(tmp_path / "a.jsonl") == (3, 1)


async def test_files_that_are_not_there(start: Callable[..., Any], tmp_path: Path) -> None:
    """A sentence names the path."""
    loop = await start()
    with pytest.raises(SettingsError, match="missing"):
        loop.reader.archive.read(tmp_path / "missing")
    with pytest.raises(SettingsError, match="no_folder"):
        loop.reader.archive.write(tmp_path / "no_folder" / "a.jsonl")


async def test_evaluation_episodes_that_nobody_claimed_are_exported(
    start: Callable[..., Any], make_turn: Callable[..., Turn], tmp_path: Path
) -> None:
    """Each that is closed, once; those that are open are not finished yet."""
    loop = await start()
    loop.reader.request_eval(
        "0:greedy", policy_version=0, num_episodes=2, sampling={}, blocks_training=True
    )
    await loop.play_all()
    for number in range(3):
        opening = Opening(
            episode_id=f"by-hand-{number}",
            task_id="t0",
            group_id=None,
            attempt=0,
            purpose="eval",
            deadline_at=1000.0,
            opened_at=100.0,
        )
        await loop.writer.open_episode(opening)
        await loop.writer.append_turn(make_turn(f"by-hand-{number}"))
        if number:
            await loop.close(f"by-hand-{number}", 0.5 * number)
    file = tmp_path / "episodes.jsonl"
    num_written, num_damaged = loop.reader.archive.write(file)
    lines = [json.loads(line)["trajectory"]["episode"] for line in file.read_text().splitlines()]
    by_hand = [line for line in lines if line["episode_id"].startswith("by-hand")]
    assert sorted((line["episode_id"], line["reward"]["value"]) for line in by_hand) == [
        ("by-hand-1", 0.5),
        ("by-hand-2", 1.0),
    ]
    assert (num_written, num_damaged) == (len(lines), 0)
    assert len({line["episode_id"] for line in lines}) == len(lines)
