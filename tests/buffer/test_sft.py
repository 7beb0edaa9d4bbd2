"""Trajectories for supervised training."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outloop.buffer.errors import RecordError
from outloop.buffer.records import Episode, Trajectory, Turn


def _trajectory(make_turn: Callable[..., Turn], index: int, purpose: Any = "sft") -> Trajectory:
    episode = Episode(
        episode_id=f"s{index}",
        task_id="conversation",
        group_id=None,
        attempt=0,
        purpose=purpose,
        outcome="completed",
        failure_kind=None,
        reward=None,
        metadata={},
        opened_at=0.0,
        closed_at=0.0,
    )
    return Trajectory(episode=episode, turns=(make_turn(f"s{index}"),))


async def test_trajectories_are_streamed_in_order_once_per_key(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """More than one page, repeated calls, and the final flag."""
    loop = await start(trainer__mode="sft")
    assert loop.reader.sft_progress() == (0, False)
    assert list(loop.reader.sft_trajectories()) == []
    everything = [_trajectory(make_turn, index) for index in range(150)]
    for begin, final in ((0, False), (75, True)):
        for _ in range(2):
            await loop.writer.put_trajectories(
                everything[begin : begin + 75], key=f"from {begin}", final=final
            )
    assert loop.reader.sft_progress() == (150, True)
    stored = list(loop.reader.sft_trajectories())
    assert [t.episode for t in stored] == [t.episode for t in everything]
    assert stored[149].turns[0].turn_id == "s149.0"


async def test_other_purposes_are_refused(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """What is to be trained by RL must be claimed and played."""
    loop = await start()
    with pytest.raises(RecordError, match="purpose='train'"):
        await loop.writer.put_trajectories(
            [_trajectory(make_turn, 0, "train")], key="k", final=False
        )


async def test_a_record_that_is_refused_midway_stores_none(
    start: Callable[..., Any], make_turn: Callable[..., Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the call were on their way already; the next call gets its own answers."""
    loop = await start(trainer__mode="sft")
    small = [_trajectory(make_turn, index) for index in range(3)]
    large = replace(small[0], turns=(make_turn("s0", num_output=9000),))
    monkeypatch.setattr("outloop.buffer.frames.MAX_RECORD_BYTES", 20_000)
    with pytest.raises(RecordError, match="at most 20000 are allowed"):
        await loop.writer.put_trajectories([*small, large], key="k", final=True)
    assert loop.reader.sft_progress() == (0, False)
    await loop.writer.put_trajectories(small, key="k", final=True)
    assert loop.reader.sft_progress() == (3, True)
    assert len(list(loop.reader.sft_trajectories())) == 3


async def test_large_and_small_words_arrive_as_they_are(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Records below and above what is sent without a copy, over several windows."""
    loop = await start(trainer__mode="sft")
    sizes = [1, 340, 341, 342, 5000, 40_000, 2, 100_000, 3]
    everything = [
        replace(_trajectory(make_turn, index), turns=(make_turn(f"s{index}", num_output=size),))
        for index, size in enumerate(sizes)
    ]
    await loop.writer.put_trajectories(everything, key="k", final=True)
    stored = list(loop.reader.sft_trajectories())
    assert [len(t.turns[0].output_ids) for t in stored] == sizes
    assert all(
        t.turns[0].output_ids.tolist() == list(range(n)) for t, n in zip(stored, sizes, strict=True)
    )
