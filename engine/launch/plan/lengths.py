"""Distributions of seconds and tokens, and their exact moments.

A distribution is a sorted table of equally likely values. Its mean and the mean of a maximum are
sums over the table, not estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

NUM_QUANTILES = 16384
"""Values of a table. Rarer events than one in so many are not represented."""

Floats = npt.NDArray[np.float64]


class Part(BaseModel):
    """One part of a mixture: uniform from `low` to `high`, or log-normal and cut to that range."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    share: float = Field(gt=0)
    low: float = Field(0.0, ge=0)
    high: float = Field(math.inf, gt=0)
    median: float | None = Field(None, gt=0)
    """Median of a log-normal part. None: the part is uniform."""
    sigma: float = Field(0.0, ge=0)
    """Standard deviation of the logarithm."""

    @model_validator(mode="after")
    def _refuse_endless(self) -> Part:
        if self.high < self.low or (self.median is None and math.isinf(self.high)):
            raise ValueError(
                f"low={self.low:g} and high={self.high:g} are no range; give a high above low, or "
                "median and sigma"
            )
        return self

    def quantile(self, p: float) -> float:
        """Return the value below which a share `p` of this part lies."""
        if self.median is None:
            return self.low + p * (self.high - self.low)
        value = self.median * math.exp(self.sigma * NormalDist().inv_cdf(p))
        return min(max(value, self.low), self.high)


class Lengths:
    """A sorted table of NUM_QUANTILES equally likely values."""

    def __init__(self, values: Floats) -> None:
        """`values`: sorted, float64 [NUM_QUANTILES]."""
        self.values = values

    @classmethod
    def constant(cls, value: float) -> Lengths:
        """Make every episode alike."""
        return cls(np.full(NUM_QUANTILES, float(value)))

    @classmethod
    def mixture(cls, parts: Sequence[Part]) -> Lengths:
        """Mix parts in proportion to their shares; a part gives its quantiles at midpoints."""
        whole = math.fsum(part.share for part in parts)
        ends = [
            round(NUM_QUANTILES * math.fsum(part.share for part in parts[: i + 1]) / whole)
            for i in range(len(parts))
        ]
        values: list[float] = []
        for part, end in zip(parts, ends, strict=True):
            count = end - len(values)
            values += [part.quantile((i + 0.5) / count) for i in range(count)]
        return cls(np.sort(np.array(values)))

    def scaled(self, factor: float) -> Lengths:
        """Multiply every value by `factor`."""
        return Lengths(self.values * factor)

    def plus(self, other: Lengths, weight: float = 1.0) -> Lengths:
        """Add `weight` times `other` at the same quantile: the longest meets the longest."""
        return Lengths(np.sort(self.values + weight * other.values))

    def mean(self) -> float:
        """Return the mean of the table."""
        return float(self.values.mean())

    def mean_of_max(self, groups: int, group_size: int, by_task: float = 0.0) -> float:
        """Return the mean of the longest of `groups` groups of `group_size` attempts.

        An attempt takes the length of its task with probability b = `by_task`, else its own. With F
        the distribution function, the longest of a group is below x with probability
        G(x) = F [((1-b) F + b)^n - ((1-b) F)^n] + ((1-b) F)^n: F^n at b = 0 and F at b = 1. The
        longest of m groups is below x with probability G^m, so its mean is
        sum_i v_i (G_i^m - G_(i-1)^m) over the table. The result is exact for the table.
        """
        below = np.arange(NUM_QUANTILES + 1) / NUM_QUANTILES
        own = (1.0 - by_task) * below
        all_own = own**group_size
        group = below * ((own + by_task) ** group_size - all_own) + all_own
        return float(np.dot(self.values, np.diff(group**groups)))
