"""Buckets: every byte once, in order, aligned, within the limit."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outloop.engine.publish.buckets.plan import ALIGNMENT, TensorSpec, plan_buckets

SPECS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    ),
    max_size=30,
).map(
    lambda rows: [
        TensorSpec(name=f"t{index}", shape=shape, dtype=dtype)
        for index, (shape, dtype) in enumerate(rows)
    ]
)


@pytest.mark.medium
@given(SPECS, st.integers(1, 20_000))
def test_every_tensor_lies_once_in_order_and_aligned(specs: list[TensorSpec], limit: int) -> None:
    """The plan is a partition of the tensors that keeps their order."""
    buckets = list(plan_buckets(specs, limit))
    assert [place.spec for bucket in buckets for place in bucket] == specs
    for bucket in buckets:
        assert bucket
        end = 0
        for place in bucket:
            assert place.start % ALIGNMENT == 0
            assert end <= place.start < end + ALIGNMENT
            assert place.end - place.start == place.spec.num_bytes
            end = place.end
        assert end <= limit or len(bucket) == 1


@pytest.mark.medium
@given(SPECS, st.integers(1, 20_000))
def test_no_bucket_is_opened_early(specs: list[TensorSpec], limit: int) -> None:
    """The first tensor of a bucket would not have fitted into the one before."""
    buckets = list(plan_buckets(specs, limit))
    for before, after in itertools.pairwise(buckets):
        start = -(-before[-1].end // ALIGNMENT) * ALIGNMENT
        assert start + after[0].spec.num_bytes > limit


def test_a_tensor_over_the_limit_gets_a_bucket_of_its_own() -> None:
    """It is neither split nor refused."""
    specs = [TensorSpec(name=str(n), shape=(n,), dtype=torch.float32) for n in (10, 1000, 10, 20)]
    names = [[p.spec.name for p in bucket] for bucket in plan_buckets(specs, 400)]
    assert names == [["10"], ["1000"], ["10", "20"]]
