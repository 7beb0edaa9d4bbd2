"""The order in which one list of tasks is played.

The same arguments give the same answer in every process and release.
"""

from __future__ import annotations

import functools

import numpy as np

from outloop.buffer.records import Int32


def task_index(slot: int, num_tasks: int, seed: int) -> int:
    """The task that `slot` plays, 0 <= index < num_tasks.

    Guarantees that slots [k * num_tasks, (k + 1) * num_tasks) play every task once, in an order
    that depends on (seed, k) only.
    """
    epoch, position = divmod(slot, num_tasks)
    return int(_epoch_order(epoch, num_tasks, seed)[position])


@functools.lru_cache(maxsize=4)
def _epoch_order(epoch: int, num_tasks: int, seed: int) -> Int32:
    # Philox with an explicit key: numpy promises its stream, unlike that of default_rng.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    keys = generator.integers(0, 2**63, size=num_tasks, dtype=np.int64)
    return np.argsort(keys, kind="stable").astype(np.int32)
