"""Distillation: what pulls the policy towards a teacher on tokens that the policy sampled.

The teacher scores the student's own tokens, or gives its most probable ones at each place. Either
way the loss is that of single places: how a token changes what comes later is left out, as in the
sources.

Shape letters: N trained tokens, K of the teacher's most probable tokens at each.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from outloop.engine.train.algorithms.ratios import MAX_LOG_RATIO

Divergence = Literal["reverse", "forward"]
_LEAST_MASS = 1e-6
"""A tail lighter than this is not told from rounding in float32."""


def teacher_advantages(
    policy_logprobs: Tensor, teacher_logprobs: Tensor, *, coefficient: float
) -> Tensor:
    """coefficient * (teacher - policy logprob) of each sampled token [N], constant.

    On-policy distillation: Agarwal et al., "On-policy distillation of language models",
    arXiv:2306.13649, with the reverse KL; with one sampled token in place of the sum over the
    vocabulary it is the single-step part of the policy gradient of Gu et al., MiniLLM,
    arXiv:2306.08543. E over x ~ policy of (teacher - policy) grad log policy(x) is
    -grad KL(policy, teacher). The policy's logprob is that of the weights being updated, so the
    gradient stays that of the KL when the tokens are older and the loss weighs them by policy /
    behavior. The difference is cut to +-20.
    """
    gap = teacher_logprobs - policy_logprobs.detach()
    return coefficient * gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def top_divergence(
    policy_top_logprobs: Tensor, teacher_top_logprobs: Tensor, *, kind: Divergence
) -> Tensor:
    """The divergence of policy and teacher at each place [N], with gradient, over the teacher's K
    most probable tokens and one bucket that holds all others.

    reverse: KL(policy, teacher); forward: KL(teacher, policy): GKD, arXiv:2306.13649.
    Differs from the source in the bucket: no server gives the whole vocabulary. By the data
    processing inequality this is at most the whole divergence; it equals it where K is the
    vocabulary, and is 0 only where the K tokens have the same probabilities.

    Args:
        policy_top_logprobs: [N, K] with gradient, of the teacher's tokens under the policy.
        teacher_top_logprobs: [N, K]; -inf: there is no such token.
    """
    is_known = teacher_top_logprobs > -torch.inf
    ours = torch.where(is_known, policy_top_logprobs, torch.zeros_like(policy_top_logprobs))
    theirs = torch.where(is_known, teacher_top_logprobs, torch.zeros_like(ours))
    our_mass, their_mass = ours.exp() * is_known, theirs.exp() * is_known
    our_rest, their_rest = _rest(our_mass), _rest(their_mass)
    gap = (ours - theirs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rest_gap = our_rest.log() - their_rest.log()
    if kind == "reverse":
        return (our_mass * gap).sum(-1) + our_rest * rest_gap
    return -(their_mass * gap).sum(-1) - their_rest * rest_gap


def _rest(mass: Tensor) -> Tensor:
    """[N]: what K tokens leave of a distribution."""
    return (1.0 - mass.sum(-1)).clamp(min=_LEAST_MASS)
