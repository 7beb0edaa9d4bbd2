"""The checksums by which publisher and server compare weights.

Owns: their definitions. Does not own: what is compared (verify). Invariant: equal bytes give equal
checksums, wherever the tensor lies.

`xxh3_128` is the publisher's own: at memory speed it finds every accident, which is what it is for.
`sha256` is SGLang's on a CPU: the first 8 bytes of the digest.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import torch
import xxhash
from torch import Tensor

Algorithm = Literal["xxh3_128", "sha256"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
_NUM_SHA256_HEX = 16


def tensor_checksum(tensor: Tensor, algorithm: Algorithm = "xxh3_128") -> str:
    """Checksum (hex) over the tensor's elements as contiguous little-endian bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes_checksum(flat.cpu().numpy().data, algorithm)


def bytes_checksum(content: memoryview, algorithm: Algorithm) -> str:
    """Checksum (hex) of bytes."""
    if algorithm == "sha256":
        return hashlib.sha256(content).hexdigest()[:_NUM_SHA256_HEX]
    return xxhash.xxh3_128_hexdigest(content)
