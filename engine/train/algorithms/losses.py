"""Token losses and the one denominator of an update.

Owns: what is differentiated. Does not own: logprobs (logprobs), advantages, reduction over
microbatches (update).
Invariant: a loss is a sum over trained tokens; the caller divides it by `denominator`, fixed
before the first forward, so how tokens are split over microbatches and ranks changes nothing.
Clipped tokens stay in the denominator.

Shape letters: N trained tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outloop.engine.train.data.samples import Sample


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token results [N]; `loss` carries the gradient, the others do not."""

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor


def ppo_clip(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), per token.

    PPO, arXiv:1707.06347, equation 7, with DAPO's asymmetric range, arXiv:2503.14476, equation 8
    (clip_low = clip_high is PPO's). Differs from both by default in the ratio's denominator: it is
    the behavior policy's recorded logprob, not one recomputed before the update; that is
    trainer.proximal = "recompute" (decoupled PPO, AReaL, arXiv:2505.24298, section 5.2).

    Args:
        policy_logprobs: [N] float32, with gradient.
        proximal_logprobs: [N] float32.
        advantages: [N] float32.
    """
    ratio = torch.exp(policy_logprobs - proximal_logprobs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain_objective = ratio * advantages
    clipped_objective = clipped * advantages
    return TokenLoss(
        loss=-torch.minimum(plain_objective, clipped_objective),
        ratio=ratio.detach(),
        is_clipped=(clipped_objective < plain_objective).detach(),
    )


def gspo(
    policy_logprobs: Tensor,
    sequence_log_ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(s * A, clip(s) * A) with s the sequence's ratio, as one loss per token.

    GSPO, arXiv:2507.18071, equations 5 to 7, in the token form of equations 13 and 14: the value
    of s is the sequence's, its gradient that of this token's logprob, so the sum over a sequence
    divided by its length is the paper's term and its gradient. That division is the caller's
    (`Sample.token_weight`). Differs from the paper with several branches: each has its own ratio,
    and they share their episode's weight by their numbers of trained tokens.

    Args:
        policy_logprobs: [N] float32, with gradient.
        sequence_log_ratios: [N] float32, mean of policy - proximal logprobs over the trained
            tokens of the sequence that each token belongs to; a constant.
        advantages: [N] float32.
    """
    ratio = torch.exp(sequence_log_ratios + (policy_logprobs - policy_logprobs.detach()))
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain_objective = ratio * advantages
    clipped_objective = clipped * advantages
    return TokenLoss(
        loss=-torch.minimum(plain_objective, clipped_objective),
        ratio=ratio.detach(),
        is_clipped=(clipped_objective < plain_objective).detach(),
    )


def cispo(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-stop_gradient(clip(ratio)) * A * policy_logprob, per token.

    CISPO, MiniMax-M1, arXiv:2506.13585, equations 4 and 5: the weight is clipped, no token loses
    its gradient. The paper sets no lower bound: clip_low = 1 or more. Its mean over all tokens of a
    group is trainer.denominator = "tokens", which here is over all tokens of the update.

    Args:
        policy_logprobs: [N] float32, with gradient.
        proximal_logprobs: [N] float32.
        advantages: [N] float32.
    """
    ratio = torch.exp(policy_logprobs - proximal_logprobs).detach()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(
        loss=-clipped * advantages * policy_logprobs, ratio=ratio, is_clipped=clipped != ratio
    )


def kl_loss(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    behavior_logprobs: Tensor,
    *,
    kind: Literal["k2", "k3"],
    ratio_cap: float,
) -> Tensor:
    """Per-token loss [N] whose expected gradient under the behavior policy is that of KL(policy,
    reference), while no ratio exceeds `ratio_cap`.

    k2 and k3: Schulman, "Approximating KL divergence" (2020). With d = policy - reference logprob
    and ratio = policy / behavior: k2 is stop_gradient(ratio) * d^2 / 2, k3 is ratio * (exp(-d) + d
    - 1) with the gradient through the ratio, as in DeepSeek-V3.2, arXiv:2512.02556, equation 7
    (without it k3's gradient is not that of the KL). Differs: the ratio is cut to `ratio_cap`.
    Of the two only k3 is the KL in value too.
    """
    distance = policy_logprobs - reference_logprobs
    ratio = torch.exp(policy_logprobs - behavior_logprobs).clamp(max=ratio_cap)
    if kind == "k2":
        return ratio.detach() * distance.square() / 2
    return ratio * (torch.exp(-distance) + distance - 1.0)


def denominator(
    samples: Iterable[Sample],
    kind: Literal["tokens", "episodes", "constant"],
    *,
    constant: float,
) -> float:
    """The number by which an update's summed loss is divided.

    tokens: trained tokens of the update (DAPO, arXiv:2503.14476, equation 8). episodes: episodes
    with a sample in the update, however many branches each has. constant: `constant` (Dr.GRPO,
    arXiv:2503.20783, section 3.2). GRPO's own mean over each response's tokens is not among them:
    it is not one number per update, and it favours short wrong answers (Dr.GRPO, section 3.1).
    """
    if kind == "constant":
        return constant
    if kind == "episodes":
        return float(max(1, len({sample.episode_id for sample in samples})))
    return float(max(1, sum(sample.num_trained_tokens for sample in samples)))
