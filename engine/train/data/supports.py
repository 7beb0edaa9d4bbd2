"""Among which ids tokens were sampled, as a ragged column.

Shape letters: T tokens, S ids of all of them, N some tokens, K ids of the one with the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outloop.buffer.records import Int32

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Supports:
    """The ids among which each of some tokens was sampled; of none: among the whole vocabulary."""

    starts: Int64
    """[T + 1] int64: token t has ids starts[t] to starts[t + 1]."""
    ids: Int32
    """[S] int32."""

    @classmethod
    def of(cls, counts: npt.NDArray[np.integer], ids: Int32) -> Supports:
        """From the number of ids of each token [T], and the ids."""
        return cls(np.concatenate(([0], np.cumsum(counts, dtype=np.int64))), ids)

    @classmethod
    def whole(cls, num_tokens: int) -> Supports:
        """Of tokens that were sampled among all ids."""
        return cls(np.zeros(num_tokens + 1, np.int64), np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, where: slice) -> Supports:
        """Tokens that follow each other."""
        first, last, _ = where.indices(len(self))
        starts = self.starts[first : max(first, last) + 1]
        return Supports(starts - starts[0], self.ids[starts[0] : starts[-1]])

    @property
    def counts(self) -> Int64:
        """[T]: how many ids each token has; 0: all."""
        return np.diff(self.starts)

    def at(self, places: Int64) -> Supports:
        """Of single tokens, in the order of `places`."""
        counts = self.counts[places]
        starts = np.concatenate(([0], np.cumsum(counts)))
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        return Supports(starts, self.ids[np.repeat(self.starts[:-1][places], counts) + within])

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The ids [N, K] int64, 0 where a token has fewer, and where there are some [N, K] bool."""
        counts = self.counts
        is_kept = np.arange(counts.max(initial=0)) < counts[:, None]
        ids = np.zeros(is_kept.shape, np.int64)
        ids[is_kept] = self.ids
        return torch.from_numpy(ids).to(device), torch.from_numpy(is_kept).to(device)


def joined_supports(parts: Sequence[Supports | None], lengths: Sequence[int]) -> Supports | None:
    """Those of several rows behind each other; rows of None were sampled among all ids."""
    if all(part is None for part in parts):
        return None
    known = [
        Supports.whole(length) if part is None else part
        for part, length in zip(parts, lengths, strict=True)
    ]
    counts = np.concatenate([part.counts for part in known])
    return Supports.of(counts, np.concatenate([part.ids for part in known]))
