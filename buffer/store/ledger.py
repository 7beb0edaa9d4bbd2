"""The ledger of a run: how every attempt that started has ended.

The scripts that end attempts write it (`lifecycle.lua`); each attempt is entered once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outloop.buffer.errors import RecordError
from outloop.buffer.redis.scripts import SyncScripts
from outloop.buffer.telemetry import LEDGER_COLUMNS

_SLOW_SHARE = 0.1
REACHED_TRAINER = ("trained", "dropped/no_signal", "dropped/filtered", "dropped/overlong")
"""Columns of attempts that reached the trainer in time, including those that it filtered out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerColumn:
    """The attempts of one column; open ones have no length yet."""

    num_attempts: int = 0
    duration_s: float = 0.0
    """Sum of the times from the first claim to the score or the loss."""
    num_tokens: int = 0
    """Sum of the tokens sampled in their episodes."""
    by_duration: Mapping[float, int] = field(default_factory=dict)
    """Upper bound in seconds -> number of attempts; the last bound is infinity."""
    by_tokens: Mapping[float, int] = field(default_factory=dict)
    """Upper bound in sampled tokens -> number of attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Mean length of attempts."""

    num_attempts: int
    duration_s: float
    num_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowAttempts:
    """How slow training attempts fare against the others, among those that ended."""

    bound_s: float
    """Slow are those above it: of the ledger's bounds the one nearest to a tenth. NaN: all
    attempts are about equally long."""
    share_ratio: float
    """The share of slow ones among attempts that the trainer saw in time over that among all; NaN
    where it saw none, or none is slow."""
    lost_share: float
    """Of the slow ones, those that it did not see in time."""
    z: float
    """Two-proportion z statistic, pooled: standard errors by which lost_share exceeds that of the
    others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Attempts started since the run began, and the column of each."""

    num_started: int
    columns: Mapping[str, LedgerColumn]
    """Only columns that hold an attempt."""
    training: Mapping[str, LedgerColumn]
    """The same without the attempts of evaluations."""

    def check(self) -> None:
        """Refuse a ledger that does not close.

        Raises:
            RecordError: an attempt is in no column, or in two.
        """
        numbers = {name: column.num_attempts for name, column in self.columns.items()}
        if sum(numbers.values()) != self.num_started:
            raise RecordError(
                f"the ledger does not close: num_started={self.num_started}, but its columns hold "
                f"{sum(numbers.values())}: {numbers}"
            )
        for name, column in self.columns.items():
            for buckets in (column.by_duration, column.by_tokens):
                if name != "open" and sum(buckets.values()) != column.num_attempts:
                    raise RecordError(
                        f"the ledger does not close: column {name} holds {column.num_attempts} "
                        f"attempts, its buckets {dict(buckets)}"
                    )

    def length_of_ended(self) -> Length:
        """The mean of all training attempts that ended."""
        return _length([column for name, column in self.training.items() if name != "open"])

    def discarded_time_share(self) -> float:
        """The share of the time of ended attempts that the trainer did not see; 0 without any."""
        trained, ended = self.length_of_trained(), self.length_of_ended()
        spent = ended.num_attempts * ended.duration_s
        return 1.0 - trained.num_attempts * trained.duration_s / spent if spent else 0.0

    def slow_attempts(self) -> SlowAttempts:
        """Whether slow attempts reach the trainer like the others."""
        ended, trained = (
            _by_duration(self.training, None),
            _by_duration(self.training, REACHED_TRAINER),
        )
        total = sum(ended.values())

        def num_slower(counts: Mapping[float, int], bound: float) -> int:
            return sum(number for upper, number in counts.items() if upper > bound)

        tails = {bound: num_slower(ended, bound) / total for bound in ended}
        tails = {bound: share for bound, share in tails.items() if 0 < share < 1}
        if not tails:
            return SlowAttempts(bound_s=math.nan, share_ratio=math.nan, lost_share=0.0, z=0.0)
        bound = min(tails, key=lambda one: abs(math.log(tails[one] / _SLOW_SHARE)))
        slow, slow_trained = num_slower(ended, bound), num_slower(trained, bound)
        rest, rest_trained = total - slow, sum(trained.values()) - slow_trained
        lost, lost_rest = 1 - slow_trained / slow, 1 - rest_trained / rest
        pooled = 1 - (slow_trained + rest_trained) / total
        error = math.sqrt(pooled * (1 - pooled) * (1 / slow + 1 / rest))
        among_trained = slow_trained / max(slow_trained + rest_trained, 1)
        return SlowAttempts(
            bound_s=bound,
            share_ratio=among_trained / tails[bound] if pooled < 1 else math.nan,
            lost_share=lost,
            z=(lost - lost_rest) / error if error else 0.0,
        )

    def length_of_trained(self) -> Length:
        """The mean of those that reached the trainer in time: shorter if slow ones are lost."""
        return _length([self.training[name] for name in REACHED_TRAINER if name in self.training])


