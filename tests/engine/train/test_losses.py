"""Losses, logprobs and denominators against float64 references."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outloop.engine.train.algorithms.kl import kl_loss
from outloop.engine.train.algorithms.losses import (
    LOSSES,
    LossInputs,
    Sequences,
    TokenLoss,
    cispo,
    gspo,
    ppo_clip,
)


def inputs(
    policy: Any, old: Any, advantages: Any, *, clips: tuple[float, float], **more: Any
) -> LossInputs:
    """Tokens whose ratio is taken to what was recorded."""
    policy, old, advantages = map(torch.as_tensor, (policy, old, advantages))
    low, high = clips
    return LossInputs(
        policy_logprobs=policy,
        behavior_logprobs=old,
        proximal_logprobs=old,
        advantages=advantages,
        clip_low=low,
        clip_high=high,
        **more,
    )


def test_a_clipped_token_has_no_gradient() -> None:
    """Beyond the range in the advantage's direction the gradient is zero; inside it is not."""
    behavior = torch.zeros(4)
    policy = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    result = ppo_clip(inputs(policy, behavior, advantages, clips=(0.2, 0.28)))
    result.loss.sum().backward()
    assert result.is_clipped.tolist() == [True, False, False, True]
    assert policy.grad is not None
    assert (policy.grad == 0).tolist() == [True, False, False, True]


def test_on_policy_the_gradient_is_reinforce() -> None:
    """At ratio 1 the gradient by the logprob is minus the advantage."""
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.3])
    ppo_clip(inputs(policy, policy.detach(), advantages, clips=(0.2, 0.2))).loss.sum().backward()
    assert policy.grad is not None
    assert torch.allclose(policy.grad, -advantages)


