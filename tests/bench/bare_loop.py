"""The loop of `make bench-async` without processes: waits of agents and updates, nothing else.

A step takes the groups that would be too old for the next one, and of the others those that are
ready first. Groups start when a version is acknowledged, as many as age and depth allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def seconds_per_step(
    group_s: Callable[[int], float],
    *,
    update_s: float,
    groups_per_step: int,
    max_age: int,
    over_provision: float = 1.0,
    num_steps: int,
) -> float:
    """Return the mean time of a step after the first.

    Args:
        group_s: slot -> seconds from the start of a group to the end of its longest attempt.
        max_age: publishes that a trained token may be old. With `over_provision` above 1 only so
            many batches are live; otherwise max_age + 1.
    """
    batches = over_provision if over_provision > 1.0 else max_age + 1.0
    most_live = math.ceil(batches * groups_per_step)
    live: list[tuple[int, float]] = []  # (version at the start, ready at)
    now, num_started, ends = 0.0, 0, []
    for version in range(num_steps):
        allowed = min(most_live, (num_steps - version) * groups_per_step)
        while len(live) < allowed:
            live.append((version, now + group_s(num_started)))
            num_started += 1
        live.sort(key=lambda group: (version - group[0] < max_age, group[1]))
        batch, live = live[:groups_per_step], live[groups_per_step:]
        now = max(now, *(ready for _, ready in batch)) + update_s
        ends.append(now)
    return (ends[-1] - ends[0]) / (num_steps - 1)
