"""The update of a critic that is a head on the policy, in the passes that update the policy.

Owns: the value loss on a microbatch's hidden states, and which ranks report it. Does not own: the
loss's formula (gae), the head (megatron/value_head). Invariant: each trained token counts once,
whatever the layout; the policy's gradient has value_coefficient times that of the value loss, and
with 0 none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.algorithms.gae import value_losses
from outloop.engine.train.data.microbatch import Microbatch
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import PolicyModel
from outloop.engine.train.megatron.parallel_rank import data_rank, is_reporting_rank
from outloop.engine.train.megatron.pipeline_schedule import deal_rows, run_microbatches
from outloop.engine.train.megatron.value_head import ValueHead
from outloop.engine.train.ranks.collectives import gather_bytes


class HeadUpdate:
    """One update of the head, from the rows of one update of the policy.

    The mean value loss over the rows' targets: their trained tokens with a return that is a number.
    """

    def __init__(
        self,
        head: ValueHead,
        batch: TrainBatch,
        settings: TrainerSettings,
        *,
        rows: Sequence[int],
        trains_policy: bool = True,
    ) -> None:
        """`trains_policy`: false where the policy's own weights stay as they are."""
        assert batch.returns is not None
        self._head = head
        self._value_clip = settings.critic.value_clip
        self._coefficient = settings.critic.value_coefficient if trains_policy else 0.0
        is_target = batch.loss_mask & ~np.isnan(batch.returns)
        counts = [int(is_target[batch.starts[row] : batch.starts[row + 1]].sum()) for row in rows]
        self._scale = float(max(1, sum(counts)))
        self._losses: list[float] = []
        self._norm = 0.0
        self.metrics: dict[str, float] = {}
        """train/value_loss, train/critic_grad_norm and train/critic_learning_rate, on every rank;
        empty before `step`."""
        head.zero_grad()

    def add(self, microbatch: Microbatch, hidden_NH: Tensor, gradient_NH: Tensor) -> Tensor:
        """Count the targets of a microbatch.

        Args:
            hidden_NH: what the policy's last stage gave for its trained tokens.
            gradient_NH: of the policy's loss by these.

        Returns:
            The same with the value loss's share; on one of the ranks that split the vocabulary,
            since the shares of these are added up.
        """
        if not is_reporting_rank():
            return gradient_NH
        targets = microbatch.targets
        assert targets.values_N is not None
        assert targets.returns_N is not None
        where = ~targets.returns_N.isnan()
        with torch.enable_grad():
            leaf = hidden_NH.detach().requires_grad_(self._coefficient > 0)
            losses = value_losses(
                self._head.values(leaf)[where],
                targets.values_N[where],
                targets.returns_N[where],
                value_clip=self._value_clip,
            )
            loss = losses.sum() / self._scale
            torch.autograd.backward(loss)
        self._losses.append(float(loss.detach()))
        if leaf.grad is None:
            return gradient_NH
        return gradient_NH + self._coefficient * leaf.grad

    def sum_gradients(self) -> None:
        """Over all ranks; before any weight is touched.

        Raises:
            FloatingPointError: they are not finite.
        """
        self._norm = self._head.sum_gradients()

    def step(self) -> None:
        """Update the head, and set `metrics`."""
        mine = msgspec.msgpack.encode(sum(self._losses)) if is_reporting_rank() else b""
        shares = [msgspec.msgpack.decode(data, type=float) for data in gather_bytes(mine) if data]
        self.metrics = {
            "train/value_loss": sum(shares),
            "train/critic_grad_norm": self._norm,
            "train/critic_learning_rate": self._head.step(self._norm),
        }


@torch.no_grad()
def update_head_alone(
    head: ValueHead,
    model: PolicyModel,
    batch: TrainBatch,
    settings: TrainerSettings,
    *,
    rows: Sequence[int],
    on_microbatch: Callable[[], None],
) -> dict[str, float]:
    """One update of the head with the policy as it is: a forward, and no backward through it.

    Returns:
        The metrics of `HeadUpdate`.

    Raises:
        FloatingPointError: the gradient is not finite; the head is unchanged.
    """
    update = HeadUpdate(head, batch, settings, rows=rows, trains_policy=False)

    def on_hidden(microbatch: Microbatch, hidden: Tensor) -> None:
        update.add(microbatch, hidden, hidden)

    lengths = batch.lengths
    dealt = deal_rows(
        [lengths[row] for row in rows], model.config, max_tokens=settings.max_microbatch_tokens
    )
    run_microbatches(
        model,
        model.config,
        batch,
        [[rows[index] for index in part] for part in dealt[data_rank()]],
        on_hidden,
        on_microbatch=on_microbatch,
        forward_only=True,
    )
    update.sum_gradients()
    update.step()
    return update.metrics
