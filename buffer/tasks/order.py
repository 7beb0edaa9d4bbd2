"""The order in which one list of tasks is played.

The same arguments give the same answer in every process and release.
"""

from __future__ import annotations

import functools
from math import isqrt

import numpy as np

from outloop.buffer.records import Int32

STORED_ORDER_TASKS = 1 << 18
"""Longer lists have an order that is computed slot by slot: one that is stored takes seconds and
hundreds of megabytes for ten million tasks, in every router and at every epoch."""
_ROUNDS = 8
_MASK = 2**64 - 1


def task_index(slot: int, num_tasks: int, seed: int) -> int:
    """The task that `slot` plays, 0 <= index < num_tasks.

    Guarantees that slots [k * num_tasks, (k + 1) * num_tasks) play every task once, in an order
    that depends on (seed, k) only.
    """
    epoch, position = divmod(slot, num_tasks)
    if num_tasks > STORED_ORDER_TASKS:
        return _permuted(position, num_tasks, seed, epoch)
    return int(_epoch_order(epoch, num_tasks, seed)[position])


@functools.lru_cache(maxsize=32)
def _epoch_order(epoch: int, num_tasks: int, seed: int) -> Int32:
    # Philox with an explicit key: numpy promises its stream, unlike that of default_rng.
    generator = np.random.Generator(_philox(epoch, seed))
    keys = generator.integers(0, 2**63, size=num_tasks, dtype=np.int64)
    return np.argsort(keys, kind="stable").astype(np.int32)


def _permuted(position: int, num_tasks: int, seed: int, epoch: int) -> int:
    """A Feistel network over the smallest square that holds all positions. What leaves the list is
    permuted again until it is inside, which leaves a permutation of the list (Black and Rogaway
    2002, "Ciphers with arbitrary finite domains")."""
    side = isqrt(num_tasks - 1) + 1
    keys = _round_keys(seed, epoch)
    while True:
        left, right = divmod(position, side)
        for round_key in keys:
            left, right = right, (left + _mixed(right ^ round_key)) % side
        position = left * side + right
        if position < num_tasks:
            return position


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(int(word) for word in _philox(epoch, seed).random_raw(_ROUNDS))


def _philox(epoch: int, seed: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64))


def _mixed(value: int) -> int:
    """The finalizer of SplitMix64: every bit of 64 changes half of the others."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
