"""Pure decisions of the buffer: which task a slot plays, which versions a turn was drawn by.

Owns: the task order and the version summary of a turn. Does not own: admission and sealing, which
must be atomic and live in the scripts. Invariant: no input but the arguments; the same arguments
give the same answer in every process and release.
"""

from __future__ import annotations

import functools

import numpy as np

from outloop.buffer.records import Int32, Turn


def task_index(slot: int, num_tasks: int, seed: int) -> int:
    """The task that `slot` plays, 0 <= index < num_tasks.

    Guarantees that slots [k * num_tasks, (k + 1) * num_tasks) play every task once, in an order
    that depends on (seed, k) only.
    """
    epoch, position = divmod(slot, num_tasks)
    return int(_epoch_order(epoch, num_tasks, seed)[position])


def trained_version_bounds(turn: Turn) -> tuple[int | None, int | None]:
    """(oldest version among the turn's trained tokens, newest among its output tokens)."""
    spans, loss = turn.version_spans, turn.loss_spans
    if len(spans) == len(loss) == 1 and loss[0] == (spans[0].start, spans[0].end):
        # Nearly every turn: one version drew all of it, and all of it is trained.
        version = spans[0].policy_version if spans[0].end > spans[0].start else None
        return version, version
    oldest = [
        span.policy_version
        for span in turn.attended_spans
        if any(max(span.start, start) < min(span.end, end) for start, end in turn.loss_spans)
    ]
    newest = [span.policy_version for span in turn.version_spans if span.end > span.start]
    return (min(oldest) if oldest else None, max(newest) if newest else None)


@functools.lru_cache(maxsize=4)
def _epoch_order(epoch: int, num_tasks: int, seed: int) -> Int32:
    # Philox with an explicit key: numpy promises its stream, unlike that of default_rng.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    keys = generator.integers(0, 2**63, size=num_tasks, dtype=np.int64)
    return np.argsort(keys, kind="stable").astype(np.int32)
