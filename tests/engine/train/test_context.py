"""Which tokens of a row each context-parallel rank computes, and what becomes of the loss."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outloop.engine.train.data.context_parallel import ContextPlace
from outloop.engine.train.data.microbatch import Microbatch, build_microbatch
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch

CPU = torch.device("cpu")


def _places(num_ranks: int) -> list[ContextPlace]:
    return [ContextPlace(rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


@given(
    lengths=st.lists(st.integers(1, 60), max_size=12),
    num_ranks=st.integers(1, 5),
    multiple=st.integers(1, 4),
)
def test_every_token_is_on_one_rank_and_gathering_puts_the_row_back(
    lengths: list[int], num_ranks: int, multiple: int
) -> None:
    """Ranks have equally many, in order of the row, and a multiple of what they must."""
    ranks = _places(num_ranks)
    padded = [ranks[0].padded_length(length) for length in lengths]
    assert all(0 <= after - n < 2 * num_ranks for after, n in zip(padded, lengths, strict=True))
    padded.append(-sum(padded) % ranks[0].row_multiple(multiple))
    parts = [rank.places(padded) for rank in ranks]
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) % multiple == 0
    assert all((np.diff(part) > 0).all() for part in parts)
    row = np.random.default_rng(0).integers(0, 1000, sum(padded))
    gathered = np.full(len(row), -1)
    for part in parts:
        gathered[part] = row[part]
    assert (gathered == row).all()


def test_ranks_have_the_chunks_that_make_causal_work_equal() -> None:
    """Rank r of two has chunks r and 3 - r of every sample; sums of positions are equal."""
    first, second = (place.places([8, 4]).tolist() for place in _places(2))
    assert first == [0, 1, 6, 7, 8, 11]
    assert second == [2, 3, 4, 5, 9, 10]
    assert sum(first) == sum(second)


def test_a_length_that_was_not_padded_is_refused() -> None:
    """With the multiple."""
    with pytest.raises(ValueError, match="length=6; a multiple of 4"):
        ContextPlace(rank=0, num_ranks=2).places([6])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("multiple", [1, 4])
def test_the_shares_of_a_microbatch_are_the_whole(
    num_ranks: int, multiple: int, make_samples: Callable[..., list[Sample]]
) -> None:
    """Every trained token is on one rank, with its facts, behind the token that predicts it."""
    samples = make_samples(7)
    whole, rows = TrainBatch.of(samples), range(len(samples))
    alone = build_microbatch(whole, rows, CPU)
    shares = [
        build_microbatch(
            whole, rows, CPU, multiple=multiple, layers="transformer_engine", context=place
        )
        for place in _places(num_ranks)
    ]
    assert sum(share.num_tokens for share in shares) == alone.num_tokens
    assert {share.num_trained_tokens for share in shares} == {len(alone.predictors_N)}
    order = torch.cat([share.trained_N for share in shares])
    assert sorted(order.tolist()) == list(range(len(alone.predictors_N)))
    back = torch.argsort(order)
    for name in ("token_ids_N", "behavior_logprobs_N", "advantages_N", "policy_versions_N"):
        parts = torch.cat([getattr(share.targets, name) for share in shares])
        assert torch.equal(parts[back], getattr(alone.targets, name)), name
    assert torch.equal(torch.cat([s.sequences_N for s in shares])[back], alone.sequences_N)
    assert torch.equal(torch.cat([_predicting(s) for s in shares])[back], _predicting(alone))
    positions = torch.cat([share.row.positions[share.predictors_N] for share in shares])
    assert torch.equal(positions[back], alone.row.positions[alone.predictors_N])


def _predicting(batch: Microbatch) -> torch.Tensor:
    return batch.token_ids_T[batch.predictors_N]


def test_a_share_says_where_samples_of_the_whole_row_begin(
    make_samples: Callable[..., list[Sample]],
) -> None:
    """Boundaries are those of the padded row on every rank; tokens and positions are its share."""
    samples = make_samples(5)
    for place in _places(2):
        whole = TrainBatch.of(samples)
        batch = build_microbatch(whole, range(5), CPU, layers="transformer_engine", context=place)
        padded = [place.padded_length(sample.num_tokens) for sample in samples]
        assert batch.row.cu_seqlens_q.diff().tolist() == padded
        assert torch.equal(batch.row.cu_seqlens_kv_padded, batch.row.cu_seqlens_q)
        assert len(batch.row.positions) == len(batch.token_ids_T) == sum(padded) // 2
        assert batch.row.num_padded_tokens == sum(padded) // 2
        positions = np.concatenate([np.arange(length) for length in padded])
        assert (batch.row.positions.numpy() == positions[place.places(padded)]).all()


def test_a_rank_without_samples_has_padding() -> None:
    """One share of a row without samples is padding alone, equally long on each rank."""
    shares = [
        build_microbatch(TrainBatch.of([]), [], CPU, multiple=2, context=place)
        for place in _places(2)
    ]
    assert [len(share.token_ids_T) for share in shares] == [2, 2]
    assert all(share.num_tokens == 0 and len(share.predictors_N) == 0 for share in shares)
