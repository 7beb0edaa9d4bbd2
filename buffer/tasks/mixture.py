"""Several lists of tasks played in proportion to weights, which may change while a run goes on.

The task of a slot depends only on the seed, the sizes of the sources and the weights at that slot.
So all routers agree, and a slot that is played again plays the same task.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outloop.buffer.errors import RecordError
from outloop.buffer.tasks.order import task_index
from outloop.buffer.tasks.priorities import Priorities

_BLOCK_SLOTS = 4096
_SEED_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of two sources, so that sources of equal size have different orders."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """A list of tasks inside the run's tasks, which hold one source after the other."""

    name: str
    num_tasks: int
    weight: float = 1.0
    """When the run begins."""
    priority: int = 0
    """Added to that of each of its tasks."""


@dataclass(frozen=True, slots=True)
class WeightsFrom:
    """Weights, one for each source, from a slot on."""

    from_slot: int
    weights: tuple[float, ...]


def check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    """Check that the weights can choose a source.

    Raises:
        RecordError: one is negative or not finite, or all are 0.
    """
    shown = dict(zip(names, weights, strict=True))
    if not all(np.isfinite(one) and one >= 0 for one in weights) or not sum(weights) > 0:
        raise RecordError(f"weights={shown}; finite numbers of 0 or more, not all 0, are allowed")


class Mixture:
    """The task order of a run with one source or several.

    Args:
        schedule: sorted by slot, the first from slot 0; not needed for one source.
        order: permutes the slots by priority; None: no priorities.
    """

    def __init__(
        self,
        sources: Sequence[TaskSource],
        schedule: Sequence[WeightsFrom],
        seed: int,
        order: Priorities | None = None,
    ) -> None:
        self._order = order
        self._names = [source.name for source in sources]
        self._sizes = [source.num_tasks for source in sources]
        self._starts = [sum(self._sizes[:index]) for index in range(len(self._sizes))]
        self._schedule = schedule
        self._seed = seed
        self._before: list[npt.NDArray[np.int64]] = [np.zeros(len(sources), np.int64)]
        """How often each source was chosen before each block."""
        self._last_block: tuple[int, npt.NDArray[np.intp]] | None = None

    def task_index(self, slot: int) -> int:
        """The task that `slot` plays: each source goes through its tasks epoch by epoch."""
        if self._order is not None:
            slot = self._order.slot_in_order(slot, self._task_index)
        return self._task_index(slot)

    def priority_of(self, task_index: int) -> int:
        """The priority of a task; 0 where all are equal."""
        return 0 if self._order is None else self._order.of(task_index)

    def source_of(self, task_index: int) -> str:
        """The name of the source of a task; empty where there is one source alone."""
        if len(self._names) == 1:
            return ""
        return self._names[bisect_right(self._starts, task_index) - 1]

    def _task_index(self, slot: int) -> int:
        if len(self._sizes) == 1:
            return task_index(slot, self._sizes[0], self._seed)
        block, offset = divmod(slot, _BLOCK_SLOTS)
        while len(self._before) <= block:
            choices = self._choose(len(self._before) - 1)
            counts = np.bincount(choices, minlength=len(self._sizes))
            self._before.append(self._before[-1] + counts)
        choices = self._choose(block)
        source = int(choices[offset])
        position = int(self._before[block][source] + np.count_nonzero(choices[:offset] == source))
        seed = self._seed + (source + 1) * _SEED_STEP
        return self._starts[source] + task_index(position, self._sizes[source], seed)

    def _choose(self, block: int) -> npt.NDArray[np.intp]:
        """The source of every slot of a block."""
        if self._last_block is not None and self._last_block[0] == block:
            return self._last_block[1]
        # The raw stream of Philox is fixed, unlike that of numpy's distributions.
        key = np.array([self._seed % 2**64, block], dtype=np.uint64)
        points = np.random.Philox(key=key).random_raw(_BLOCK_SLOTS) / 2.0**64
        first = block * _BLOCK_SLOTS
        starts = [entry.from_slot for entry in self._schedule]
        choices = np.empty(_BLOCK_SLOTS, np.intp)
        begin = 0
        while begin < _BLOCK_SLOTS:
            entry = max(0, bisect_right(starts, first + begin) - 1)
            following = starts[entry + 1] - first if entry + 1 < len(starts) else _BLOCK_SLOTS
            end = min(_BLOCK_SLOTS, following)
            bounds = np.cumsum(self._schedule[entry].weights)
            chosen = np.searchsorted(bounds, points[begin:end] * bounds[-1], side="right")
            choices[begin:end] = np.minimum(chosen, len(bounds) - 1)
            begin = end
        self._last_block = (block, choices)
        return choices
