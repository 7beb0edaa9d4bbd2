"""What each part of a run was doing over time, from the archive and the steps: who waited for whom.

Times are Unix seconds. What is shown of servers and agents is what the kept episodes say: a run
that keeps a share of its groups shows that share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_BINS = 240
_BUSY_SHARE = 0.1
"""Of the most turns in flight, below which servers count as idle."""
Floats = npt.NDArray[np.float64]


def lanes(
    turns: Floats,
    episodes: Floats,
    waiting: Floats,
    rows: Sequence[Mapping[str, Any]],
    last_s: float | None,
) -> dict[str, Any]:
    """The lanes of the last `last_s` seconds; None: of the whole run.

    Args:
        turns: [N, 2] when each turn began and ended.
        episodes: [N, 2] when each episode opened and closed.
        waiting: [N, 2] when each trained episode closed, and when its update began.
        rows: of metrics.jsonl, of steps.
    """
    times = np.concatenate([turns.reshape(-1), episodes.reshape(-1)])
    ends = [row["time"] for row in rows]
    if not len(times) and not ends:
        return {"begin": 0.0, "end": 0.0, "steps": [], "servers": [], "agents": [], "queue": []}
    begin = min([*([times.min()] if len(times) else []), *ends])
    end = max([*([times.max()] if len(times) else []), *ends])
    if last_s is not None:
        begin = max(begin, end - last_s)
    edges = np.linspace(begin, max(end, begin + 1e-3), _BINS + 1)
    servers = mean_number(turns, edges)
    steps = [_segments(row) for row in rows if row["time"] > begin]
    waited_s = sum(_within(step["begin"], step["begin"] + step["wait_s"], edges) for step in steps)
    idle = float((servers < _BUSY_SHARE * servers.max()).mean()) if len(turns) else None
    return {
        "begin": float(begin),
        "end": float(edges[-1]),
        "servers": servers.tolist(),
        "agents": mean_number(episodes, edges).tolist(),
        "queue": mean_number(waiting, edges).tolist(),
        "steps": steps,
        "trainer_waited": waited_s / float(edges[-1] - edges[0]) if steps else None,
        "servers_idle": idle,
    }


def mean_number(intervals: Floats, edges: Floats) -> Floats:
    """How many of the intervals [N, 2] were going on, on average between neighbours of `edges`."""
    if not len(intervals):
        return np.zeros(len(edges) - 1)

    def passed(moments: Floats) -> Floats:
        """Seconds since each moment, all together, at each edge."""
        ordered = np.sort(moments)
        sums = np.concatenate([[0.0], np.cumsum(ordered - edges[0])])
        before = np.searchsorted(ordered, edges)
        return before * (edges - edges[0]) - sums[before]

    going_on = passed(intervals[:, 0]) - passed(intervals[:, 1])
    return np.maximum(0.0, np.diff(going_on) / np.diff(edges))


def _segments(row: Mapping[str, Any]) -> dict[str, Any]:
    """A step, and how long the trainer did what in it."""
    whole = row.get("train/step_s") or 0.0
    return {
        "step": row["step"],
        "begin": row["time"] - whole,
        "end": row["time"],
        "wait_s": row.get("train/wait_s") or 0.0,
        "update_s": row.get("train/update_s") or 0.0,
        "evaluation_s": row.get("train/evaluation_wait_s") or 0.0,
        "publish_s": row.get("publish/duration_s") or 0.0,
    }


def _within(begin: float, end: float, edges: Floats) -> float:
    return max(0.0, min(end, float(edges[-1])) - max(begin, float(edges[0])))
