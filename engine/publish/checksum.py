"""The checksum by which publisher and server compare weights.

Owns: its definition. Does not own: what is compared (transaction). Invariant: equal elements in
equal dtype give equal checksums, wherever the tensor lies.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def tensor_checksum(tensor: Tensor) -> str:
    """SHA-256 (hex) over the tensor's elements as contiguous little-endian bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().data).hexdigest()
