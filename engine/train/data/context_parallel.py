"""Which tokens of a packed row each context-parallel rank computes.

Every token of the padded row is on exactly one rank, and ranks have equally many. Of C ranks, rank
r has chunks r and 2C - 1 - r of the 2C equal chunks of each sample, as Transformer Engine's
attention expects: under a causal mask their work is equal (Dubey et al. 2024, arXiv:2407.21783,
section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPlace:
    """This rank's place among those that share each sample's tokens."""

    rank: int = 0
    num_ranks: int = 1

    def padded_length(self, length: int) -> int:
        """Tokens of a sample that can be cut into 2C equal chunks; on one rank as it is."""
        return length if self.num_ranks == 1 else length + -length % (2 * self.num_ranks)

    def row_multiple(self, multiple: int) -> int:
        """What the row's tokens must be a multiple of, for each rank to have one of `multiple`."""
        if self.num_ranks == 1:
            return multiple
        return math.lcm(2 * self.num_ranks, self.num_ranks * multiple)

    def places(self, lengths: Sequence[int]) -> npt.NDArray[np.int64]:
        """Where this rank's tokens lie in a row of samples of padded `lengths`, in row order.

        Raises:
            ValueError: a length is not padded.
        """
        if self.num_ranks == 1:
            return np.arange(sum(lengths), dtype=np.int64)
        num_chunks = 2 * self.num_ranks
        found: list[npt.NDArray[np.int64]] = []
        start = 0
        for length in lengths:
            if length % num_chunks:
                raise ValueError(f"length={length}; a multiple of {num_chunks} is allowed")
            size = length // num_chunks
            for chunk in (self.rank, num_chunks - 1 - self.rank):
                first = start + chunk * size
                found.append(np.arange(first, first + size, dtype=np.int64))
            start += length
        return np.concatenate(found) if found else np.zeros(0, np.int64)
