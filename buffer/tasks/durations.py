"""Which tasks of a window are started first, by how long their attempts are expected to take.

The slots of a window keep their tasks; only the order in which they are started changes. The same
history gives the same order. What is known of durations is kept in Redis by the scripts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outloop.buffer.records import Task

TASK_MEMORY = 16
"""Over how many attempts at a task the mean goes, about."""
MIN_PREDICTIONS = 8
"""With fewer groups a correlation means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A slot of a window, and what is known of the task that it plays."""

    slot: int
    expected_ms: float | None
    """Mean duration of earlier attempts, of the task or of its source; None: there were none."""
    prompt_size: int = 0
    priority: int = 0


def longest_first(candidates: Sequence[Candidate]) -> list[int]:
    """The slots in the order in which they are started.

    Higher priorities first; then longer durations, where one that is not known counts as the mean
    of those that are; then longer prompts; then earlier slots.
    """
    known = [one.expected_ms for one in candidates if one.expected_ms is not None]
    typical = math.fsum(known) / len(known) if known else 0.0

    def rank(one: Candidate) -> tuple[float, float, int, int]:
        expected = typical if one.expected_ms is None else one.expected_ms
        return -one.priority, -expected, -one.prompt_size, one.slot

    return [one.slot for one in sorted(candidates, key=rank)]


def prompt_size(task: Task) -> int:
    """Characters of the payload's `prompt`, as JSON; of the whole payload if it has none."""
    return len(json.dumps(task.payload.get("prompt", task.payload), ensure_ascii=False))


def next_mean(
    before: tuple[int, int], ms: float, num: int, memory: int = TASK_MEMORY
) -> tuple[int, int]:
    """The mean duration in ms, and how many attempts it counts, after a group; as the scripts.

    The mean of all attempts, until they are `memory`; then newer ones weigh more.

    Args:
        before: (0, 0) before the first group.
        ms: mean of the `num` attempts of the group.
    """
    mean, total = before
    total = min(total + num, max(memory, num))
    return math.floor(mean + (ms - mean) * num / total + 0.5), total


def read_mean(record: bytes | None) -> int | None:
    """The mean of a stored duration, ms."""
    return None if record is None else int(record.split()[0])


def read_predictions(records: Iterable[bytes]) -> list[tuple[float, float]]:
    """What was predicted and what happened, ms, of each group."""
    pairs = (record.split() for record in records)
    return [(float(predicted), float(happened)) for predicted, happened in pairs]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: 1 if both put the groups in the same order, 0 if they have nothing in common.

    Equal values share the mean of their ranks. 0 also with fewer than MIN_PREDICTIONS pairs, or
    where all values of one kind are equal.
    """
    if len(pairs) < MIN_PREDICTIONS:
        return 0.0
    ranks = np.stack([_ranks(np.array(values)) for values in zip(*pairs, strict=True)])
    ranks -= ranks.mean(axis=1, keepdims=True)
    spread = math.sqrt(float((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / spread if spread else 0.0


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