def ledger_from(scripts: SyncScripts) -> Ledger:
    """Read the ledger in one step, with the attempts that are open now."""
    answer: list[Any] = scripts.call("ledger", what="reading the ledger")
    num_open = {"train": int(answer[0]), "eval": int(answer[1])}
    numbers = {
        name.decode(): int(value) for name, value in zip(answer[2::2], answer[3::2], strict=True)
    }
    training = _columns(numbers, num_open, ("train",))
    return Ledger(
        num_started=numbers.get("train:started", 0) + numbers.get("eval:started", 0),
        columns=_columns(numbers, num_open, ("train", "eval")),
        training=training,
    )


def _columns(
    numbers: Mapping[str, int], num_open: Mapping[str, int], kinds: tuple[str, ...]
) -> dict[str, LedgerColumn]:
    columns = {
        name: LedgerColumn(
            num_attempts=_sum(numbers, kinds, f"{name}:n"),
            duration_s=_sum(numbers, kinds, f"{name}:ms") / 1000,
            num_tokens=_sum(numbers, kinds, f"{name}:tokens"),
            by_duration=_buckets(numbers, kinds, f"{name}:s:"),
            by_tokens=_buckets(numbers, kinds, f"{name}:t:"),
        )
        for name in LEDGER_COLUMNS
    }
    columns["open"] = LedgerColumn(num_attempts=sum(num_open[kind] for kind in kinds))
    return {name: column for name, column in columns.items() if column.num_attempts}


def _sum(numbers: Mapping[str, int], kinds: tuple[str, ...], name: str) -> int:
    return sum(numbers.get(f"{kind}:{name}", 0) for kind in kinds)


def _by_duration(
    training: Mapping[str, LedgerColumn], names: tuple[str, ...] | None
) -> dict[float, int]:
    """Attempts of these columns, by upper bound; None: of all that ended."""
    found: dict[float, int] = {}
    for name, column in training.items():
        if name != "open" and (names is None or name in names):
            for bound, number in column.by_duration.items():
                found[bound] = found.get(bound, 0) + number
    return found


def _buckets(
    numbers: Mapping[str, int], kinds: tuple[str, ...], beginning: str
) -> dict[float, int]:
    found: dict[float, int] = {}
    for kind in kinds:
        for name, number in numbers.items():
            if name.startswith(f"{kind}:{beginning}") and number:
                bound = float(name.rpartition(":")[2])
                found[bound] = found.get(bound, 0) + number
    return dict(sorted(found.items()))


def _length(columns: list[LedgerColumn]) -> Length:
    number = sum(column.num_attempts for column in columns)
    return Length(
        num_attempts=number,
        duration_s=sum(column.duration_s for column in columns) / max(number, 1),
        num_tokens=sum(column.num_tokens for column in columns) / max(number, 1),
    )
