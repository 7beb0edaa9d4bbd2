"""Filling buckets from a source, one ahead of the servers.

Owns: what is in staging at any time, and the account of what was handed over. Does not own: layout
(plan), memory (staging), who reads it (transports). Invariant: at most two buckets are held; a
bucket's memory is written again only after `filled` has been asked for the bucket after the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.plan import Bucket, TensorSpec, largest, plan_buckets
from outloop.engine.publish.source import TensorSource
from outloop.engine.publish.staging import Staging
from outloop.engine.publish.verify import Account


@dataclass(frozen=True, slots=True)
class Filled:
    """A bucket whose tensors lie in `content` [bytes], uint8, at `places`."""

    content: Tensor
    places: Bucket


@dataclass(slots=True)
class Fed:
    """What was handed over."""

    accounts: Mapping[str, Account]
    """What will be compared with servers of each kind."""
    num_bytes: int = 0
    num_buckets: int = 0
    peak_bytes: int = 0
    """The most that staging held at once."""
    bucket_bytes: int = 0
    """Size of the largest bucket."""

    def add(self, bucket: Filled) -> None:
        """Account for a bucket."""
        self.num_buckets += 1
        for place in bucket.places:
            content = bucket.content[place.start : place.end]
            self.num_bytes += len(content)
            for account in self.accounts.values():
                account.add(place.spec, content)


class Filler:
    """The buckets of one pass over a source, in `dtype`."""

    def __init__(
        self,
        source: TensorSource,
        staging: Staging,
        *,
        bucket_bytes: int,
        dtype: torch.dtype,
        alignment: int,
    ) -> None:
        """Plan.

        Raises:
            PublishFailed: there is no tensor, or one comes twice.
        """
        specs = [dataclasses.replace(spec, dtype=dtype) for spec in source.specs]
        _refuse_repeats(specs)
        self._source = source
        self._staging = staging
        self._buckets = list(plan_buckets(specs, bucket_bytes, alignment))
        self._index = 0
        self._next: Filled | None = None
        self.max_bytes = largest(self._buckets)
        staging.reset_peak()

    @property
    def peak_bytes(self) -> int:
        """The most that staging held at once in this pass."""
        return self._staging.peak_bytes

    def fill_first(self) -> None:
        """Fill the first bucket now, so that nobody is paused meanwhile."""
        if self._next is None and self._index == 0:
            self._next = self._fill()

    def filled(self) -> Generator[Filled, None, None]:
        """The buckets; the source's pass ends with the last, or when this is closed."""
        try:
            while self._next is not None or self._index < len(self._buckets):
                bucket, self._next = self._next or self._fill(), None
                yield bucket
        finally:
            self.close()

    def close(self) -> None:
        """End the source's pass."""
        self._source.end()

    def _fill(self) -> Filled:
        places = self._buckets[self._index]
        # All buckets get the room of the largest, so that none is allocated again.
        content = self._staging.reserve(self._index, self.max_bytes)[: places[-1].end]
        tensors = self._source.read([place.spec for place in places])
        for place, tensor in zip(places, tensors, strict=True):
            target = content[place.start : place.end].view(place.spec.dtype)
            target.view(place.spec.shape).copy_(tensor)
        self._index += 1
        return Filled(content, places)


def _refuse_repeats(specs: list[TensorSpec]) -> None:
    if not specs:
        raise PublishFailed("there is no tensor to publish")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise PublishFailed(f"tensor name={spec.name!r} was given twice; each may come once")
        seen.add(spec.name)
