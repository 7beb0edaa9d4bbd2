"""Trajectories for supervised training."""

from collections.abc import Callable
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
