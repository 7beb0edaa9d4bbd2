"""Plays tasks with a higher priority first.

The slots of a window are permuted among themselves. The permutation depends on the priorities only:
all routers agree, a slot that is played again plays the same task, and no task waits longer than a
window.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outloop.buffer.records import Int32


class Priorities:
    """Higher first, inside consecutive windows of slots.

    Args:
        values: [num_tasks] int32, by task index.
        window: slots; at least 1.
    """

    def __init__(self, values: Int32, window: int) -> None:
        self._values = values
        self._window = window
        self._last: tuple[int, list[int]] | None = None

    def of(self, task_index: int) -> int:
        """The priority of a task."""
        return int(self._values[task_index])

    def slot_in_order(self, slot: int, task_index: Callable[[int], int]) -> int:
        """The slot that is played in the place of `slot`; equals keep their order."""
        window, offset = divmod(slot, self._window)
        if self._last is None or self._last[0] != window:
            first = window * self._window
            slots = range(first, first + self._window)
            urgency = {one: -int(self._values[task_index(one)]) for one in slots}
            self._last = window, sorted(slots, key=urgency.__getitem__)
        return self._last[1][offset]


def read_priorities(data: bytes | None, window: int) -> Priorities | None:
    """From the stored form; None if all tasks are equal."""
    return Priorities(np.frombuffer(data, dtype="<i4"), window) if data else None
