"""Copying tensors, with a checksum of what was written on the way.

Owns: how bytes are copied and hashed in one walk over memory. Does not own: which tensors are
copied, what the checksum is compared with (verify). Invariant: a checksum is of the bytes as they
were read back from where they were written, never of those that were to be written.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from outloop.engine.publish.verification.checksum import tensor_bytes, tensor_checksum

Bytes = npt.NDArray[np.uint8]
_NUMPY_DTYPES = frozenset({torch.float32, torch.float16, torch.float64, torch.int64, torch.int32})
_PIECE_BYTES = 1 << 19
"""Copied before it is hashed: source and target of a piece fit in a core's own cache together."""


def copy_tensor(target: Tensor, tensor: Tensor) -> None:
    """`target[...] = tensor`, of the same shape; any dtypes and devices."""
    same = _same_bytes(target, tensor)
    if same is None:
        target.copy_(tensor)
    else:
        np.copyto(*same)


def copy_hashed(target: Tensor, tensor: Tensor) -> str:
    """As `copy_tensor`; returns the xxh3_128 (hex) of what `target` then holds.

    Bytes that go over unchanged are hashed in the cache, a piece at a time, so memory is not read
    again for them. `tensor` may be `target` itself, which is hashed as it is.
    """
    if tensor is target:
        return tensor_checksum(target)
    same = _same_bytes(target, tensor)
    if same is None:
        target.copy_(tensor)
        return tensor_checksum(target)
    to, source = same
    if len(to) <= _PIECE_BYTES:
        np.copyto(to, source)
        return xxhash.xxh3_128_hexdigest(to.data)
    digest = xxhash.xxh3_128()
    for start in range(0, len(to), _PIECE_BYTES):
        held = to[start : start + _PIECE_BYTES]
        np.copyto(held, source[start : start + _PIECE_BYTES])
        digest.update(held.data)
    return digest.hexdigest()


def _same_bytes(target: Tensor, tensor: Tensor) -> tuple[Bytes, Bytes] | None:
    """The memory of both as bytes, if copying them is to copy the tensor."""
    is_same = target.dtype is tensor.dtype and target.shape == tensor.shape
    is_here = target.is_cpu and tensor.is_cpu
    if not (is_same and is_here and target.is_contiguous() and tensor.is_contiguous()):
        return None
    return _bytes(target), _bytes(tensor)


def _bytes(tensor: Tensor) -> Bytes:
    held: Bytes
    if tensor.dtype in _NUMPY_DTYPES:
        # A third of what the way below takes, which counts where tensors are small.
        held = tensor.detach().numpy().reshape(-1).view(np.uint8)
        return held
    held = np.asarray(tensor_bytes(tensor))
    return held
