"""One version's weights as copies on the ranks, for the thread that publishes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.buffer.records import Float32
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.sending.orders import Order, Outcome
from outloop.engine.publish.verification.logprob_probe import prompts_for
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.ranks.rank_worker import RankWorker


class CopiedWeights:
    """A `TensorSource`, and the `SendingRanks` of it: each rank keeps a copy of its share.

    `fill` is called by the training thread; all else by one other thread, not at the same time.
    """

    def __init__(self, ranks: RankController, *, is_probed: bool) -> None:
        """Hold nothing; `is_probed`: `score_prompts` will be asked for the prompts of the probe."""
        self._ranks = ranks
        self._is_probed = is_probed
        self._scored: list[tuple[tuple[int, ...], Float32]] = []

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor."""
        return self._ranks.specs

    @property
    def shares(self) -> Sequence[Sequence[TensorSpec]]:
        """Of every rank."""
        return self._ranks.shares

    def fill(self) -> None:
        """Take the weights as they are now."""
        self._ranks.run(RankWorker.copy_weights)
        if self._is_probed:
            prompts = prompts_for(self.specs)
            rows = self._ranks.score_prompts(prompts)
            self._scored = [(p, np.array(row)) for p, row in zip(prompts, rows, strict=True)]

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """As they were when it was filled; of rank 0's share alone."""
        copy = self._ranks.worker.copy
        wanted: list[Sequence[TensorSpec]] = [() for _ in copy.shares]
        wanted[copy.rank] = specs
        return copy.read(wanted, into or ())

    def leave(self) -> None:
        """It is on no device."""

    def carry_out(self, transport: str, order: Order) -> Sequence[Outcome]:
        """Have every rank carry it out with its copy, beside the training.

        Raises:
            DeadlineExceeded, PartFailed: a rank did not answer, failed, or is lost.
        """
        return self._ranks.worker.carry_out_beside(transport, order)

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> list[Float32]:
        """As the model scored them when it was filled.

        Raises:
            PublishFailed: they are not the probe's.
        """
        scored = dict(self._scored)
        if any(tuple(prompt) not in scored for prompt in prompts):
            raise PublishFailed("a copy of weights knows the scores of the probe's prompts alone")
        return [scored[tuple(prompt)] for prompt in prompts]
