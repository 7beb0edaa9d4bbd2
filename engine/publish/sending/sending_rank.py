"""One process's part of a publish: it fills the buckets of its share and hands them over.

Every rank does what rank 0 orders, at the same time. A failure to do it is an answer, not an
exception, so that no rank is left waiting for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outloop.buffer.errors import OutloopError, PublishFailed
from outloop.engine.publish.buckets.plan import Bucket, TensorSpec, largest, plan_buckets
from outloop.engine.publish.buckets.staging import Staging
from outloop.engine.publish.flattened_bucket import write_bucket
from outloop.engine.publish.process_group import (
    Backend,
    Group,
    in_thread,
    join_group,
)
from outloop.engine.publish.sending.orders import (
    Await,
    Begin,
    Broadcast,
    Describe,
    End,
    Fill,
    Join,
    Leave,
    Order,
    Outcome,
    Release,
    Report,
    Write,
)
from outloop.engine.publish.verification.accounts import Account, accounts_for

_NOTHING = Outcome()


class ShareReader(Protocol):
    """Where this rank's tensors come from."""

    @property
    def rank(self) -> int:
        """Which share is this process's."""

    @property
    def shares(self) -> Sequence[Sequence[TensorSpec]]:
        """Of every rank, in the order in which it will be read."""

    @property
    def received_bytes(self) -> int:
        """What came from other ranks to put together what is read since `begin`."""

    def begin(self) -> None:
        """A publish begins."""

    def read(
        self, specs: Sequence[Sequence[TensorSpec]], into: Sequence[Tensor]
    ) -> Iterable[Tensor]:
        """Each rank reads its own of these tensors, given for every rank; all ranks together.

        This rank's, one at a time and in order. A tensor may be the very place in `into`; any
        other is copied there before the next is asked for.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How tensors become buckets."""

    bucket_bytes: int
    dtype: torch.dtype
    alignment: int

    def plan(self, shares: Sequence[Sequence[TensorSpec]]) -> list[list[Bucket]]:
        """The buckets of every rank's share.

        Raises:
            PublishFailed: there is no tensor, or one comes twice.
        """
        refuse_repeats([spec for share in shares for spec in share])
        return [
            list(
                plan_buckets(
                    [dataclasses.replace(spec, dtype=self.dtype) for spec in share],
                    self.bucket_bytes,
                    self.alignment,
                )
            )
            for share in shares
        ]


