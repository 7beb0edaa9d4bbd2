"""Policy losses, token by token.

Every loss is a function of one `LossInputs` record, built in or the user's own
(trainer.loss_path): a loss that looks at whole sequences is marked with `sequence_level`, and
nothing else in the trainer changes for it. A loss is a sum over trained tokens that the caller
divides by one number fixed before the first forward (`denominators`), so how tokens are split over
microbatches and ranks changes nothing.

Shape letters: N trained tokens, K of a teacher's tokens at each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from outloop.engine.train.algorithms.ratios import MAX_LOG_RATIO, ratio_of


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which sequence (a sample, one branch of an episode) each of N tokens belongs to."""

    ids: Tensor
    """[N] int64, below `count`."""
    count: int
    group: dist.ProcessGroup | None = None
    """Context-parallel ranks, which hold other tokens of the same sequences."""

    def mean(self, values: Tensor) -> Tensor:
        """The mean of `values` [N] over all trained tokens of each token's sequence: [N], constant.

        Every context-parallel rank must call it equally often.
        """
        values_N = values.detach().double()
        zeros = values_N.new_zeros(self.count)
        counts = zeros.index_add(0, self.ids, torch.ones_like(values_N))
        sums = zeros.index_add(0, self.ids, values_N)
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
            dist.all_reduce(sums, group=self.group)
        return (sums / counts.clamp(min=1))[self.ids].to(values.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What is known of the trained tokens for which a loss is asked; index n is one token."""

    policy_logprobs: Tensor
    """[N] float32 with gradient: the weights being trained."""
    behavior_logprobs: Tensor
    """[N] float32, recorded when the token was sampled."""
    proximal_logprobs: Tensor
    """[N] float32, what ratios are taken to: the weights before the take's first update
    (trainer.proximal = "recompute"), else `behavior_logprobs`."""
    advantages: Tensor
    """[N] float32."""
    clip_low: float
    clip_high: float
    dual_clip: float = 0.0
    """0: no bound where the advantage is negative."""
    reference_logprobs: Tensor | None = None
    """[N] float32 of the frozen reference; None without a KL term."""
    teacher_logprobs: Tensor | None = None
    """[N] float32 of the teacher at the trained tokens; None without one. With the sampled token
    alone compared, `advantages` holds the pull towards the teacher already."""
    policy_top_logprobs: Tensor | None = None
    """[N, K] float32 with gradient, of the teacher's most probable tokens; None: not asked for."""
    teacher_top_logprobs: Tensor | None = None
    """[N, K] float32, theirs under the teacher."""
    entropies: Tensor | None = None
    """[N] float32, nats; with gradient if trainer.entropy_coefficient is set."""
    policy_versions: Tensor | None = None
    """[N] int64: the oldest version that the token attended to."""
    correction: Tensor | None = None
    """[N] float32, importance weight from behavior to proximal, 0: masked; None: all 1. The loss
    is multiplied by it afterwards."""
    sequences: Sequences | None = None
    """Only for losses marked `sequence_level`, which see all tokens of each of their sequences."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """trainer.loss_options."""

    @property
    def ratio(self) -> Tensor:
        """policy / proximal [N] with gradient, finite."""
        return ratio_of(self.policy_logprobs, self.proximal_logprobs)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean of `values` [N] over each token's sequence: [N], constant.

        Raises:
            ValueError: the loss is not marked `sequence_level`: it sees some tokens at a time.
        """
        if self.sequences is None:
            raise ValueError(
                "sequence_mean needs whole sequences; mark the loss with "
                "@outloop.engine.train.algorithms.losses.sequence_level"
            )
        return self.sequences.mean(values)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token results [N]; `loss` carries the gradient, the others do not."""

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor
    """bool: the token's gradient is zero, or its weight was cut, for its ratio."""
    is_masked: Tensor | None = None
    """bool: left out of the policy's term with its sequence (OPSM); None: nothing is."""

    def at(self, where: Tensor) -> TokenLoss:
        """The results of tokens where `where` [N] is True."""
        is_masked = None if self.is_masked is None else self.is_masked[where]
        return TokenLoss(self.loss[where], self.ratio[where], self.is_clipped[where], is_masked)


LossFunction = Callable[[LossInputs], TokenLoss]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def sequence_level(function: _Function) -> _Function:
    """Mark a loss that needs whole sequences.

    It is then called once with all trained tokens of a microbatch instead of chunk by chunk, at
    the price of computing their logits twice.
    """
    function.is_sequence_level = True  # type: ignore[attr-defined]
    return function


def is_sequence_level(function: Callable[..., Any]) -> bool:
    """True if the loss was marked with `sequence_level`."""
    return bool(getattr(function, "is_sequence_level", False))


def ppo_clip(inputs: LossInputs) -> TokenLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), at most dual_clip * |A|.

    PPO, arXiv:1707.06347, equation 7, with DAPO's asymmetric range, arXiv:2503.14476, equation 10
    (clip_low = clip_high is PPO's). Where A < 0 the minimum has no bound of its own as the ratio
    grows; there the loss stops at dual_clip * |A|: Ye et al., "Mastering Complex Control in MOBA
    Games with Deep Reinforcement Learning", arXiv:1912.09729, equation 5 (dual-clip PPO, c = 3).
    So the gradient of a token by its logprob is at most max(dual_clip, 1 + clip_high) * |A|.
    Differs by default in the ratio's denominator: it is the behavior policy's recorded logprob, not
    one recomputed before the update; that is trainer.proximal = "recompute".
    """
    return _clipped(inputs.ratio, inputs)


@sequence_level
def gspo(inputs: LossInputs) -> TokenLoss:
    """-min(s * A, clip(s) * A) with s the sequence's ratio, as one loss per token.

    GSPO, arXiv:2507.18071, equations 5 to 7, in the token form of equations 13 and 14: s is exp of
    the mean of policy - proximal logprobs over the sequence's trained tokens, its gradient that of
    this token's logprob, so the sum over a sequence divided by its length (trainer.denominator =
    "episode_means") is the paper's term and its gradient. Differs from the paper with several
    branches: each has its own ratio, and they share their episode's weight by their numbers of
    trained tokens; and by the dual clip of `ppo_clip`.
    """
    logprobs = inputs.policy_logprobs
    mean = inputs.sequence_mean(logprobs - inputs.proximal_logprobs)
    log_ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _clipped(torch.exp(log_ratio + (logprobs - logprobs.detach())), inputs)


def cispo(inputs: LossInputs) -> TokenLoss:
    """-stop_gradient(clip(ratio)) * A * policy_logprob, per token.

    CISPO, MiniMax-M1, arXiv:2506.13585, equations 4 and 5: the weight is clipped, no token loses
    its gradient. The paper sets no lower bound (clip_low = 1 or more) and does not publish the
    upper one; the default of 5 (clip_high = 4) is that of ScaleRL, arXiv:2510.13786, and TRL. Its
    mean over all tokens of a group is trainer.denominator = "tokens", here over all tokens of the
    update.
    """
    ratio = inputs.ratio.detach()
    clipped = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    return TokenLoss(
        loss=-clipped * inputs.advantages * inputs.policy_logprobs,
        ratio=ratio,
        is_clipped=clipped != ratio,
    )


def reinforce(inputs: LossInputs) -> TokenLoss:
    """-A * policy_logprob, per token: REINFORCE (Williams 1992), the loss of RLOO.

    Nothing corrects for tokens that other weights sampled: use it with buffer.max_staleness = 0 and
    one update per take, or with a `correction`.
    """
    ratio = inputs.ratio.detach()
    return TokenLoss(
        loss=-inputs.advantages * inputs.policy_logprobs,
        ratio=ratio,
        is_clipped=torch.zeros_like(ratio, dtype=torch.bool),
    )


LOSSES: dict[str, LossFunction] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}


def _clipped(ratio: Tensor, inputs: LossInputs) -> TokenLoss:
    """The clipped objective of PPO on a ratio [N] with gradient, negated."""
    plain = ratio * inputs.advantages
    cut = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high) * inputs.advantages
    objective = torch.minimum(plain, cut)
    is_clipped = cut < plain
    if inputs.dual_clip:
        lowest = inputs.dual_clip * inputs.advantages
        is_beyond = (inputs.advantages < 0) & (objective < lowest)
        objective = torch.where(is_beyond, lowest, objective)
        is_clipped = is_clipped | is_beyond
    return TokenLoss(loss=-objective, ratio=ratio.detach(), is_clipped=is_clipped.detach())
