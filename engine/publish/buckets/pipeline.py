"""Filling buckets from a source, one bucket ahead of the servers.

At most two buckets are held. A bucket's memory is written again only after `filled` has been asked
for the bucket after the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.plan import Bucket, TensorSpec, largest, plan_buckets
from outloop.engine.publish.buckets.staging import Staging
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.publish.verification.accounts import Account


@dataclass(frozen=True, slots=True)
class Filled:
    """A bucket whose tensors lie in `content` [bytes], uint8, at `places`."""

    content: Tensor
    places: Bucket


OnFilled = Callable[[Filled], None]


@dataclass(slots=True)
class Sent:
    """What was sent."""

    accounts: Mapping[str, Account]
    """What will be compared with servers of each kind."""
    num_bytes: int = 0
    num_buckets: int = 0
    peak_bytes: int = 0
    """The most that staging held at once."""
    bucket_bytes: int = 0
    """Size of the largest bucket."""

    def count(self, bucket: Filled) -> None:
        """One more bucket."""
        self.num_buckets += 1
        self.num_bytes += sum(place.end - place.start for place in bucket.places)

    def account(self, bucket: Filled) -> None:
        """Account for the tensors of a bucket."""
        for account in self.accounts.values():
            account.add(bucket.content, bucket.places)


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
        on_filled: OnFilled,
    ) -> None:
        """Plan; `on_filled` is called with each bucket before it is given.

        Raises:
            PublishFailed: there is no tensor, or one comes twice.
        """
        planned = [dataclasses.replace(spec, dtype=dtype) for spec in source.specs]
        refuse_repeats(planned)
        self._buckets = list(plan_buckets(planned, bucket_bytes, alignment))
        self._on_filled = on_filled
        self._source = source
        self._staging = staging
        self._index = 0
        self._next: Filled | None = None
        self.max_bytes = largest(self._buckets)
        staging.reset_peak()

    @property
    def peak_bytes(self) -> int:
        """The most that staging held at once in this pass."""
        return self._staging.peak_bytes

    def fill_first(self) -> None:
        """Fill the first bucket now, before servers are paused."""
        if self._next is None and self._index == 0:
            self._next = self._fill()

    def filled(self) -> Iterator[Filled]:
        """The buckets, in order."""
        while self._next is not None or self._index < len(self._buckets):
            bucket, self._next = self._next or self._fill(), None
            yield bucket

    def _fill(self) -> Filled:
        places = self._buckets[self._index]
        # All buckets get the room of the largest, so that none is allocated again.
        content = self._staging.reserve(self._index, self.max_bytes)[: places[-1].end]
        targets = [place.view_of(content) for place in places]
        tensors = self._source.read([place.spec for place in places], targets)
        for target, tensor in zip(targets, tensors, strict=True):
            # A source may have written the tensor to its place already.
            if tensor is not target:
                target.copy_(tensor)
        self._index += 1
        bucket = Filled(content, places)
        self._on_filled(bucket)
        return bucket


def refuse_repeats(specs: Sequence[TensorSpec]) -> None:
    """Refuse what cannot be planned.

    Raises:
        PublishFailed: there is no tensor, or one comes twice.
    """
    if not specs:
        raise PublishFailed("there is no tensor to publish")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise PublishFailed(f"tensor name={spec.name!r} was given twice; each may come once")
        seen.add(spec.name)
