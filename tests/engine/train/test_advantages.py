"""Advantages against references written from the papers."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outloop.engine.train.algorithms.advantages import (
    group_advantages,
    groups_with_signal,
    has_signal,
    pass_at_k,
    take_advantages,
)

REWARDS = st.lists(st.floats(-100, 100).map(lambda value: round(value, 3)), min_size=1, max_size=12)


def reference(rewards: list[float], name: str) -> list[float]:
    """Each episode's advantage by its own sum, in float64."""
    count = len(rewards)
    mean = sum(rewards) / count
    if name == "grpo":
        std = (sum((r - mean) ** 2 for r in rewards) / (count - 1)) ** 0.5
        return [(r - mean) / (std + 1e-6) for r in rewards]
    if name == "dr_grpo":
        return [r - mean for r in rewards]
    return [
        r - sum(rewards[:index] + rewards[index + 1 :]) / (count - 1)
        for index, r in enumerate(rewards)
    ]


@pytest.mark.medium
@given(rewards=REWARDS, name=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_advantages_agree_with_the_papers(rewards: list[float], name: str) -> None:
    """Ragged groups of any size; no signal means exactly zero."""
    got = group_advantages(rewards, name)
    if not has_signal(rewards):
        assert (got == 0.0).all()
    else:
        assert np.allclose(got, reference(rewards, name), rtol=1e-9, atol=1e-9)


@given(rewards=REWARDS, name=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_advantages_sum_to_zero(rewards: list[float], name: str) -> None:
    """A baseline adds no net push."""
    assert abs(group_advantages(rewards, name).sum()) < 1e-6 * max(1.0, *map(abs, rewards))


@pytest.mark.parametrize("rewards", [[], [1.0], [0.5, 0.5, 0.5], [1.0, 1.0 + 1e-12]])
def test_fewer_than_two_different_rewards_are_no_signal(rewards: list[float]) -> None:
    """Single members, equal rewards and rounding differences teach nothing."""
    assert not has_signal(rewards)
    assert (group_advantages(rewards, "grpo") == 0.0).all()


def test_two_different_rewards_are_a_signal() -> None:
    """The smallest group that can be learned from."""
    assert group_advantages([0.0, 1.0], "grpo") == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)


GROUPS = st.lists(
    st.lists(st.integers(-4, 4).map(float), min_size=0, max_size=5), min_size=0, max_size=6
)


def take_reference(groups: list[list[float]], name: str) -> list[list[float]]:
    """REINFORCE++ and its variant with baseline, episode by episode in float64."""
    if name == "reinforce_pp_baseline":
        groups = [[r - sum(group) / len(group) for r in group] for group in groups]
    flat = [r for group in groups for r in group]
    if not flat:
        return [[] for _ in groups]
    mean = sum(flat) / len(flat)
    std = (sum((r - mean) ** 2 for r in flat) / len(flat)) ** 0.5
    return [[(r - mean) / (std + 1e-6) for r in group] for group in groups]


@pytest.mark.medium
@given(groups=GROUPS, name=st.sampled_from(["reinforce_pp", "reinforce_pp_baseline"]))
def test_reinforce_pp_normalises_over_the_take(groups: list[list[float]], name: str) -> None:
    """Ragged, empty, single-member and zero-variance groups; no signal is exactly zero."""
    signal = groups_with_signal(groups, name)
    got = take_advantages(groups, name, signal=signal)
    assert [len(values) for values in got] == [len(group) for group in groups]
    for values, wanted, has in zip(got, take_reference(groups, name), signal, strict=True):
        if has:
            assert np.allclose(values, wanted, rtol=1e-9, atol=1e-9)
        else:
            assert (values == 0.0).all()


@pytest.mark.medium
@given(groups=GROUPS, name=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_group_advantages_do_not_see_other_groups(groups: list[list[float]], name: str) -> None:
    """A take's advantages are those of each group alone."""
    got = take_advantages(groups, name, signal=groups_with_signal(groups, name))
    for values, group in zip(got, groups, strict=True):
        assert (values == group_advantages(group, name)).all()


def test_under_a_baseline_of_the_take_equal_groups_have_signal() -> None:
    """All right against all wrong teaches REINFORCE++, and no other estimator."""
    groups = [[1.0, 1.0], [0.0, 0.0, 0.0], []]
    assert groups_with_signal(groups, "reinforce_pp") == [True, True, False]
    assert groups_with_signal(groups, "reinforce_pp_baseline") == [False] * 3
    first, second, none = take_advantages(groups, "reinforce_pp", signal=[True, True, False])
    assert first[0] > 0 > second[0]
    assert len(none) == 0
    assert groups_with_signal([[1.0], [1.0]], "reinforce_pp") == [False, False]


def test_rounding_in_an_equal_group_is_not_an_advantage() -> None:
    """Three times 0.1 is not its own mean in binary; the group still gets exactly zero."""
    groups = [[0.1, 0.1, 0.1], [0.0, 1.0]]
    assert float(np.mean(groups[0])) != 0.1
    signal = groups_with_signal(groups, "reinforce_pp_baseline")
    first, second = take_advantages(groups, "reinforce_pp_baseline", signal=signal)
    assert (first == 0.0).all()
    assert second[1] > 0


@pytest.mark.parametrize("size", [2, 8])
def test_grpo_divides_by_the_deviation_that_torch_computes(size: int) -> None:
    """TRL, verl and slime take torch.std: the sample's, not the population's."""
    rewards = np.random.default_rng(size).normal(size=size)
    wanted = torch.tensor(rewards)
    wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-6)
    assert group_advantages(rewards.tolist(), "grpo") == pytest.approx(wanted.numpy())


def test_groups_that_do_not_count_change_no_statistics() -> None:
    """Left out of the take's mean and deviation, with advantages of zero."""
    groups = [[1.0, 0.0], [9.0, 9.0], [0.5]]
    signal = [True, True, True]
    got = take_advantages(groups, "reinforce_pp", signal=signal, counted=[True, False, True])
    alone = take_advantages([[1.0, 0.0], [0.5]], "reinforce_pp", signal=[True, True])
    assert got[0].tolist() == alone[0].tolist()
    assert got[2].tolist() == alone[1].tolist()
    assert got[1].tolist() == [0.0, 0.0]


def best_of_subsets(rewards: list[float], k: int) -> list[float]:
    """Pass@k Training as it is defined: every subset is a response, whose reward is its best."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = np.array([max(rewards[index] for index in subset) for subset in subsets])
    if best.std() <= 1e-9 * max(1.0, *map(abs, rewards)):
        return [0.0] * len(rewards)
    advantages = (best - best.mean()) / (best.std() + 1e-6)
    return [
        float(np.mean([a for a, subset in zip(advantages, subsets, strict=True) if i in subset]))
        for i in range(len(rewards))
    ]


@given(rewards=st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=7), k=st.integers(2, 6))
def test_pass_at_k_is_the_mean_over_all_subsets(rewards: list[float], k: int) -> None:
    """By enumeration, with ties and any rewards."""
    wanted = best_of_subsets(rewards, k) if k <= len(rewards) else [0.0] * len(rewards)
    assert pass_at_k(np.array(rewards), k=k) == pytest.approx(wanted, abs=1e-6)


def test_pass_at_k_is_the_papers_closed_form() -> None:
    """Two right of eight, k = 4; with five right every four hold one, and nothing is taught."""
    right, wrong, k = 2, 6, 4
    mean = 1 - math.comb(wrong, k) / math.comb(8, k)
    deviation = math.sqrt(mean * (1 - mean))
    of_right = (1 - mean) / deviation
    of_wrong = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(7, k - 1)) / deviation
    got = pass_at_k(np.array([1.0] * right + [0.0] * wrong), k=k)
    assert got == pytest.approx([of_right] * right + [of_wrong] * wrong, abs=1e-5)
    assert (pass_at_k(np.array([1.0] * 5 + [0.0] * 3), k=4) == 0).all()
