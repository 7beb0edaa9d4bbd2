"""A hash of gradients, made where they are: one pass, like that of their norm.

Two gradients with the same hash are equal bit by bit, but for chance (64 bits). The sums are of
integers, so no order of adding matters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = 1 << 22
"""Words at once; bounds memory."""
_MIXERS = (0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64))
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def gradient_hash(gradients: Iterable[Tensor], *, device: torch.device) -> str:
    """Of this rank's gradients and those of all other ranks, 16 hexadecimal digits; every rank
    calls it."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, gradient in enumerate(gradients, start=1):
        words = gradient.detach().reshape(-1)
        words = words.view(_WORDS[words.element_size()])
        for first in range(0, len(words), _CHUNK):
            part = words[first : first + _CHUNK].to(torch.int64)
            places = torch.arange(first, first + len(part), device=part.device)
            mixed = (part ^ (places * _MIXERS[0])) * _MIXERS[1]
            mixed = (mixed ^ (mixed >> 29)) * _MIXERS[0]
            total += mixed.sum() * (2 * number + 1)
    total *= 2 * dist.get_rank() + 1
    dist.all_reduce(total)
    return f"{int(total) & ((1 << 64) - 1):016x}"
