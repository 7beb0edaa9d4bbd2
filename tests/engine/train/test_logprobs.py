"""Logprobs and entropies from logits, whole and in parts, against float64 autograd."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fakes.threaded_ranks import in_parts
from outloop.engine.train.algorithms.token_logprobs import logprobs_and_entropies, renormalised
from outloop.engine.train.data.supports import Supports

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_case(
    num_tokens: int, size: int, seed: int, *, tempered: bool
) -> tuple[torch.Tensor, ...]:
    """Logits, ids, temperatures and the weights of both results in a loss."""
    random = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(num_tokens, size, generator=random)
    ids = torch.randint(0, size, (num_tokens,), generator=random)
    temperature = 0.4 + torch.rand(num_tokens, generator=random)
    weights = torch.randn(2, num_tokens, generator=random)
    return logits, ids, temperature if tempered else None, weights


def wanted(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None, weights: torch.Tensor
) -> Result:
    """Both results and the gradient of their weighted sum, in float64 by plain autograd."""
    leaf = logits.double().requires_grad_()
    scaled = leaf if temperature is None else leaf / temperature.double()[:, None]
    table = scaled.log_softmax(-1)
    logprobs = table.gather(1, ids[:, None])[:, 0]
    entropies = -(table.exp() * table).sum(-1)
    (logprobs * weights[0] + entropies * weights[1]).sum().backward()
    assert leaf.grad is not None
    return logprobs.detach(), entropies.detach(), leaf.grad


@pytest.mark.medium
@given(
    num_tokens=st.integers(1, 9),
    size=st.integers(1, 33),
    seed=st.integers(0, 10_000),
    tempered=st.booleans(),
    block=st.sampled_from([1, 40, 2**18]),
)
def test_values_and_gradients_are_those_of_log_softmax(
    num_tokens: int, size: int, seed: int, tempered: bool, block: int
) -> None:
    """Each token at its own temperature, however few rows are computed at once."""
    logits, ids, temperature, weights = random_case(num_tokens, size, seed, tempered=tempered)
    leaf = logits.clone().requires_grad_()
    logprobs, entropies = logprobs_and_entropies(
        leaf * 1, ids, temperature, has_entropy_gradient=True, block_size=block
    )
    (logprobs * weights[0] + entropies * weights[1]).sum().backward()
    want = wanted(logits, ids, temperature, weights)
    assert leaf.grad is not None
    for got, right in zip((logprobs.detach(), entropies.detach(), leaf.grad), want, strict=True):
        assert torch.allclose(got.double(), right, rtol=1e-5, atol=2e-5)


@pytest.mark.medium
@given(
    num_tokens=st.integers(1, 9),
    size=st.integers(1, 33),
    seed=st.integers(0, 10_000),
    shift=st.sampled_from([0.0, 60.0]),
)
def test_what_is_left_of_a_distribution_is_renormalised(
    num_tokens: int, size: int, seed: int, shift: float
) -> None:
    """Against log_softmax in float64 with the other logits at -inf, gradient too; also where the
    ids that were left have become all but impossible. No ids: the whole vocabulary."""
    logits, ids, temperature, weights = random_case(num_tokens, size, seed, tempered=True)
    random = np.random.default_rng(seed)
    is_left = random.random((num_tokens, size)) < 0.4
    is_left[np.arange(num_tokens), ids.numpy()] = True
    is_left[::3] = False
    is_whole = torch.from_numpy(~is_left.any(1, keepdims=True))
    logits = logits - shift * torch.from_numpy(is_left)
    kept = [np.flatnonzero(row) for row in is_left]
    supports = Supports.of(np.array([len(row) for row in kept]), np.concatenate(kept))
    among, is_kept = supports.padded(torch.device("cpu"))
    leaf = logits.clone().requires_grad_()
    found, _ = logprobs_and_entropies(leaf * 1, torch.cat([ids[:, None], among], 1), temperature)
    logprobs = renormalised(found[:, 0], found[:, 1:], is_kept)
    (logprobs * weights[0]).sum().backward()
    right = logits.double().requires_grad_()
    assert temperature is not None
    scaled = right / temperature.double()[:, None]
    table = scaled.masked_fill(~(torch.from_numpy(is_left) | is_whole), -torch.inf).log_softmax(-1)
    wanted_logprobs = table.gather(1, ids[:, None])[:, 0]
    (wanted_logprobs * weights[0]).sum().backward()
    assert torch.allclose(logprobs.double(), wanted_logprobs, rtol=1e-5, atol=1e-4)
    assert leaf.grad is not None
    assert right.grad is not None
    assert torch.allclose(leaf.grad.double(), right.grad, rtol=1e-5, atol=1e-4)


def test_entropies_without_gradient_are_constants() -> None:
    """The gradient is that of the logprobs alone."""
    logits, ids, _, weights = random_case(5, 11, 1, tempered=False)
    leaf = logits.clone().requires_grad_()
    logprobs, entropies = logprobs_and_entropies(leaf * 1, ids, None)
    assert not entropies.requires_grad
    (logprobs * weights[0]).sum().backward()
    weights[1] = 0.0
    assert torch.allclose(leaf.grad.double(), wanted(logits, ids, None, weights)[2], atol=1e-6)


def test_a_token_that_cannot_be_sampled_adds_nothing() -> None:
    """Logits of minus infinity leave entropy and gradient finite."""
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    leaf = logits.clone().requires_grad_()
    logprobs, entropies = logprobs_and_entropies(
        leaf * 1, torch.tensor([2]), None, has_entropy_gradient=True
    )
    (logprobs + entropies).sum().backward()
    two = torch.tensor([0.0, 1.0]).log_softmax(0)
    assert float(logprobs.detach()) == pytest.approx(float(two[1]))
    assert float(entropies.detach()) == pytest.approx(float(-(two.exp() * two).sum()))
    assert leaf.grad is not None
    assert leaf.grad[0, 1] == 0.0
    assert torch.isfinite(leaf.grad).all()


def test_a_logit_that_is_not_a_number_is_not_hidden() -> None:
    """One NaN among the logits reaches that token's logprob and no other."""
    logits, ids, _, _ = random_case(3, 7, 2, tempered=False)
    logits[1, 4] = torch.nan
    logprobs, _ = logprobs_and_entropies(logits, ids, None)
    assert logprobs.isnan().tolist() == [False, True, False]


@pytest.mark.medium
def test_no_second_tensor_of_the_logits_size_is_made() -> None:
    """Forward and backward allocate a few blocks, however many tokens there are."""
    logits, ids, temperature, _ = random_case(512, 4096, 3, tempered=True)
    leaf = logits.requires_grad_()
    own = leaf * 1
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        logprobs, entropies = logprobs_and_entropies(
            own, ids, temperature, has_entropy_gradient=True
        )
        torch.autograd.grad((logprobs + entropies).sum(), own)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < own.nbytes / 4


@pytest.mark.parametrize("bounds", [[0, 20, 33], [0, 33, 33]])
def test_a_split_vocabulary_gives_what_the_whole_gives(bounds: list[int]) -> None:
    """Two ranks with a part of the columns each, one with none: same values, its own gradient."""
    logits, ids, temperature, weights = random_case(6, 33, 5, tempered=True)
    want = wanted(logits, ids, temperature, weights)

    def part(rank: int, group: dist.ProcessGroup) -> Result:
        leaf = logits[:, bounds[rank] : bounds[rank + 1]].clone().requires_grad_()
        logprobs, entropies = logprobs_and_entropies(
            leaf * 1,
            ids,
            temperature,
            has_entropy_gradient=True,
            vocab_start=bounds[rank],
            group=group,
        )
        (logprobs * weights[0] + entropies * weights[1]).sum().backward()
        assert leaf.grad is not None
        return logprobs.detach(), entropies.detach(), leaf.grad

    results = in_parts(part, 2)
    for logprobs, entropies, _ in results:
        assert torch.allclose(logprobs.double(), want[0], atol=2e-5)
        assert torch.allclose(entropies.double(), want[1], atol=2e-5)
    joined = torch.cat([gradient for _, _, gradient in results], dim=1)
    assert torch.allclose(joined.double(), want[2], atol=2e-5)
