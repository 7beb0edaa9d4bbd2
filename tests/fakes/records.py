"""Records of the buffer of which a test cares for some fields only."""

from collections.abc import Iterable
from typing import Any

from outloop.buffer.records import Episode, Reward, Trajectory, Turn


def closed_episode(**fields: Any) -> Episode:
    """A completed training attempt with reward 1, but for `fields`."""
    known: dict[str, Any] = {
        "episode_id": "e",
        "task_id": "t",
        "group_id": "g",
        "attempt": 0,
        "purpose": "train",
        "outcome": "completed",
        "failure_kind": None,
        "reward": Reward(value=1.0),
        "metadata": {},
        "opened_at": 0.0,
        "closed_at": 0.0,
    }
    return Episode(**known | fields)


def trajectory_of(turns: Iterable[Turn], **fields: Any) -> Trajectory:
    """`turns` of a `closed_episode`."""
    return Trajectory(episode=closed_episode(**fields), turns=tuple(turns))