@pytest.mark.medium
@given(
    policy=st.floats(-8, 0, width=32),
    proximal=st.floats(-8, 0, width=32),
    advantage=st.floats(-3, 3, width=32),
    clip_low=st.sampled_from([0.2, 1.0, 3.0]),
)
def test_cispo_agrees_with_equation_4(
    policy: float, proximal: float, advantage: float, clip_low: float
) -> None:
    """-clip(ratio) A log policy; the gradient is -clip(ratio) A, clipped or not."""
    logprob = torch.tensor([policy], requires_grad=True)
    got = cispo(inputs(logprob, [proximal], [advantage], clips=(clip_low, 0.28)))
    ratio = math.exp(policy - proximal)
    clipped = min(max(ratio, 1 - clip_low), 1.28)
    assert float(got.loss.detach()) == pytest.approx(
        -clipped * advantage * policy, rel=1e-4, abs=1e-5
    )
    got.loss.sum().backward()
    assert logprob.grad is not None
    assert float(logprob.grad) == pytest.approx(-clipped * advantage, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_gspo_agrees_with_equations_5_to_7(seed: int) -> None:
    """A sequence's sum over its length is min(s A, clip(s) A), and has that term's gradient."""
    generator = np.random.default_rng(seed)
    for size in (1, 3, 17):
        policy = generator.normal(-2, 0.5, size)
        proximal = policy + generator.normal(0, 0.3, size)
        advantage = float(generator.normal())
        leaf = torch.tensor(policy, requires_grad=True)
        got = gspo(
            inputs(
                leaf,
                proximal,
                np.full(size, advantage),
                clips=(0.05, 0.1),
                sequences=Sequences(torch.zeros(size, dtype=torch.int64), 1),
            )
        )
        (got.loss.sum() / size).backward()
        ratio = math.exp((policy - proximal).mean())
        clipped = min(max(ratio, 0.95), 1.1)
        is_clipped = clipped * advantage < ratio * advantage
        want = -min(ratio * advantage, clipped * advantage)
        assert float(got.loss.detach().sum() / size) == pytest.approx(want, rel=1e-9)
        slope = 0.0 if is_clipped else -ratio * advantage / size
        assert leaf.grad is not None
        assert np.allclose(leaf.grad, slope, rtol=1e-6)
        assert got.is_clipped.tolist() == [is_clipped] * size


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("distance", [0.0, 0.15])
def test_the_kl_loss_has_the_gradient_of_the_kl(kind: str, distance: float) -> None:
    """Its exact expectation under the behavior policy, on and off policy, by enumeration."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    moved = logits.detach() + distance * torch.randn(7, generator=generator, dtype=torch.float64)
    behavior = moved.log_softmax(0)
    policy = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    losses = kl_loss(logits.log_softmax(0), reference, behavior, kind=kind, ratio_cap=2.0)
    expected = (behavior.exp() * losses).sum()
    (got,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-12)
    if kind == "k3":
        exact = (policy.detach().exp() * (policy.detach() - reference)).sum()
        assert float(expected.detach()) == pytest.approx(float(exact))


def test_the_weight_of_the_kl_loss_is_cut() -> None:
    """A token that the behavior policy hardly ever samples weighs at most the cap."""
    args = torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([-9.0])
    distance = 1.0
    got_k2 = kl_loss(*args, kind="k2", ratio_cap=2.0)
    got_k3 = kl_loss(*args, kind="k3", ratio_cap=2.0)
    assert float(got_k2) == pytest.approx(2 * distance**2 / 2)
    assert float(got_k3) == pytest.approx(2 * (math.exp(-distance) + distance - 1), rel=1e-5)


def gradient_of(
    function: Callable[[LossInputs], TokenLoss], log_ratio: float, advantage: float, **more: Any
) -> tuple[float, float]:
    """Loss and gradient by the logprob of one token, a sequence of its own, in float32."""
    policy = torch.tensor([-1.0], requires_grad=True)
    known = inputs(
        policy,
        [-1.0 - log_ratio],
        torch.tensor([advantage]),
        clips=(0.2, 0.28),
        sequences=Sequences(torch.zeros(1, dtype=torch.int64), 1),
        **more,
    )
    loss = function(known).loss.sum()
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), float(policy.grad)


@pytest.mark.medium
@given(
    name=st.sampled_from(sorted(LOSSES)),
    log_ratio=st.floats(-300, 300, width=32),
    advantage=st.floats(-3, 3, width=32),
    dual_clip=st.sampled_from([1.5, 3.0]),
)
def test_no_token_pulls_harder_than_its_bound(
    name: str, log_ratio: float, advantage: float, dual_clip: float
) -> None:
    """|d loss / d logprob| <= c |A| whatever the servers recorded, in every loss; never NaN.

    On the code before the bound this was 1.8e8 at a log-ratio of 19, and NaN or infinite from 89.
    """
    loss, gradient = gradient_of(LOSSES[name], log_ratio, advantage, dual_clip=dual_clip)
    assert math.isfinite(loss)
    bound = 1.0 if name == "reinforce" else max(dual_clip, 1.28)
    assert abs(gradient) <= bound * abs(advantage) * (1 + 1e-5)


@given(
    log_ratio=st.floats(-3, 3),
    advantage=st.floats(-3, 3),
    dual_clip=st.sampled_from([0.0, 1.5, 3.0]),
)
def test_the_dual_clip_agrees_with_its_definition(
    log_ratio: float, advantage: float, dual_clip: float
) -> None:
    """max(min(r A, clip(r) A), c A) where A < 0, and only there; in float64."""
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    known = inputs(
        policy,
        torch.tensor([-1.0 - log_ratio], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clips=(0.2, 0.28),
        dual_clip=dual_clip,
    )
    got = ppo_clip(known)
    ratio = math.exp(-1.0 - (-1.0 - log_ratio))
    objective = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    slope = ratio * advantage if objective == ratio * advantage else 0.0
    if advantage < 0 and dual_clip and objective < dual_clip * advantage:
        objective, slope = dual_clip * advantage, 0.0
        assert got.is_clipped.item()
    assert float(got.loss.detach()) == pytest.approx(-objective, rel=1e-12)
    got.loss.sum().backward()
    assert policy.grad is not None
    assert float(policy.grad) == pytest.approx(-slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("log_ratio", [-200.0, -89.0, 19.0, 59.0, 89.0, 200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_without_a_dual_clip_nothing_overflows(
    name: str, log_ratio: float, advantage: float
) -> None:
    """The clamp of the log-ratio alone keeps value and gradient finite."""
    assert all(map(math.isfinite, gradient_of(LOSSES[name], log_ratio, advantage)))


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("to_reference", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("to_behavior", [-200.0, 0.0, 200.0])
def test_the_kl_loss_is_finite_wherever_the_models_are(
    kind: str, to_reference: float, to_behavior: float
) -> None:
    """Value and gradient; k3's were NaN where the policy had become much unlikelier."""
    policy = torch.tensor([-1.0], requires_grad=True)
    loss = kl_loss(
        policy,
        torch.tensor([-1.0 - to_reference]),
        torch.tensor([-1.0 - to_behavior]),
        kind=kind,
        ratio_cap=2.0,
    )
    loss.sum().backward()
    assert policy.grad is not None
    assert math.isfinite(float(loss.detach()))
    assert math.isfinite(float(policy.grad))


def test_a_loss_that_sees_parts_of_sequences_cannot_take_their_mean() -> None:
    """The sentence says how to ask for whole ones."""
    known = inputs([-1.0], [-1.0], [1.0], clips=(0.2, 0.2))
    with pytest.raises(ValueError, match="sequence_level"):
        gspo(known)


ROWS = {"num_trained_tokens": [3, 2, 7], "episode_ids": ["a", "a", "b"]}
