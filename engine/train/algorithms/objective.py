"""What is minimised for one trained token: the policy's loss with every other term."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.algorithms.distillation import teacher_advantages, top_divergence
from outloop.engine.train.algorithms.kl import kl_loss
from outloop.engine.train.algorithms.losses import (
    LossFunction,
    LossInputs,
    TokenLoss,
    is_sequence_level,
)


def needs_sequences(function: LossFunction, settings: TrainerSettings) -> bool:
    """True if the objective looks at whole sequences, not at some tokens at a time."""
    return is_sequence_level(function) or settings.opsm_delta > 0


def adapted_entropy_coefficient(coefficient: float, measured: float, *, target: float) -> float:
    """coefficient * (1 + 0.1 clip(1 - measured / target, -0.2, 0.2)): up while the entropy is below
    its target, down while it is above.

    The direction is that of the dual of a constraint on the entropy, SAC, arXiv:1812.05905,
    equation 18; the steps are those of the controller of `kl.adapted_coefficient`, so that both
    coefficients move at one pace and stay above 0. Differs from SAC, which takes gradient steps on
    the coefficient.
    """
    error = min(max(1.0 - measured / target, -0.2), 0.2)
    return coefficient * (1.0 + 0.1 * error)


def objective(
    inputs: LossInputs,
    function: LossFunction,
    settings: TrainerSettings,
    *,
    token_weights: Tensor | None = None,
    is_imitated: Tensor | None = None,
) -> TokenLoss:
    """The losses [N] to be summed and divided by the update's denominator.

    function(inputs) * correction, without the sequences that OPSM masks; plus the divergence from a
    teacher's most probable tokens and the KL term, less the entropy bonus; all of it times
    `token_weights`. A token that a correction masked or vetoed (weight 0) adds nothing at all,
    neither KL nor entropy: it is rejected as a sample of the policy. OPSM masks the policy's term
    alone, as its source does. Either way the token stays in the denominator.

    OPSM (off-policy sequence masking): DeepSeek-V3.2, arXiv:2512.02556, section 3.1: a sequence's
    tokens with A < 0 are masked where the mean of behavior - policy logprobs over it exceeds
    trainer.opsm_delta.

    Tokens that are imitated, `is_imitated` [N] bool, have another loss in place of all that:
    -A * policy_logprob, the cross-entropy, with A the weight of their source. It is that of
    supervised learning, whoever sampled them: no ratio, no clip, no correction, KL or entropy.
    """
    weights = inputs.advantages
    inputs = _taught(inputs, settings)
    result = function(inputs)
    loss = result.loss
    is_masked = None
    if inputs.correction is not None:
        loss = loss * inputs.correction
    if settings.opsm_delta > 0:
        distance = inputs.sequence_mean(inputs.behavior_logprobs - inputs.policy_logprobs)
        is_masked = (inputs.advantages < 0) & (distance > settings.opsm_delta)
        loss = torch.where(is_masked, torch.zeros_like(loss), loss)
    if settings.teacher is not None and settings.teacher.top_k:
        assert inputs.policy_top_logprobs is not None
        assert inputs.teacher_top_logprobs is not None
        loss = loss + settings.teacher.coefficient * top_divergence(
            inputs.policy_top_logprobs,
            inputs.teacher_top_logprobs,
            kind=settings.teacher.divergence,
        )
    if settings.kl == "k2" or settings.kl == "k3":
        assert inputs.reference_logprobs is not None
        loss = loss + settings.kl_coefficient * kl_loss(
            inputs.policy_logprobs,
            inputs.reference_logprobs,
            inputs.behavior_logprobs,
            kind=settings.kl,
            ratio_cap=settings.kl_ratio_cap,
        )
    if settings.entropy_coefficient > 0:
        assert inputs.entropies is not None
        loss = loss - settings.entropy_coefficient * inputs.entropies
    if inputs.correction is not None:
        loss = torch.where(inputs.correction == 0, torch.zeros_like(loss), loss)
    if is_imitated is not None:
        loss = torch.where(is_imitated, -weights * inputs.policy_logprobs, loss)
    if token_weights is not None:
        loss = loss * token_weights
    return dataclasses.replace(result, loss=loss, is_masked=is_masked)


def _taught(inputs: LossInputs, settings: TrainerSettings) -> LossInputs:
    """The inputs with the pull towards a teacher in their advantages, if sampled tokens alone are
    compared."""
    teacher = settings.teacher
    if teacher is None or teacher.top_k:
        return inputs
    assert inputs.teacher_logprobs is not None
    pull = teacher_advantages(
        inputs.policy_logprobs, inputs.teacher_logprobs, coefficient=teacher.coefficient
    )
    return dataclasses.replace(inputs, advantages=inputs.advantages + pull)
