"""Memory of the host that is registered with CUDA, so that copies to and from a device are fast."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor


class Cudart(Protocol):
    """CUDA's runtime, as `torch.cuda.cudart()` gives it."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:  # noqa: N802
        """Pin pages; an error code, 0 if it worked."""

    def cudaHostUnregister(self, address: int) -> Any:  # noqa: N802
        """Let pinned pages go."""


def host_bytes(size: int, cudart: Cudart | None) -> Tensor:
    """Give `size` bytes on the host, registered with CUDA for as long as the tensor lives.

    Pages that are freed while they are registered would stay pinned. `pin_memory` is not used: it
    rounds up to a power of two, and 33 GB of moments would take 64.

    Args:
        cudart: None: the bytes are not registered.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if cudart is None or not size:
        return memory
    address = memory.data_ptr()
    # A registration that fails leaves memory that is as good and slower.
    if int(cudart.cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory
