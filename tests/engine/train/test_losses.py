"""Losses, logprobs and denominators against float64 references."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outloop.engine.train.algorithms.losses import (
    cispo,
    denominator,
    gspo,
    kl_loss,
    ppo_clip,
)
from outloop.engine.train.data.samples import Sample


@given(
    policy=st.floats(-8, 0, width=32),
    behavior=st.floats(-8, 0, width=32),
    advantage=st.floats(-3, 3, width=32),
)
def test_ppo_clip_agrees_with_equation_7(policy: float, behavior: float, advantage: float) -> None:
    """min(ratio A, clip(ratio) A), negated, with DAPO's asymmetric range."""
    got = ppo_clip(
        torch.tensor([policy]),
        torch.tensor([behavior]),
        torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.28,
    )
    ratio = math.exp(policy - behavior)
    want = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    assert float(got.loss) == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_a_clipped_token_has_no_gradient() -> None:
    """Beyond the range in the advantage's direction the gradient is zero; inside it is not."""
    behavior = torch.zeros(4)
    policy = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    result = ppo_clip(policy, behavior, advantages, clip_low=0.2, clip_high=0.28)
    result.loss.sum().backward()
    assert result.is_clipped.tolist() == [True, False, False, True]
    assert policy.grad is not None
    assert (policy.grad == 0).tolist() == [True, False, False, True]


def test_on_policy_the_gradient_is_reinforce() -> None:
    """At ratio 1 the gradient by the logprob is minus the advantage."""
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.3])
    ppo_clip(policy, policy.detach(), advantages, clip_low=0.2, clip_high=0.2).loss.sum().backward()
    assert policy.grad is not None
    assert torch.allclose(policy.grad, -advantages)


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
    got = cispo(
        logprob,
        torch.tensor([proximal]),
        torch.tensor([advantage]),
        clip_low=clip_low,
        clip_high=0.28,
    )
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
        log_ratio = torch.full((size,), float((policy - proximal).mean()), dtype=torch.float64)
        got = gspo(
            leaf,
            log_ratio,
            torch.full((size,), advantage, dtype=torch.float64),
            clip_low=0.05,
            clip_high=0.1,
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
    """A token that the behavior policy hardly drew weighs at most the cap."""
    args = torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([-9.0])
    distance = 1.0
    got_k2 = kl_loss(*args, kind="k2", ratio_cap=2.0)
    got_k3 = kl_loss(*args, kind="k3", ratio_cap=2.0)
    assert float(got_k2) == pytest.approx(2 * distance**2 / 2)
    assert float(got_k3) == pytest.approx(2 * (math.exp(-distance) + distance - 1), rel=1e-5)


def sample(episode: str, num_trained: int) -> Sample:
    """A row with `num_trained` trained tokens after one of context."""
    size = num_trained + 1
    return Sample(
        episode_id=episode,
        group_id="g",
        branch=0,
        token_ids=np.zeros(size, np.int32),
        loss_mask=np.arange(size) > 0,
        behavior_logprobs=np.zeros(size, np.float32),
        policy_versions=np.zeros(size, np.int32),
        temperature=np.ones(size, np.float32),
        advantage=1.0,
    )


def test_denominators_count_tokens_or_episodes_or_neither() -> None:
    """Two branches of one episode are one episode; the constant is what it says."""
    samples = [sample("a", 3), sample("a", 2), sample("b", 7)]
    assert denominator(samples, "tokens", constant=5.0) == 12.0
    assert denominator(samples, "episodes", constant=5.0) == 2.0
    assert denominator(samples, "constant", constant=5.0) == 5.0
