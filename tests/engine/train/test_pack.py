"""Packing samples into microbatches and rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outloop.buffer.errors import RecordError
from outloop.engine.train.data.packing import cost, deal, imbalance, pack
from outloop.engine.train.megatron.layers import pack_row


@given(lengths=st.lists(st.integers(1, 100), max_size=60), budget=st.integers(100, 400))
def test_every_sample_is_packed_once_within_the_budget(lengths: list[int], budget: int) -> None:
    """No loss, no repetition, no overflow, and no more bins than first fit promises."""
    bins = pack(lengths, max_tokens=budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= budget for members in bins)
    assert len(bins) <= max(1, 2 * -(-sum(lengths) // budget))


def test_a_sample_beyond_the_budget_is_refused() -> None:
    """The sentence names the setting."""
    with pytest.raises(RecordError, match="max_microbatch_tokens=10"):
        pack([11], max_tokens=10)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_row_puts_every_token_back_in_place(lengths: list[int]) -> None:
    """Gathering by length class and restoring the order is the identity."""
    row = pack_row(lengths, torch.device("cpu"))
    padded = torch.cat([torch.arange(sum(lengths)), torch.tensor([-1])])
    gathered = torch.cat([padded[index].reshape(-1) for index in row.classes])
    assert torch.equal(gathered[row.order], torch.arange(sum(lengths)))
    assert row.positions.tolist() == [i for length in lengths for i in range(length)]
    assert sum(index.numel() for index in row.classes) <= 1 + sum(lengths) / 0.98


@pytest.mark.medium
@given(
    lengths=st.lists(st.integers(1, 100), max_size=60),
    budget=st.integers(100, 400),
    num_ranks=st.integers(1, 5),
)
def test_every_sample_is_dealt_once_and_ranks_do_the_same_number(
    lengths: list[int], budget: int, num_ranks: int
) -> None:
    """No loss, no repetition, no overflow; every rank has as many microbatches as the others."""
    ranks = deal(lengths, max_tokens=budget, num_ranks=num_ranks, hidden_size=8)
    flat = [index for rank in ranks for members in rank for index in members]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= budget for rank in ranks for part in rank)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1


def test_ranks_get_equal_work_from_a_heavy_tail() -> None:
    """Eight long samples and hundreds of short ones: the busiest of four ranks has 2% more."""
    lengths = [4000] * 8 + [17 * index % 300 + 10 for index in range(400)]
    ranks = deal(lengths, max_tokens=16384, num_ranks=4, hidden_size=256)
    assert imbalance(ranks, lengths, 256) < 0.02


def test_long_samples_cost_more_than_their_tokens() -> None:
    """Attention is quadratic: at 12 times the hidden size it costs what the matrices do."""
    assert cost(12 * 64, 64) == 2 * 12 * 64
    assert cost(100, 64) + cost(100, 64) < cost(200, 64)
