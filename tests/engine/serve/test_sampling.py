"""What is sampled, with which probability, from which seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outloop.engine.serve.torch_server.requests import decode_request
from outloop.engine.serve.torch_server.sampling import (
    BadRequest,
    RowParams,
    SamplingParams,
    sample,
)


def _sample_many(params: SamplingParams, logits: torch.Tensor, num: int) -> np.ndarray:
    table = RowParams(num)
    for slot in range(num):
        table.set(slot, params, seed=slot, num_sampled=0)
    sampled, _ = sample(logits.repeat(num, 1), table, np.arange(num))
    return sampled


def test_samples_follow_the_distribution() -> None:
    """20 000 samples at T = 0.7 match softmax(logits / T) within sampling error."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    sampled = _sample_many(SamplingParams(temperature=0.7), logits, 20_000)
    expected = torch.softmax(logits[0] / 0.7, -1).numpy()
    observed = np.bincount(sampled, minlength=5) / len(sampled)
    assert np.abs(observed - expected).max() < 0.015


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_p=0.5), {2}),
        (SamplingParams(min_p=0.3), {1, 2}),
        (SamplingParams(temperature=0.0), {2}),
    ],
)
def test_truncation_samples_only_what_is_left(params: SamplingParams, allowed: set[int]) -> None:
    """top_k, top_p, min_p and greedy never sample outside their support, and sample all of it."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    assert set(_sample_many(params, logits, 2000).tolist()) == allowed


@pytest.mark.medium
@given(st.integers(0, 2**64 - 1), st.integers(0, 500), st.integers(2, 5))
@settings(deadline=None, max_examples=50)
def test_a_row_does_not_depend_on_the_others(seed: int, num_sampled: int, num_rows: int) -> None:
    """The same seed and count sample the same token in any batch, at any place."""
    logits = torch.randn(num_rows, 50, generator=torch.Generator().manual_seed(num_sampled))
    table = RowParams(8)
    for slot in range(8):
        table.set(slot, SamplingParams(temperature=0.8), seed=slot, num_sampled=3)
    table.set(5, SamplingParams(temperature=0.8), seed=seed, num_sampled=num_sampled)
    alone, alone_logprob = sample(logits[:1], table, np.array([5]))
    table.set(5, SamplingParams(temperature=0.8), seed=seed, num_sampled=num_sampled)
    slots = np.array([*range(num_rows - 1), 5])
    together, logprobs = sample(logits.roll(-1, 0), table, slots)
    assert together[-1] == alone[0]
    assert logprobs[-1] == pytest.approx(alone_logprob[0], abs=1e-6)


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ('"foo": 1', "unknown field `foo`"),
        ('"top_p": 0', "top_p=0"),
        ('"temperature": -1', "temperature=-1"),
        ('"temperature": "hot"', "Expected `float`"),
        ('"repetition_penalty": 1.1', "repetition_penalty=1.1"),
        ('"ebnf": "a+"', "ebnf='a[+]'"),
        ('"regex": "a"', "regex='a'"),
        ('"max_new_tokens": 0', "max_new_tokens=0"),
    ],
)
def test_parameters_that_cannot_be_served_are_refused(field: str, sentence: str) -> None:
    """The error names the field."""
    body = '{"input_ids": [1], "sampling_params": {' + field + "}}"
    with pytest.raises(BadRequest, match=sentence):
        decode_request(body.encode())


def test_logits_that_are_not_finite_give_no_logprob() -> None:
    """NaN weights must not crash the engine: the id is in range and the logprob NaN."""
    table = RowParams(1)
    sampled, logprobs = sample(torch.full((1, 7), float("nan")), table, np.array([0]))
    assert 0 <= sampled[0] < 7
    assert np.isnan(logprobs[0])
