"""Which tensor goes into which bucket, and where.

Owns: the layout of buckets. Does not own: tensors, bytes, transport. Invariant: tensors keep their
order, none is split, each starts on an aligned offset, and a bucket exceeds the limit only if it
holds a single tensor that does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Bytes; a multiple of every element size, so that views of the bucket are aligned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What the plan needs to know of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tensor's bytes [start, end) in its bucket."""

    spec: TensorSpec
    start: int
    end: int


class Bucketing:
    """Fills one bucket after the other; used where tensors come one at a time."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._end = 0
        self._is_empty = True

    def place(self, spec: TensorSpec) -> Place | None:
        """Where `spec` goes in the open bucket, or None if a new bucket must be opened for it."""
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        end = start + spec.num_bytes
        if not self._is_empty and end > self._bucket_bytes:
            return None
        self._end = end
        self._is_empty = False
        return Place(spec=spec, start=start, end=end)

    def open(self) -> None:
        """Start an empty bucket."""
        self._end = 0
        self._is_empty = True


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> Iterator[tuple[Place, ...]]:
    """The buckets that hold `specs`, in order."""
    bucketing = Bucketing(bucket_bytes)
    bucket: list[Place] = []
    for spec in specs:
        place = bucketing.place(spec)
        if place is None:
            yield tuple(bucket)
            bucket = []
            bucketing.open()
            place = bucketing.place(spec)
            assert place is not None
        bucket.append(place)
    if bucket:
        yield tuple(bucket)
