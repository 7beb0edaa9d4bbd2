"""A critic that is a linear head on the policy's last hidden states.

Owns: the head's weights, its optimizer and schedule, the sum of its gradient over ranks. Does not
own: the hidden states, and what of the value loss reaches them (step/critic_update). Invariant:
every rank holds the whole head and makes the same update, in every layout, so that a checkpoint of
one layout is that of any other. It is no part of the policy's model: nothing of it is published.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.nn import functional

from outloop.buffer.settings.trainer import TrainerSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ValueHead:
    """One number from each hidden state, float32 whatever the policy's dtype; it begins at zero.

    It stays on its device where the policy leaves it: some KiB.
    """

    def __init__(
        self,
        hidden_size: int,
        settings: TrainerSettings,
        *,
        num_updates: int,
        device: torch.device | None = None,
    ) -> None:
        """An optimizer of its own, with the rates and the limit of trainer.critic, for
        `num_updates` updates."""
        critic = settings.critic
        self._max_grad_norm = critic.max_grad_norm
        self.weight = torch.zeros(1, hidden_size, device=device, requires_grad=True)
        """[1, H]"""
        self.bias = torch.zeros(1, device=device, requires_grad=True)
        # As for a policy: what is no matrix does not decay.
        groups: list[dict[str, Any]] = [
            {"params": [self.weight]},
            {"params": [self.bias], "wd_mult": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=critic.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
        )
        optimizer: Any = self._optimizer
        self._schedule = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=critic.learning_rate,
            min_lr=critic.learning_rate * settings.min_lr_ratio,
            lr_warmup_steps=critic.warmup_steps,
            lr_decay_steps=max(num_updates, critic.warmup_steps + 1),
            lr_decay_style="WSD" if settings.lr_decay == "wsd" else settings.lr_decay,
            wsd_decay_steps=settings.wsd_decay_updates,
            lr_wsd_decay_style="linear",
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far."""
        return self._schedule.num_steps

    @property
    def described(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return described(int(self.weight.shape[1]))

    def values(self, hidden_NH: Tensor) -> Tensor:
        """[N] float32: the return that is expected from each hidden state on."""
        return functional.linear(hidden_NH.float(), self.weight, self.bias)[:, 0]

    def zero_grad(self) -> None:
        """Forget the gradients of the previous update."""
        self._optimizer.zero_grad()

    def sum_gradients(self) -> float:
        """Sum what each rank reported over all ranks; the norm, equal on every rank.

        Raises:
            FloatingPointError: it is not finite; nothing is changed.
        """
        parts = [
            torch.zeros_like(one) if one.grad is None else one.grad
            for one in (self.weight, self.bias)
        ]
        # On the CPU, see `collectives`.
        whole = torch.cat([part.flatten() for part in parts]).cpu()
        if dist.get_world_size() > 1:
            dist.all_reduce(whole)
        norm = float(whole.norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of the critic's head is {norm}; the update was not made. Look "
                "at the batch's rewards and at trainer.critic.learning_rate."
            )
        self.weight.grad = whole[:-1].view_as(self.weight).to(self.weight.device)
        self.bias.grad = whole[-1:].to(self.bias.device)
        return norm

    def step(self, norm: float) -> float:
        """Clip the summed gradients, which have this norm, and update; the learning rate used."""
        factor = self._max_grad_norm / (norm + 1e-6)
        if factor < 1.0:
            for one in (self.weight, self.bias):
                assert one.grad is not None
                one.grad.mul_(factor)
        # Before the update, so that the first one of a warm-up has a rate above zero.
        self._schedule.step(increment=1)
        self._optimizer.step()
        return float(self._optimizer.param_groups[0]["lr"])

    def sharded_state(self, *, has_moments: bool) -> dict[str, Any]:
        """Weights and moments for a checkpoint, or room for what one holds.

        Args:
            has_moments: false before the first update.
        """
        found = {"weight": self.weight.detach(), "bias": self.bias.detach()}
        if has_moments:
            for name, one in (("weight", self.weight), ("bias", self.bias)):
                held = self._optimizer.state[one]
                for moment in _MOMENTS:
                    found[f"{moment}.{name}"] = held.get(moment, torch.zeros_like(one).detach())
        return {
            name: ShardedTensor.from_rank_offsets(
                f"critic.head.{name}", tensor, replica_id=dist.get_rank()
            )
            for name, tensor in found.items()
        }

    @torch.no_grad()
    def put_state(self, state: dict[str, Tensor], *, num_updates: int) -> None:
        """Go on from what was read into `sharded_state`."""
        for name, one in (("weight", self.weight), ("bias", self.bias)):
            one.copy_(state[name])
            if num_updates:
                moments = {m: state[f"{m}.{name}"].to(one.device, copy=True) for m in _MOMENTS}
                step = torch.tensor(float(num_updates))
                self._optimizer.state[one] = {"step": step, **moments}
        self._schedule.num_steps = 0
        self._schedule.step(increment=num_updates)


def described(hidden_size: int) -> dict[str, Any]:
    """What a checkpoint says of a head on hidden states of this size."""
    return {"kind": "head", "hidden_size": hidden_size}
