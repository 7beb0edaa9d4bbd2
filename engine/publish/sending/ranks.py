"""The sending ranks as rank 0 orders them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.sending.orders import Order, Outcome
from outloop.engine.publish.sending.sending_rank import SendingRank, ShareReader
from outloop.engine.publish.tensor_source import TensorSource


@runtime_checkable
class SendingRanks(Protocol):
    """Ranks that each send a share of a source's tensors."""

    @property
    def shares(self) -> Sequence[Sequence[TensorSpec]]:
        """Of every rank; some may have none."""

    def carry_out(self, transport: str, order: Order) -> Sequence[Outcome]:
        """Have every rank carry out an order of the transport of that name; their answers.

        Raises:
            OutloopError: a rank is gone, or did not answer by its deadline.
        """


class OrderedRanks:
    """The sending ranks of one publish over one transport.

    Once one of them is gone, no order is given any more.
    """

    def __init__(self, ranks: SendingRanks, transport: str) -> None:
        self._ranks = ranks
        self._transport = transport
        self._is_lost = False

    @property
    def shares(self) -> Sequence[Sequence[TensorSpec]]:
        """Of every rank; some may have none."""
        return self._ranks.shares

    def are_those_of(self, other: OrderedRanks) -> bool:
        """Whether they are the same, as of another publish: they hold what they held then."""
        return self._ranks is other._ranks

    def all(self, order: Order) -> Sequence[Outcome]:
        """Have every rank do it.

        Raises:
            PublishFailed: one could not.
        """
        outcomes = self._carry_out(order)
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                whose = f"trainer rank {rank}: " if len(outcomes) > 1 else ""
                raise PublishFailed(f"{whose}{outcome.error}")
        return outcomes

    def one(self, rank: int, order: Order) -> Outcome:
        """Have one rank do it; the others have nothing to do. It may have failed."""
        return self._carry_out(order)[rank]

    def tell(self, order: Order) -> None:
        """The same, for what cannot fail: nothing happens where a rank is gone."""
        if not self._is_lost:
            self._carry_out(order)

    def _carry_out(self, order: Order) -> Sequence[Outcome]:
        # Until all have answered.
        self._is_lost = True
        outcomes = self._ranks.carry_out(self._transport, order)
        self._is_lost = False
        return outcomes


class OwnRank:
    """The sending rank of sources whose tensors are all in this process."""

    def __init__(self, make: Callable[[ShareReader], SendingRank]) -> None:
        self._reader = _WholeReader()
        self._rank = make(self._reader)

    def reading(self, source: TensorSource) -> SendingRanks:
        """As the only one of the source."""
        self._reader.source = source
        return self

    @property
    def shares(self) -> Sequence[Sequence[TensorSpec]]:
        """One: everything."""
        return self._reader.shares

    def carry_out(self, transport: str, order: Order) -> Sequence[Outcome]:
        """Its answer."""
        return [self._rank.carry_out(order)]

    def close(self) -> None:
        """Give back what it holds."""
        self._rank.close()


class _WholeReader:
    """All tensors of a source that is in this process."""

    rank = 0
    received_bytes = 0

    def __init__(self) -> None:
        self.source: TensorSource | None = None

    @property
    def shares(self) -> Sequence[Sequence[TensorSpec]]:
        """Everything."""
        return [[] if self.source is None else self.source.specs]

    def begin(self) -> None:
        """Nothing to do."""

    def read(
        self, specs: Sequence[Sequence[TensorSpec]], into: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """By the source."""
        assert self.source is not None
        yield from self.source.read(specs[0], into)
