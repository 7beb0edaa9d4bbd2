"""Filling buckets from a source, one ahead of the servers.

Owns: what is in staging at any time, and the account of what was sent. Does not own: layout
(plan), memory (staging), who reads it (transports). Invariant: at most two buckets are held; a
bucket's memory is written again only after `filled` has been asked for the bucket after the next.
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

OnCopied = Callable[[Tensor, Bucket], None]
"""Called with a bucket's content and some of its places."""
_COPIED_BYTES = 1 << 22
"""Copied before `on_copied` is called: few enough to be in the caches when they are read again."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A bucket whose tensors lie in `content` [bytes], uint8, at `places`."""

    content: Tensor
    places: Bucket


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

    def account(self, content: Tensor, places: Bucket) -> None:
        """Account for some of the tensors of a bucket."""
        for account in self.accounts.values():
            account.add(content, places)


class Layout:
    """The buckets of one model in `dtype`; the same for every pass."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        *,
        bucket_bytes: int,
        dtype: torch.dtype,
        alignment: int,
    ) -> None:
        """Plan.

        Raises:
            PublishFailed: there is no tensor, or one comes twice.
        """
        self.specs = specs
        planned = [dataclasses.replace(spec, dtype=dtype) for spec in specs]
        _refuse_repeats(planned)
        self.buckets: Sequence[Bucket] = list(plan_buckets(planned, bucket_bytes, alignment))
        self._views: dict[int, tuple[int, list[Tensor]]] = {}

    def views(self, index: int, content: Tensor) -> list[Tensor]:
        """Where the tensors of bucket `index` are to be written, which lies in `content`."""
        address, views = self._views.get(index, (0, []))
        if address != content.data_ptr() or not views:
            views = [
                content[place.start : place.end].view(place.spec.dtype).view(place.spec.shape)
                for place in self.buckets[index]
            ]
            self._views[index] = content.data_ptr(), views
        return views

    def forget_views(self) -> None:
        """Let go of the memory that was written to."""
        self._views.clear()


class Filler:
    """The buckets of one pass over a source, as laid out."""

    def __init__(
        self,
        source: TensorSource,
        staging: Staging,
        layout: Layout,
        *,
        on_copied: OnCopied,
    ) -> None:
        """`on_copied` is called with tensors soon after they were copied, all of them, in order."""
        self._on_copied = on_copied
        self._source = source
        self._staging = staging
        self._layout = layout
        self._buckets = layout.buckets
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
        targets = self._layout.views(self._index, content)
        tensors = self._source.read([place.spec for place in places], targets)
        first = 0
        for last, (target, tensor) in enumerate(zip(targets, tensors, strict=True), 1):
            # A source may have written the tensor to its place already.
            if tensor is not target:
                target.copy_(tensor)
            if last == len(places) or places[last].start - places[first].start >= _COPIED_BYTES:
                self._on_copied(content, places[first:last])
                first = last
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
