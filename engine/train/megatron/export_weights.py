"""The model under Hugging Face names, gathered from the ranks a few tensors at a time.

All ranks call `gather` or `gather_shares` with the same names in the same order. A rank holds at
most the tensors that it reads, or one receive buffer where the destination is not contiguous; ranks
that read none allocate nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from outloop.engine.models.safetensors_folder import folder_dtype, write_folder
from outloop.engine.models.weight_map import expected_tensors, float32_tensors
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.sending.shares import Shares, share_out
from outloop.engine.train.megatron.import_weights import Part, local_parts, read_part
from outloop.engine.train.megatron.model_and_optimizer import PolicyModel, ValueModel
from outloop.engine.train.ranks.collectives import gather_bytes

_MESSAGE_BYTES = 4 * 2**20
"""Bytes of another rank's part that are received at once."""


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor, and the ranks that hold it."""

    name: str
    dim: int | None
    start: int
    stop: int
    ranks: tuple[int, ...] = ()

    def nearest(self, rank: int) -> int:
        """Which of its holders gives it to `rank`: itself if it can."""
        return rank if rank in self.ranks else self.ranks[0]


class Exports:
    """Full Hugging Face tensors of a model that is spread over the ranks.

    Made by all ranks together; on one rank nothing is copied.
    """

    def __init__(self, model: PolicyModel, *, message_bytes: int = _MESSAGE_BYTES) -> None:
        """`message_bytes`: what rank 0 needs beside the place that a tensor is written to."""
        self._model = model
        self._message_bytes = message_bytes
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._parts = {part.name: part for part in local_parts(model)}
        self._dtype = next(model.parameters()).dtype
        self._device = next(model.parameters()).device
        self._held = _who_holds_what(self._parts.values())
        self._shapes = expected_tensors(model.config)
        self._in_float32 = float32_tensors(model.config)
        self.specs = tuple(
            TensorSpec(name=name, shape=shape, dtype=self._dtype_of(name))
            for name, shape in self._shapes.items()
            # A model with one number in place of logits has no output layer.
            if name in self._held or not isinstance(model, ValueModel)
        )
        """Every tensor, in the order of a forward pass."""
        self.received_bytes = 0
        """From other ranks so far, to put tensors together here."""

    @property
    def rank(self) -> int:
        """This one."""
        return self._rank

    def shares(self, *, among: Collection[int]) -> Shares:
        """Which rank of `among` sends which tensors; the same on every rank."""
        holders = {name: [held.ranks[0] for held in parts] for name, parts in self._held.items()}
        return share_out(self.specs, holders, num_ranks=self._num_ranks, among=among)

    def gather_shares(
        self, names: Sequence[Sequence[str]], into: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """As `gather`, each rank its own: `names` are given for every rank, `into` for this one."""
        for rank, of_rank in enumerate(names):
            for index, name in enumerate(of_rank):
                place = into[index] if rank == self._rank else None
                tensor = self._gather(name, place, to=rank)
                if tensor is not None:
                    yield tensor

    def gather(
        self, names: Sequence[str], into: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """The tensors of `names`: on rank 0 one after the other, on the others nothing.

        A tensor may be a view of the model's memory: use it before the next update. One that is put
        together from several ranks is written into its place in `into`, of any dtype, if given.
        """
        for index, name in enumerate(names):
            tensor = self._gather(name, None if into is None else into[index], to=0)
            if tensor is not None:
                yield tensor

    def send(self, names: Sequence[str]) -> None:
        """What a rank other than 0 does while rank 0 gathers."""
        for _ in self.gather(names):
            raise AssertionError("only rank 0 receives")

    def spread(self, names: Sequence[str], into: Sequence[Tensor]) -> None:
        """The tensors of `names` whole on every rank, each in its place, of any dtype; all ranks
        together. A rank holds one message beside its places."""
        for name, place in zip(names, into, strict=True):
            mine, dtype = self._parts.get(name), self._dtype_of(name)
            for held in self._held[name]:
                cut = place
                if held.dim is not None:
                    cut = place.narrow(held.dim, held.start, held.stop - held.start)
                source: Sequence[Tensor | None] = ()
                sender = held.ranks[0]
                if sender == self._rank:
                    assert mine is not None
                    source = self._messages(read_part(self._model, mine), dtype)
                targets = self._messages(cut, dtype)
                for target, rows in zip(targets, source or [None] * len(targets), strict=True):
                    if self._num_ranks > 1:
                        message = torch.empty(target.shape, dtype=dtype, device=self._device)
                        if rows is not None:
                            message.copy_(rows)
                        dist.broadcast(message, src=sender)
                        rows = message
                    assert rows is not None
                    target.copy_(rows)

    def save(self, folder: Path, *, source: Path) -> None:
        """Write the model as a Hugging Face folder; all ranks take part, rank 0 writes.

        Tensors have the dtype that the configuration in `source` names. The folder appears
        complete or not at all; one shard of it at a time is in memory.
        """
        dtype = folder_dtype(source)
        if self._rank:
            self.send([spec.name for spec in self.specs])
            return
        specs = [
            s if s.name in self._in_float32 else TensorSpec(name=s.name, shape=s.shape, dtype=dtype)
            for s in self.specs
        ]
        write_folder(folder, specs, self.gather, source=source)

    def _gather(self, name: str, place: Tensor | None, *, to: int) -> Tensor | None:
        """The tensor on rank `to`, nothing on the others."""
        parts = self._held[name]
        mine = self._parts.get(name)
        dtype = self._dtype_of(name)
        if self._rank != to:
            if any(held.nearest(to) == self._rank for held in parts):
                assert mine is not None
                for rows in self._messages(read_part(self._model, mine), dtype):
                    dist.send(rows.contiguous(), dst=to)
            return None
        if mine is not None and mine.dim is None:
            return read_part(self._model, mine)
        whole = place
        if whole is None:
            whole = torch.empty(self._shapes[name], dtype=dtype, device=self._device)
        for held in parts:
            cut = whole
            if held.dim is not None:
                cut = whole.narrow(held.dim, held.start, held.stop - held.start)
            sender = held.nearest(to)
            if sender == to:
                assert mine is not None
                cut.copy_(read_part(self._model, mine))
            else:
                self._receive(cut, sender, dtype)
        return whole

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._in_float32 else self._dtype

    def _receive(self, cut: Tensor, rank: int, dtype: torch.dtype) -> None:
        for rows in self._messages(cut, dtype):
            self.received_bytes += rows.numel() * dtype.itemsize
            is_fit = rows.is_contiguous() and rows.dtype == dtype
            if is_fit and rows.device == self._device:
                dist.recv(rows, src=rank)
            else:
                message = torch.empty(rows.shape, dtype=dtype, device=self._device)
                dist.recv(message, src=rank)
                rows.copy_(message)

    def _messages(self, part: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Views of the part's rows; sender and receiver cut alike, by its shape and dtype alone."""
        row_bytes = part[0].numel() * dtype.itemsize
        return part.split(max(1, self._message_bytes // max(1, row_bytes)))


def _who_holds_what(parts: Iterable[Part]) -> dict[str, list[_Held]]:
    """Every part of every tensor once, with the ranks that hold it in their order."""
    mine = [_Held(part.name, part.dim, part.start, part.stop) for part in parts]
    found: dict[str, dict[int, _Held]] = {}
    for rank, data in enumerate(gather_bytes(msgspec.msgpack.encode(mine))):
        for held in msgspec.msgpack.decode(data, type=list[_Held]):
            if held.start == held.stop:
                continue
            of_name = found.setdefault(held.name, {})
            before = of_name.get(held.start, held)
            of_name[held.start] = msgspec.structs.replace(before, ranks=(*before.ranks, rank))
    return {name: list(by_start.values()) for name, by_start in found.items()}
