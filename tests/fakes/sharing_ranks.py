"""Trainer ranks that each send a share of the same tensors, all in this process."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from fakes.local_tensors import LocalTensors
from outloop.buffer.settings import Settings
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.sending.orders import Order, Outcome
from outloop.engine.publish.sending.shares import share_out
from outloop.engine.publish.transports.registry import build_sending_rank


class _Reader:
    received_bytes = 0

    def __init__(self, ranks: "SharingRanks", rank: int) -> None:
        self.rank = rank
        self.shares = ranks.shares
        self._ranks = ranks

    def begin(self) -> None:
        """Nothing to do."""

    def read(
        self, specs: Sequence[Sequence[TensorSpec]], into: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """This rank's."""
        for spec in specs[self.rank]:
            yield self._ranks.tensors[spec.name].detach()


class SharingRanks(LocalTensors):
    """A `TensorSource` whose tensors leave from `num_ranks` ranks; `orders` are those they got."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        settings: Settings,
        *,
        num_ranks: int = 2,
        before: Callable[[Order], None] = lambda order: None,
    ) -> None:
        """`before` is called before an order is carried out."""
        super().__init__(tensors)
        ranks = range(num_ranks)
        self.tensors = tensors
        self.orders: list[Order] = []
        self.shares = share_out(
            self.specs,
            {spec.name: ranks for spec in self.specs},
            num_ranks=num_ranks,
            among=ranks,
        )
        self._before = before
        transports = {settings.publish.transport, settings.publish.fallback} - {"none"}
        self._ranks = {
            name: [build_sending_rank(settings, name, _Reader(self, rank)) for rank in ranks]
            for name in transports
        }

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """No process has all of them."""
        raise AssertionError

    def carry_out(self, transport: str, order: Order) -> Sequence[Outcome]:
        """By each of them."""
        self.orders.append(order)
        self._before(order)
        return [rank.carry_out(order) for rank in self._ranks[transport]]

    def close(self) -> None:
        """The ranks end."""
        for ranks in self._ranks.values():
            for rank in ranks:
                rank.close()
