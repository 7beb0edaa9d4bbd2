"""Which tensor goes into which bucket, and where.

Tensors keep their order, none is split, and each starts on an aligned offset. A bucket exceeds the
limit only if it holds a single tensor that does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; a multiple of every element size, so that views of the bucket are aligned."""
PACKED = 1
"""No gaps: the layout that SGLang expects of a bucket received from a group."""


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

    def view_of(self, content: Tensor) -> Tensor:
        """The tensor as it lies in a bucket's `content`, uint8 [bytes]."""
        return content[self.start : self.end].view(self.spec.dtype).view(self.spec.shape)


Bucket = tuple[Place, ...]


def plan_buckets(
    specs: Iterable[TensorSpec], bucket_bytes: int, alignment: int = ALIGNMENT
) -> Iterator[Bucket]:
    """The buckets that hold `specs`, in order.

    With `alignment` PACKED, offsets are multiples of the element size if all specs have one dtype.
    """
    bucket: list[Place] = []
    for spec in specs:
        size = spec.num_bytes
        start = -(-bucket[-1].end // alignment) * alignment if bucket else 0
        if bucket and start + size > bucket_bytes:
            yield tuple(bucket)
            bucket, start = [], 0
        bucket.append(Place(spec=spec, start=start, end=start + size))
    if bucket:
        yield tuple(bucket)


def largest(buckets: Sequence[Bucket]) -> int:
    """Bytes of the largest bucket."""
    return max((bucket[-1].end for bucket in buckets), default=0)