class SendingRank:
    """Sends this process's share, for one publish after the other; at most two buckets are held."""

    def __init__(
        self,
        reader: ShareReader,
        packing: Packing,
        staging: Staging,
        *,
        num_server_ranks: int = 1,
        is_gpu: bool = False,
        backend: Backend = "gloo",
        join: Callable[..., Group] = join_group,
    ) -> None:
        """Hold nothing yet.

        Args:
            num_server_ranks: tensor-parallel ranks of each server.
            is_gpu: servers hold their weights on GPUs.
            join: as `join_group`.
        """
        self._reader = reader
        self._packing = packing
        self._staging = staging
        self._num_server_ranks = num_server_ranks
        self._is_gpu = is_gpu
        self._backend: Backend = backend
        self._join = join
        self._plans: list[list[Bucket]] = []
        self._accounts: dict[str, Account] = {}
        self._contents: dict[int, Tensor] = {}
        """Of the buckets filled last, by index."""
        self._sent_bytes = 0
        self._group_name = ""
        self._group: Group | None = None
        self._under_way: Future[Any] | None = None

    def carry_out(self, order: Order) -> Outcome:
        """Do what rank 0 says."""
        rank = self._reader.rank
        if isinstance(order, Describe | Join | Broadcast | Await) and order.rank != rank:
            return _NOTHING
        try:
            return self._do(order)
        except OutloopError as error:
            return Outcome(error=str(error))

    def close(self) -> None:
        """Leave the group and give the memory back."""
        self._leave()
        self._contents.clear()
        self._staging.close()

    def _do(self, order: Order) -> Outcome:
        match order:
            case Begin(kinds):
                self._begin(kinds)
            case Fill(index):
                self._fill(index)
            case Describe(_, index, num_servers):
                return Outcome(payloads=self._payloads(index, num_servers))
            case Write(index, folder):
                self._write(index, Path(folder))
            case Join():
                self._group_name = order.name
                self._under_way = in_thread(partial(self._enter, order))
            case Broadcast(_, index, timeout_s):
                self._begin_broadcast(index, timeout_s)
            case Await(_, timeout_s):
                return self._await(timeout_s)
            case Leave():
                self._leave()
            case Report():
                return self._report()
            case End():
                self._contents.clear()
                self._accounts = {}
                self._staging.end()
            case Release():
                self._contents.clear()
                self._staging.close()
        return _NOTHING

    @property
    def _mine(self) -> list[Bucket]:
        return self._plans[self._reader.rank]

    def _begin(self, kinds: Sequence[str]) -> None:
        reader = self._reader
        self._plans = self._packing.plan(reader.shares)
        specs = [place.spec for bucket in self._mine for place in bucket]
        self._accounts = accounts_for(
            kinds, num_ranks=self._num_server_ranks, specs=specs, is_gpu=self._is_gpu
        )
        self._contents.clear()
        self._sent_bytes = 0
        reader.begin()
        self._staging.reset_peak()
        # Now, because a rank that found no room in `_fill` would leave the others waiting. All
        # buckets get the room of the largest, so that none is allocated again.
        for index in range(min(2, len(self._mine))):
            self._staging.reserve(index, largest(self._mine))

    def _fill(self, index: int) -> None:
        targets: list[Tensor] = []
        if index < len(self._mine):
            places = self._mine[index]
            room = self._staging.reserve(index, largest(self._mine))
            self._contents[index] = room[: places[-1].end]
            self._contents.pop(index - 2, None)
            targets = [place.view_of(self._contents[index]) for place in places]
        wanted = [
            [place.spec for place in plan[index]] if index < len(plan) else []
            for plan in self._plans
        ]
        for target, tensor in zip(targets, self._reader.read(wanted, targets), strict=True):
            # The reader may have written the tensor to its place already.
            if tensor is not target:
                target.copy_(tensor)
        if targets:
            for account in self._accounts.values():
                account.add(self._contents[index], self._mine[index])
            self._sent_bytes += sum(place.end - place.start for place in self._mine[index])

    def _payloads(self, index: int, num_servers: int) -> tuple[str, ...]:
        content, places = self._contents[index], self._mine[index]
        if content.is_cuda:
            # The copies must be complete before a reader starts. Nothing is needed afterwards:
            # torch waits for the reader's stream when the handle is released, before the answer.
            torch.cuda.current_stream(content.device).synchronize()
            # Each reader of a CUDA handle holds a reference of its own.
            return tuple(write_bucket(content, places) for _ in range(num_servers))
        return (write_bucket(content, places, num_readers=num_servers * self._num_server_ranks),)

    def _write(self, index: int, folder: Path) -> None:
        if index >= len(self._mine):
            return
        content = self._contents[index]
        tensors = {place.spec.name: place.view_of(content) for place in self._mine[index]}
        path = folder / bucket_file(self._reader.rank, index)
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise PublishFailed(
                f"weights cannot be written to folder={str(folder)!r}: {error}"
            ) from error

    def _enter(self, order: Join) -> None:
        group = self._join(
            order.host,
            order.port,
            rank=0,
            world_size=order.world_size,
            name=order.name,
            backend=self._backend,
            timeout_s=order.timeout_s,
        )
        if order.name == self._group_name:
            self._group = group
        else:
            # Complete after it was given up.
            group.close()

    def _begin_broadcast(self, index: int | None, timeout_s: float) -> None:
        group = self._group
        if group is None:
            raise PublishFailed("the group was left")
        if index is None:
            content = torch.ones(1, dtype=torch.uint8, device=group.device_type)
        else:
            content = self._contents[index]

        def broadcast() -> None:
            try:
                group.broadcast(content, timeout_s=timeout_s)
            except PublishFailed:
                # Ends the wait of the other members.
                self._leave()
                raise

        self._under_way = in_thread(broadcast)

    def _await(self, timeout_s: float) -> Outcome:
        under_way = self._under_way
        assert under_way is not None
        if not wait([under_way], timeout=max(0.0, timeout_s)).done:
            return Outcome(is_over=False)
        under_way.result()
        return _NOTHING

    def _leave(self) -> None:
        group, self._group, self._group_name = self._group, None, ""
        if group is not None:
            # Leaving a broken group blocks until what is under way in it has run out.
            in_thread(group.close)

    def _report(self) -> Outcome:
        return Outcome(
            sums={kind: account.sums() for kind, account in self._accounts.items()},
            sent_bytes=self._sent_bytes,
            received_bytes=self._reader.received_bytes,
            peak_bytes=self._staging.peak_bytes,
        )


def bucket_file(rank: int, index: int) -> str:
    """The name of the file that a rank writes a bucket to."""
    return f"model-{rank:03d}-{index:05d}.safetensors"


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
