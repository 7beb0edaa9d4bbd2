"""Ways of moving a set of weights to every server of a publish.

Owns: shared memory in buckets, and a folder on disk. Does not own: phases around it
(transaction). Invariant: both hand over the same bytes, and report the checksum of every tensor as
it was sent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.checksum import tensor_checksum
from outloop.engine.publish.client import ServerClient
from outloop.engine.publish.fanout import Fanout
from outloop.engine.publish.plan import Bucketing, Place, TensorSpec
from outloop.engine.publish.sglang_wire import write_bucket
from outloop.engine.publish.staging import StagingBuffer

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(slots=True)
class Fed:
    """What was handed over."""

    checksums: dict[str, str] = field(default_factory=dict)
    """Hex SHA-256 of each tensor's bytes, by Hugging Face name."""
    num_bytes: int = 0
    num_buckets: int = 0

    def add(self, name: str, content: Tensor) -> None:
        """Account for `content`, the tensor's bytes as sent (uint8)."""
        if name in self.checksums:
            raise PublishFailed(f"tensor name={name!r} was given twice; each may come once")
        self.checksums[name] = tensor_checksum(content)
        self.num_bytes += len(content)


class Transport(Protocol):
    """Moves weights; used for one publish after the other."""

    def prepare(self, named_tensors: NamedTensors, policy_version: int) -> None:
        """What can be done before servers are paused."""

    def feed(self, fanout: Fanout) -> Fed:
        """Hand over everything that `prepare` was given."""

    def close(self) -> None:
        """Remove whatever was used on the way."""


class SharedMemory:
    """Flattened buckets in shared memory: one is read by the servers while the next is filled."""

    def __init__(self, *, bucket_bytes: int, dtype: torch.dtype) -> None:
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._buffers = (StagingBuffer(), StagingBuffer())
        self._tensors: NamedTensors = ()

    def prepare(self, named_tensors: NamedTensors, policy_version: int) -> None:
        """Keep the tensors for `feed`; they are read one bucket at a time."""
        self._tensors = named_tensors

    def feed(self, fanout: Fanout) -> Fed:
        """Open the update, send every bucket, close the update."""
        fanout.run("begin", ServerClient.begin_update)
        fed = Fed()
        in_flight: dict[str, Future[None]] | None = None
        tensors, self._tensors = self._tensors, ()
        for bucket in self._buckets(tensors):
            # The other buffer's bucket was finished below, so this one is free.
            staged = self._buffers[fed.num_buckets % 2].reserve(bucket[-1][0].end)
            for place, tensor in bucket:
                target = staged[place.start : place.end].view(place.spec.dtype)
                target.view(place.spec.shape).copy_(tensor)
            if in_flight is not None:
                fanout.finish("bucket", in_flight)
            in_flight = self._send(fanout, staged, [place for place, _ in bucket])
            for place, _ in bucket:
                fed.add(place.spec.name, staged[place.start : place.end])
            fed.num_buckets += 1
        if in_flight is None:
            raise PublishFailed("there is no tensor to publish")
        fanout.finish("bucket", in_flight)
        fanout.run("end", ServerClient.end_update)
        return fed

    def close(self) -> None:
        """Remove the buffers from shared memory."""
        for buffer in self._buffers:
            buffer.close()

    def _buckets(self, tensors: NamedTensors) -> Iterator[list[tuple[Place, Tensor]]]:
        bucketing = Bucketing(self._bucket_bytes)
        bucket: list[tuple[Place, Tensor]] = []
        for name, tensor in tensors:
            spec = TensorSpec(name=name, shape=tuple(tensor.shape), dtype=self._dtype)
            place = bucketing.place(spec)
            if place is None:
                yield bucket
                bucket = []
                bucketing.open()
                place = bucketing.place(spec)
                assert place is not None
            bucket.append((place, tensor.detach()))
        if bucket:
            yield bucket

    def _send(self, fanout: Fanout, staged: Tensor, places: list[Place]) -> dict[str, Future[None]]:
        def send(client: ServerClient, deadline: float) -> None:
            # One payload per reader: each takes over a reference to the memory.
            client.update_from_bucket(write_bucket(staged, places), deadline)

        return fanout.start(send)


class Disk:
    """A Hugging Face weight file that every server reads; for servers that share a file system."""

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        self._root = folder
        self._dtype = dtype
        self._folder: Path | None = None
        self._fed = Fed()

    def prepare(self, named_tensors: NamedTensors, policy_version: int) -> None:
        """Write the file, before anything is paused.

        Raises:
            PublishFailed: it cannot be written.
        """
        self.close()
        tensors: dict[str, Tensor] = {}
        self._fed = Fed(num_buckets=1)
        for name, tensor in named_tensors:
            own = tensor.detach().to("cpu", self._dtype, copy=True).contiguous()
            self._fed.add(name, own.reshape(-1).view(torch.uint8))
            tensors[name] = own
        if not tensors:
            raise PublishFailed("there is no tensor to publish")
        self._folder = self._root / f"version_{policy_version}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, self._folder / "model.safetensors", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise PublishFailed(
                f"weights cannot be written to folder={str(self._folder)!r}: {error}"
            ) from error

    def feed(self, fanout: Fanout) -> Fed:
        """Let every server load the file."""
        folder = str(self._folder)
        fanout.run("disk", lambda client, deadline: client.update_from_disk(folder, deadline))
        self.close()
        return self._fed

    def close(self) -> None:
        """Remove the file."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
