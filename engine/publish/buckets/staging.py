"""Memory that buckets are copied into, for others to read.

After `close` nothing of a shared buffer is left in /dev/shm, whatever the readers did, once the
last tensor that views it is gone. If this process is killed, torch's own memory manager removes it.

torch keeps a count of references in the first bytes of the shared file, and removes the file when
the count falls to zero: one for this process, one for each payload until its reader has opened it,
one for each reader until it closes.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outloop.buffer.errors import PublishFailed

_SHARED_MEMORY = Path("/dev/shm")
_GROWTH_BYTES = 1 << 16


def start_memory_manager() -> None:
    """Start torch's manager of shared memory now, for ranks that will need it.

    It is a process that keeps what it inherits: started later, it would hold a killed rank's
    connections to the others open, and they would wait for it until their deadline.
    """
    SharedBuffer().reserve(1)


class Buffer(Protocol):
    """Grows to what is asked of it and is reused from bucket to bucket."""

    @property
    def num_bytes(self) -> int:
        """What it occupies now."""

    def reserve(self, num_bytes: int) -> Tensor:
        """The first `num_bytes` of the buffer, uint8 [num_bytes]."""

    def end(self) -> None:
        """A publish is over: its readers are done, and no view of the buffer is used again."""

    def close(self) -> None:
        """Give the memory back."""


class SharedBuffer:
    """A buffer in shared memory."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._path: Path | None = None

    @property
    def num_bytes(self) -> int:
        """What it occupies now."""
        return 0 if self._tensor is None else len(self._tensor)

    def reserve(self, num_bytes: int) -> Tensor:
        """The first `num_bytes` of the buffer, uint8 [num_bytes].

        Raises:
            PublishFailed: shared memory has no room.
        """
        if self._tensor is None or len(self._tensor) < num_bytes:
            self.close()
            self._allocate(max(_GROWTH_BYTES, num_bytes))
        assert self._tensor is not None
        return self._tensor[:num_bytes]

    def end(self) -> None:
        """It is kept for the next publish."""

    def close(self) -> None:
        """Give the memory back; readers that still have it mapped keep what they mapped."""
        tensor, self._tensor = self._tensor, None
        path, self._path = self._path, None
        if tensor is None or path is None or not path.exists():
            return
        # A reader that failed halfway leaves its reference in the count, and the file with it.
        # Unlinking the file here instead would make torch abort the process when it does the same.
        with path.open("rb") as file:
            (num_references,) = struct.unpack("i", file.read(4))
        for _ in range(num_references - 1):
            tensor.untyped_storage()._shared_decref()

    def _allocate(self, num_bytes: int) -> None:
        if _SHARED_MEMORY.is_dir():
            room = os.statvfs(_SHARED_MEMORY)
            if room.f_bavail * room.f_frsize < num_bytes:
                raise _no_room(num_bytes, f"{room.f_bavail * room.f_frsize} bytes are free")
        try:
            storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
        except RuntimeError as error:
            raise _no_room(num_bytes, str(error)) from error
        _, handle, _ = storage._share_filename_cpu_()
        self._path = _SHARED_MEMORY / handle.decode().lstrip("/")
        self._tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._claim_pages()

    def _claim_pages(self) -> None:
        """Take the pages now: a write to one that cannot be had later kills the process."""
        if self._path is None or not self._path.exists():
            return
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
        except OSError as error:
            num_bytes = self.num_bytes
            self.close()
            raise _no_room(num_bytes, str(error)) from error
        finally:
            os.close(descriptor)


class DeviceBuffer:
    """A buffer in ordinary memory of a device, CPU included.

    On a GPU it is a plain allocation: memory of a virtual-memory allocator cannot be exported.
    """

    def __init__(self, device: torch.device, *, is_exported: bool = False) -> None:
        """`is_exported`: others read it through handles, so it lives for one publish only.

        Each export of a storage adds a record that owns the one before. Freeing them is a recursion
        as deep as there were exports: 20,000 of one storage ended the process.
        """
        self._device = device
        self._is_exported = is_exported
        self._tensor: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """What it occupies now."""
        return 0 if self._tensor is None else len(self._tensor)

    def reserve(self, num_bytes: int) -> Tensor:
        """The first `num_bytes` of the buffer, uint8 [num_bytes].

        Raises:
            PublishFailed: the device has no room.
        """
        if self._tensor is None or len(self._tensor) < num_bytes:
            self._tensor = None
            try:
                self._tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                raise PublishFailed(
                    f"device={str(self._device)!r} has no room for a bucket of {num_bytes} bytes: "
                    f"{error}; lower publish.bucket_mb"
                ) from error
        return self._tensor[:num_bytes]

    def end(self) -> None:
        """Let exported memory go: to torch's allocator, from which the next publish takes it."""
        if not self._is_exported:
            return
        self.close()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Give the memory back."""
        self._tensor = None


class Staging:
    """Buffers used in turn: of two, one is filled while the other is read."""

    def __init__(self, *buffers: Buffer) -> None:
        self._buffers = buffers
        self.peak_bytes = 0
        """The most that all held at once since `reset_peak`."""

    def reserve(self, index: int, num_bytes: int) -> Tensor:
        """Room for bucket `index`, uint8 [num_bytes]; an earlier bucket lay there."""
        room = self._buffers[index % len(self._buffers)].reserve(num_bytes)
        self._count()
        return room

    def reset_peak(self) -> None:
        """Count again, from what is held now."""
        self.peak_bytes = 0
        self._count()

    def end(self) -> None:
        """A publish is over, and no view of what was reserved is used again."""
        for buffer in self._buffers:
            buffer.end()

    def close(self) -> None:
        """Give the memory back."""
        for buffer in self._buffers:
            buffer.close()

    def _count(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(b.num_bytes for b in self._buffers))


def _no_room(num_bytes: int, reason: str) -> PublishFailed:
    return PublishFailed(
        f"{_SHARED_MEMORY} has no room for a bucket of {num_bytes} bytes ({reason}); "
        'lower publish.bucket_mb or set publish.transport="disk"'
    )
