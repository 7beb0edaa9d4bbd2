"""Shared memory that buckets are copied into for servers on this machine to read.

Owns: two buffers, their growth and removal. Does not own: what lies in them (plan), who reads them
(transaction). Invariant: after `close` nothing of it is left in /dev/shm, whatever the readers did,
once the last tensor that views it is gone; if this process is killed, torch's own memory manager
removes it.

torch keeps a count of references in the first bytes of the shared file, and removes the file when
the count falls to zero: one for this process, one for each payload until its reader has opened it,
one for each reader until it closes.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import torch
from torch import Tensor

from outloop.buffer.errors import PublishFailed

_SHARED_MEMORY = Path("/dev/shm")
_GROWTH_BYTES = 1 << 16


class StagingBuffer:
    """One buffer that grows to what is asked of it and is reused from publish to publish."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._path: Path | None = None

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
        # Without this a write past the file system's end kills the process.
        if _SHARED_MEMORY.is_dir():
            room = os.statvfs(_SHARED_MEMORY)
            if room.f_bavail * room.f_frsize < num_bytes:
                raise PublishFailed(
                    f"{_SHARED_MEMORY} has {room.f_bavail * room.f_frsize} bytes free, a bucket "
                    f'needs {num_bytes}; lower publish.bucket_mb or set publish.transport="disk"'
                )
        storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
        _, handle, _ = storage._share_filename_cpu_()
        self._path = _SHARED_MEMORY / handle.decode().lstrip("/")
        self._tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
