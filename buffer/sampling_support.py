"""Among which ids each token of a turn was sampled, where that was not the whole vocabulary.

A distribution that top-p, top-k, min-p or a grammar cut is known if what was left is: over the same
ids the trainer computes its own logprobs (DeepSeek-V3.2, arXiv:2512.02556, "keep sampling mask").
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from outloop.buffer.errors import RecordError

MAX_COUNT = 2**16 - 1
"""The most ids of one token that a record can hold."""


class SamplingSupport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The ids among which each output token of a turn was sampled.

    Example: `SamplingSupport.of([[5, 7], [], [9]])`: the second token's are not known.
    """

    num_ids: bytes
    """uint16 [O]: how many of each token; 0: not known."""
    data: bytes
    """Those ids, token after token; uint16, or uint32 where one of them needs it."""

    def __post_init__(self) -> None:
        total = int(self.counts.sum()) if len(self.num_ids) % 2 == 0 else -1
        if total < 0 or len(self.data) not in (2 * total, 4 * total):
            raise RecordError(
                f"support: {len(self.num_ids)} bytes of counts do not describe {len(self.data)} "
                "bytes of ids"
            )

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]]) -> SamplingSupport:
        """Pack the ids of each token; an empty list: not known."""
        counts = [len(some) for some in ids]
        flat = np.fromiter((one for some in ids for one in some), np.int64, sum(counts))
        if max(counts, default=0) > MAX_COUNT or (len(flat) and flat.min() < 0):
            raise RecordError(
                f"support: at most {MAX_COUNT} ids a token are allowed, none of them negative"
            )
        is_short = not len(flat) or flat.max() < 2**16
        return cls(
            num_ids=np.asarray(counts, "<u2").tobytes(),
            data=flat.astype("<u2" if is_short else "<u4").tobytes(),
        )

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[O]: how many ids each token was sampled among; 0: not known."""
        return np.frombuffer(self.num_ids, "<u2").astype(np.int64)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """[sum of counts], token after token."""
        total = int(self.counts.sum())
        return np.frombuffer(self.data, "<u4" if len(self.data) == 4 * total else "<u2").astype(
            np.int32
        )

    def lists(self) -> list[list[int]]:
        """The ids by token, as `of` takes them."""
        ends = np.cumsum(self.counts)
        return [part.tolist() for part in np.split(self.ids, ends[:-1])] if len(ends) else []
