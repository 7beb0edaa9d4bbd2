"""Estimates of evaluations against their definitions, and wrong variants of them."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from fakes.mutants import Held, held, passes, public_functions_of
from outloop.buffer.evaluations import estimates

REWARDS = [[1.0, 0.0, 1.0, 1.0], [0.0], [0.5, 0.25], [0.0, 0.0, 0.0]]


def check_mean_and_error(m: Any) -> None:
    """The sandwich estimate of a mean, with tasks as clusters."""
    mean, error = m.mean_and_error([*REWARDS, []])
    values = np.concatenate(REWARDS)
    assert mean == pytest.approx(values.mean())
    sums = [np.sum(np.array(own) - values.mean()) for own in REWARDS]
    assert error == pytest.approx(math.sqrt(4 / 3 * np.square(sums).sum()) / len(values))
    singles = [[value] for value in values]
    assert m.mean_and_error(singles)[1] == pytest.approx(values.std(ddof=1) / math.sqrt(10))
    assert m.mean_and_error([REWARDS[0]])[1] == pytest.approx(np.std(REWARDS[0], ddof=1) / 2)
    assert all(map(math.isnan, m.mean_and_error([[]])))


def check_pass_at_k(m: Any) -> None:
    """The share of all subsets of k samples that hold one that passed."""
    for count, passed, k in itertools.product((1, 4, 6), (0, 1, 3), (1, 2, 4)):
        if passed <= count and k <= count:
            subsets = list(itertools.combinations(range(count), k))
            share = sum(any(i < passed for i in one) for one in subsets) / len(subsets)
            assert m.pass_at_k(count, passed, k) == pytest.approx(share)
    with pytest.raises(ValueError, match="k=5"):
        m.pass_at_k(4, 1, 5)


def check_majority(m: Any) -> None:
    """The most frequent answer; ties share; who says nothing has no vote."""
    for answers, passed, wanted in (
        (["7", "8", " 7 "], [True, False, True], 1.0),
        (["7", "8"], [True, False], 0.5),
        (["", "", "8"], [True, True, False], 0.0),
        (["7", "7", "8"], [True, False, True], 0.5),
        (["", " "], [True, True], None),
    ):
        assert m.majority_passes(answers, passed) == wanted


BEFORE = {"a": [1.0, 0.0], "b": [0.5], "c": [1.0], "d": [0.0]}
AFTER = {"a": [0.0, 0.0], "b": [0.25, 0.5], "c": [1.0], "e": [1.0]}


def check_change(m: Any) -> None:
    """Paired, over the tasks of both; the tasks that fell most first."""
    found = m.change_between(BEFORE, AFTER)
    gaps = np.array([-0.5, -0.125, 0.0])
    error = gaps.std(ddof=1) / math.sqrt(3)
    assert found.num_tasks == 3
    assert found.difference == pytest.approx(gaps.mean())
    assert found.standard_error == pytest.approx(error)
    # 4.303 is Student's 0.975 quantile of 2 degrees, from any table.
    assert found.low == pytest.approx(gaps.mean() - 4.3027 * error, abs=1e-4)
    assert found.high == pytest.approx(gaps.mean() + 4.3027 * error, abs=1e-4)
    assert found.fell == (("a", 0.5, 0.0), ("b", 0.5, 0.375))
    assert not found.is_regression
    worse = {name: [0.4 + 0.01 * i] for i, name in enumerate("abcd")}
    assert m.change_between({name: [1.0] for name in "abcd"}, worse).is_regression


def check_student(m: Any) -> None:
    """Against the density, integrated."""
    for degrees, probability in itertools.product((1, 2, 3, 6, 9, 400), (0.975, 0.9, 0.2)):
        found = m.student_quantile(probability, degrees)
        t = np.linspace(0.0, found, 200_001)
        scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
        density = (1 + t * t / degrees) ** (-(degrees + 1) / 2)
        density *= scale / math.sqrt(degrees * math.pi)
        mass = float((density[1:] + density[:-1]).sum() / 2 * (t[1] - t[0]))
        assert mass == pytest.approx(probability - 0.5, abs=1e-5)
    assert m.student_quantile(0.5, 3) == 0.0


HELD: tuple[Held, ...] = (
    held(
        estimates,
        "mean_and_error",
        check_mean_and_error,
        ("spread * len(tasks) / (len(tasks) - 1)", "spread"),
        (
            "math.fsum(value - mean for value in values) ** 2",
            "math.fsum((value - mean) ** 2 for value in values)",
        ),
        ("[[value] for value in tasks[0]]", "tasks"),
    ),
    held(
        estimates,
        "pass_at_k",
        check_pass_at_k,
        ("math.comb(num_samples - num_passed, k) /", "math.comb(num_samples - num_passed, 1) /"),
        ("1.0 - math.comb", "math.comb"),
    ),
    held(
        estimates,
        "majority_passes",
        check_majority,
        ("for answer in answers if answer.strip()", "for answer in answers"),
        ("if count == most", ""),
        ("sum(own) / len(own)", "max(own)"),
    ),
    held(
        estimates,
        "change_between",
        check_change,
        ("[[new - old] for old, new", "[[old - new] for old, new"),
        ("0.975, len(shared) - 1", "0.95, len(shared) - 1"),
        ("if new < old", ""),
    ),
    held(estimates, "Change.is_regression", check_change, ("self.high < 0.0", "self.low < 0.0")),
    held(
        estimates,
        "student_quantile",
        check_student,
        ("(4 * degrees)", "degrees"),
        ("math.copysign((low + high) / 2, probability - 0.5)", "(low + high) / 2"),
        ("range(2, degrees, 2)", "range(2, degrees - 2, 2)", "_student_mass"),
        ("range(3, degrees, 2)", "range(3, degrees + 2, 2)", "_student_mass"),
    ),
)


@pytest.mark.parametrize("one", HELD, ids=str)
def test_an_estimate_is_its_definition_and_no_mutant_is(one: Held) -> None:
    """Then each wrong variant fails the same check."""
    one.check(one.module)
    for mutant in one.mutants:
        assert not passes(one, mutant), f"nothing tells {mutant.right!r} from {mutant.wrong!r}"


def test_every_estimate_is_held() -> None:
    """A new one needs a definition and a mutant."""
    assert {one.name for one in HELD} == set(public_functions_of(estimates))
