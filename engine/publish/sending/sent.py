"""What a publish sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outloop.engine.publish.buckets.plan import Bucket, largest
from outloop.engine.publish.sending.orders import Report, Sums
from outloop.engine.publish.sending.ranks import OrderedRanks


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Weight bytes that one trainer rank moved in a publish."""

    sent_bytes: int
    """To each server."""
    received_bytes: int
    """From other trainer ranks, to put tensors together."""


@dataclass(slots=True)
class Sent:
    """What was sent."""

    sums: Sums = field(default_factory=dict)
    """What will be compared with servers of each kind."""
    num_bytes: int = 0
    num_buckets: int = 0
    peak_bytes: int = 0
    """The most that staging held at once, on one rank."""
    bucket_bytes: int = 0
    """Size of the largest bucket."""
    ranks: tuple[RankTraffic, ...] = ()
    """Of each trainer rank; empty where each had all of the weights."""

    def complete(self, ranks: OrderedRanks, plans: Sequence[Sequence[Bucket]]) -> None:
        """Have the ranks say what they sent.

        Raises:
            PublishFailed: the checksums of one are not complete.
        """
        outcomes = ranks.all(Report())
        for outcome in outcomes:
            for kind, of_rank in outcome.sums.items():
                # A rank without a share has none.
                whole = self.sums.setdefault(kind, [{} for _ in of_rank])
                for sums, more in zip(whole, of_rank, strict=True):
                    sums.update(more)
        self.ranks = tuple(RankTraffic(one.sent_bytes, one.received_bytes) for one in outcomes)
        self.num_bytes = sum(one.sent_bytes for one in outcomes)
        self.num_buckets = sum(map(len, plans))
        self.peak_bytes = max(one.peak_bytes for one in outcomes)
        self.bucket_bytes = max(map(largest, plans))
