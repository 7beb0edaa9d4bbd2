"""A rank's share of the weights that a publish sends, read from the model."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from torch import Tensor

from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.sending.shares import Shares
from outloop.engine.train.megatron.export_weights import Exports
from outloop.engine.train.ranks.collectives import gather_bytes


class ModelShares:
    """What `SendingRank` reads; made by all ranks together, on which it reads together too."""

    def __init__(self, exports: Exports, transport: str) -> None:
        """Shares for `publish.transport`: memory is shared within rank 0's machine only, where the
        servers are."""
        self._exports = exports
        machines = gather_bytes(socket.gethostname().encode())
        among = list(range(len(machines)))
        if transport in ("shared_memory", "cuda_ipc"):
            among = [rank for rank in among if machines[rank] == machines[0]]
        self.rank = exports.rank
        self.shares: Shares = exports.shares(among=among)
        self._received_before = 0

    @property
    def received_bytes(self) -> int:
        """From other ranks, to put together what was read since `begin`."""
        return self._exports.received_bytes - self._received_before

    def begin(self) -> None:
        """A publish begins."""
        self._received_before = self._exports.received_bytes

    def read(
        self, specs: Sequence[Sequence[TensorSpec]], into: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """This rank's tensors, one at a time; all ranks together."""
        names = [[spec.name for spec in of_rank] for of_rank in specs]
        return self._exports.gather_shares(names, into)
