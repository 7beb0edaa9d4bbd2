"""Estimates from several samples of each of several tasks, and how sure they are.

Tasks are the clusters: samples of one task are not independent, so that a standard error that
counts episodes would be too small wherever a task is played more than once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_WORST = 5
"""Tasks that a change names."""
_BISECTIONS = 60


def mean_and_error(tasks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean over all values, and its standard error clustered by task; NaN without data.

    error^2 = G / (G - 1) * sum over the G tasks of (sum of value - mean)^2 / (number of values)^2,
    which for one value a task is the sample variance over their number. With one task its values
    are taken as independent: the error is that of playing this task again.
    """
    tasks = [values for values in tasks if len(values)]
    if len(tasks) == 1:
        tasks = [[value] for value in tasks[0]]
    count = sum(len(values) for values in tasks)
    if count == 0:
        return math.nan, math.nan
    mean = math.fsum(math.fsum(values) for values in tasks) / count
    if len(tasks) == 1:
        return mean, math.nan
    spread = math.fsum(math.fsum(value - mean for value in values) ** 2 for values in tasks)
    return mean, math.sqrt(spread * len(tasks) / (len(tasks) - 1)) / count


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374, equation 1: how likely one of k samples of a task passes, without bias.

    Raises:
        ValueError: k exceeds the number of samples.
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"k={k} of num_samples={num_samples}, num_passed={num_passed}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def majority_passes(answers: Sequence[str], passed: Sequence[bool]) -> float | None:
    """Whether the most frequent answer of a task passes; between answers that are as frequent as
    each other, the mean. None: no sample says what it answered.

    Self-consistency, arXiv:2203.11171, section 2. Samples without an answer have no vote. Equal
    answers pass by the share of their samples that do: a verifier may look at more than the answer.
    """
    votes = Counter(answer.strip() for answer in answers if answer.strip())
    if not votes:
        return None
    most = max(votes.values())
    chosen = [
        [own for answer, own in zip(answers, passed, strict=True) if answer.strip() == winner]
        for winner, count in votes.items()
        if count == most
    ]
    return math.fsum(sum(own) / len(own) for own in chosen) / len(chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What changed from one evaluation to another, over the tasks that both have."""

    num_tasks: int
    difference: float
    """Mean over tasks of the difference of their mean rewards."""
    standard_error: float
    low: float
    high: float
    """Of the 95% interval of the difference."""
    fell: tuple[tuple[str, float, float], ...]
    """The tasks that fell most: task_id, reward before and after."""

    @property
    def is_regression(self) -> bool:
        """The whole interval is below zero."""
        return self.high < 0.0


def change_between(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> Change:
    """The paired difference of two evaluations, by task: what makes one task harder than another
    is in both, and drops out.

    Args:
        before, after: rewards of each task's samples by task_id.

    Raises:
        ValueError: fewer than two tasks are in both.
    """
    shared = [name for name in before if len(before[name]) and len(after.get(name, ()))]
    if len(shared) < 2:
        raise ValueError(f"{len(shared)} tasks are in both evaluations; at least 2 are needed")
    means = {
        name: (
            math.fsum(before[name]) / len(before[name]),
            math.fsum(after[name]) / len(after[name]),
        )
        for name in shared
    }
    difference, error = mean_and_error([[new - old] for old, new in means.values()])
    width = student_quantile(0.975, len(shared) - 1) * error
    fallen = sorted((new - old, name) for name, (old, new) in means.items() if new < old)
    return Change(
        num_tasks=len(shared),
        difference=difference,
        standard_error=error,
        low=difference - width,
        high=difference + width,
        fell=tuple((name, *means[name]) for _, name in fallen[:_WORST]),
    )


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, by bisection of its distribution function."""
    low, high = 0.0, 1e4
    target = abs(probability - 0.5)
    if target == 0.0:
        return 0.0
    if degrees > 200:
        # Abramowitz and Stegun, 26.7.5, two terms.
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * degrees)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _student_mass(middle, degrees) < target:
            low = middle
        else:
            high = middle
    return math.copysign((low + high) / 2, probability - 0.5)


def _student_mass(t: float, degrees: int) -> float:
    """P(0 < T < t), in closed form for a whole number of degrees (Abramowitz and Stegun, 26.7.3
    and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle) ** 2
    term, total = 1.0, 1.0
    if degrees % 2 == 0:
        for step in range(2, degrees, 2):
            term *= cosine * (step - 1) / step
            total += term
        return math.sin(angle) * total / 2
    if degrees == 1:
        return angle / math.pi
    for step in range(3, degrees, 2):
        term *= cosine * (step - 1) / step
        total += term
    return (angle + math.sin(angle) * math.cos(angle) * total) / math.pi
