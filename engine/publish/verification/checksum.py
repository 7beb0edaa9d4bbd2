"""The checksums by which publisher and server compare weights.

Equal bytes give equal checksums, wherever the tensor lies. `xxh3_128` is the publisher's own: it
finds every accident at memory speed. `sha256` is SGLang's on a CPU: the first 8 bytes of the
digest.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

Algorithm = Literal["xxh3_128", "sha256"]
_NUM_SHA256_HEX = 16


class Sha256:
    """SGLang's checksum on a CPU, of bytes given piece by piece."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, content: Tensor) -> None:
        """The next bytes (uint8, on the CPU)."""
        self._digest.update(tensor_array(content).data)

    def hexdigest(self) -> str:
        """16 hexadecimal digits over all bytes given."""
        return self._digest.hexdigest()[:_NUM_SHA256_HEX]


def tensor_checksum(tensor: Tensor, algorithm: Algorithm = "xxh3_128") -> str:
    """Checksum (hex) over the tensor's elements as contiguous little-endian bytes."""
    return bytes_checksum(tensor_bytes(tensor), algorithm)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements as contiguous little-endian bytes: its own memory where it is such."""
    # One element may have any stride and be contiguous; as bytes it needs the plain one.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return tensor_array(flat.cpu()).data


class _Memory:
    """Memory of a CPU tensor as numpy takes it.

    `Tensor.numpy` would fix the size of the storage for good, and a trainer that shares its device
    could not leave it any more.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def tensor_array(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous tensor on the CPU: its own memory, which it keeps alive."""
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    return np.asarray(_Memory(tensor))


def bytes_checksum(content: memoryview, algorithm: Algorithm) -> str:
    """Checksum (hex) of bytes."""
    if algorithm == "sha256":
        return hashlib.sha256(content).hexdigest()[:_NUM_SHA256_HEX]
    return xxhash.xxh3_128_hexdigest(content)
