"""How long episodes are: distributions by their quantiles.

Owns: distributions of seconds and tokens, and their exact moments. Invariant: a distribution is a
sorted table of equally likely values, so that the mean and the mean of a maximum are sums, not
estimates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

NUM_QUANTILES = 16384
"""Values of a table: what is rarer than one in so many is not represented."""

Floats = npt.NDArray[np.float64]


def uniform(count: int, *, seed: int, stream: int, index: int = 0) -> Floats:
    """`count` independent numbers in [0, 1), the same for the same arguments in every release.

    Philox's raw stream, which numpy promises to keep.
    """
    key = np.array([seed % 2**64, stream * 2**48 + index], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a mixture: uniform from `low` to `high`, or log-normal and cut to that range."""

    share: float
    low: float = 0.0
    high: float = math.inf
    median: float | None = None
    """Of a log-normal part; None: uniform."""
    sigma: float = 0.0
    """Standard deviation of the logarithm."""

    def quantile(self, p: float) -> float:
        """The value below which a share `p` of this part lies."""
        if self.median is None:
            return self.low + p * (self.high - self.low)
        value = self.median * math.exp(self.sigma * NormalDist().inv_cdf(p))
        return min(max(value, self.low), self.high)


class Lengths:
    """A distribution: a sorted table of NUM_QUANTILES equally likely values."""

    def __init__(self, values: Floats) -> None:
        """`values`: sorted, float64 [NUM_QUANTILES]."""
        self.values = values

    @classmethod
    def constant(cls, value: float) -> Lengths:
        """Every episode alike."""
        return cls(np.full(NUM_QUANTILES, float(value)))

    @classmethod
    def mixture(cls, parts: Sequence[Part]) -> Lengths:
        """Parts in proportion to their shares; a part's values are its quantiles at midpoints."""
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

    @classmethod
    def sample(cls, measured: Floats) -> Lengths:
        """Measured values, each as likely as the others."""
        places = np.arange(NUM_QUANTILES) * len(measured) // NUM_QUANTILES
        return cls(np.sort(measured)[places])

    @classmethod
    def histogram(cls, counts: Mapping[float, int], *, mean: float) -> Lengths:
        """Buckets by their upper bounds, scaled so that the mean is `mean`.

        Within a bucket values are uniform in their logarithm, from the bound below (a third of its
        own for the first); the last, unbounded one reaches to three times the bound below it.
        """
        parts, low = [], 0.0
        for bound in sorted(counts):
            high = bound if math.isfinite(bound) else 3.0 * low
            low = low or high / 3.0
            # Four steps of a bucket, each uniform, are nearly uniform in the logarithm.
            edges = np.geomspace(low, high, 5)
            parts += [
                Part(share=counts[bound] / 4, low=float(a), high=float(b))
                for a, b in itertools.pairwise(edges)
            ]
            low = high
        found = cls.mixture([part for part in parts if part.share > 0])
        return found.scaled(mean / found.mean()) if found.mean() > 0 else found

    def scaled(self, factor: float) -> Lengths:
        """Every value times `factor`."""
        return Lengths(self.values * factor)

    def plus(self, other: Lengths, weight: float = 1.0) -> Lengths:
        """The sum with `weight` times `other` at the same quantile: the longest with its like."""
        return Lengths(np.sort(self.values + weight * other.values))

    def at(self, quantiles: Floats) -> Floats:
        """The values at `quantiles`, each in [0, 1)."""
        return self.values[(quantiles * NUM_QUANTILES).astype(np.int64)]

    def mean(self) -> float:
        """The mean of the table."""
        return float(self.values.mean())

    def mean_of_max(self, groups: int, group_size: int, by_task: float = 0.0) -> float:
        """The mean of the longest of `groups` groups of `group_size` attempts.

        An attempt takes the length of its task with probability b = `by_task`, else its own. With F
        the distribution function, all attempts of a group are below x if their own are, and the
        task is where one takes it: G(x) = F [((1-b) F + b)^n - ((1-b) F)^n] + ((1-b) F)^n, which is
        F^n at b = 0 and F at b = 1. The longest of m groups is below x with probability G^m, so
        that its mean is sum_i v_i (G_i^m - G_(i-1)^m) over the table. Exact for the table.
        """
        below = np.arange(NUM_QUANTILES + 1) / NUM_QUANTILES
        own = (1.0 - by_task) * below
        all_own = own**group_size
        group = below * ((own + by_task) ** group_size - all_own) + all_own
        return float(np.dot(self.values, np.diff(group**groups)))
