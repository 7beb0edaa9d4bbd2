"""SGLang's hash of a tensor that lies on a GPU, in plain torch on any device.

The result depends on the bytes alone, not on how they were divided among calls of `update`.

Restates sglang/kernels/ops/memory/gpu_tensor_hash.py of 0.5.23: two sums of mixed 32-bit words for
every tile of 8,192 words, the mixer being that of MurmurHash3, and their sum finished as in
splitmix64. Numbers are unsigned there; here they are kept in 64 bits and masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK32)
_POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
_ROTATIONS = (15, 13)
_TILE = 8192
"""Words."""
_WORD_BYTES = 4
_CHUNK_TILES = 256
"""What is mixed at once; bounds memory, which is 64 times that of the words."""


class GpuHash:
    """The hash of one tensor's bytes, given piece by piece."""

    def __init__(self) -> None:
        self._num_words = 0
        self._rest = torch.empty(0, dtype=torch.uint8)
        """Bytes that do not make a word yet."""
        self._sums: list[Tensor] = []
        """[2, tiles] of pieces; the last of one and the first of the next may be the same tile."""
        self._open: Tensor | None = None
        """[2, 1], of the tile that the next piece goes on with."""

    def update(self, content: Tensor) -> None:
        """The next bytes (uint8)."""
        if len(self._rest):
            content = torch.cat([self._rest.to(content.device), content])
        num = len(content) // _WORD_BYTES * _WORD_BYTES
        self._rest = content[num:].clone()
        words = _words(content[:num])
        while len(words):
            room = _CHUNK_TILES * _TILE - self._num_words % _TILE
            self._mix(words[:room])
            words = words[room:]

    def hexdigest(self) -> str:
        """The hash of all that came, 16 hexadecimal digits."""
        if len(self._rest):
            missing = self._rest.new_zeros(_WORD_BYTES - len(self._rest))
            self.update(missing)
        if not self._num_words:
            return f"{0:016x}"
        sums = self._sums if self._open is None else [*self._sums, self._open]
        ended = _mix32(torch.cat(sums, dim=1) ^ (self._num_words * _WORD_BYTES & _MASK32))
        high, low = (int(half) for half in ended.sum(dim=1))
        return f"{_finish(((high << 32) + low) & _MASK64):016x}"

    def _mix(self, words: Tensor) -> None:
        """Add words, at most a few tiles of them, to the sums of their tiles."""
        before = self._num_words % _TILE
        after = -(before + len(words)) % _TILE
        index = torch.arange(self._num_words, self._num_words + len(words), device=words.device)
        index &= _MASK32
        rows = []
        for factor, seed, turn in zip(_POSITION_FACTORS, _SEEDS, _ROTATIONS, strict=True):
            place = (index * factor + seed) & _MASK32
            place ^= (index << turn | index >> (32 - turn)) & _MASK32
            mixed = torch.nn.functional.pad(_mix32(words ^ place), (before, after))
            rows.append(mixed.view(-1, _TILE).sum(dim=1))
        sums = torch.stack(rows)
        if self._open is not None:
            sums[:, :1] += self._open
        sums &= _MASK32
        self._num_words += len(words)
        self._open = sums[:, -1:] if after else None
        self._sums.append(sums[:, :-1] if after else sums)


def _words(content: Tensor) -> Tensor:
    """Little-endian 32-bit words, unsigned in int64."""
    if content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    return content.view(torch.int32).to(torch.int64) & _MASK32


def _mix32(values: Tensor) -> Tensor:
    """MurmurHash3's finalizer of 32 bits."""
    values = values ^ values >> 16
    values = values * 0x85EBCA6B & _MASK32
    values = values ^ values >> 13
    values = values * 0xC2B2AE35 & _MASK32
    return values ^ values >> 16


def _finish(value: int) -> int:
    """splitmix64's finalizer."""
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & _MASK64
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31
