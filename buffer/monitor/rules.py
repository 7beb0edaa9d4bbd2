"""The rules of alarms: what a run's numbers look like when it goes wrong.

A rule is a function of what was seen so far to a sentence, or None where all is well. Rules know
nothing of where numbers come from or where sentences go. The limit of an alarm that is on is
stricter by `_HYSTERESIS`, so that a number near its limit raises one alarm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outloop.buffer.settings.telemetry import AlarmSettings

_STANDARD_ERRORS = 4.0
_HYSTERESIS = 0.6
"""An alarm is over when its number is below this share of its limit, or above its limit over it."""
_LIMITS_OF_GAP = {"float32": (1e-6, 1e-5), "bfloat16": (0.02, 0.1)}
"""By the less exact dtype of server and trainer, nats: alarms.min_gap and alarms.max_gap."""
_MIN_TREND_ROWS = 20
_MAX_TREND_ROWS = 60
_TREND_ERRORS, _TREND_ERRORS_OF_HALF = 8.0, 3.0
_TREND_FACTOR = 2.0
"""A gap that grew by less within the rows looked at is no trend."""
_MIN_STALE_GROUPS = 8
"""With fewer, too old ones are chance."""
_MIN_ATTEMPTS = 50
_MAX_WRONG = 3
"""Publishes in a row that one server may take wrongly before it is an alarm."""
_MAX_ROWS = 2000
"""Steps that are remembered."""


@dataclass(kw_only=True)
class Seen:
    """What is known of a run now."""

    settings: AlarmSettings
    max_replaced_share: float = 1.0
    """env.max_replaced_share."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: servers or the trainer compute in it."""
    on: Collection[str] = ()
    """Alarms that are on."""
    is_rl: bool = True
    """False: in supervised training, where batches differ in size, rates say nothing."""
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    """Of steps, in order; a step that was made again replaces what came after it."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Of the buffer, now; empty where Redis does not answer."""
    old_stats: Mapping[str, float] = field(default_factory=dict)
    """Of the buffer, some minutes ago."""
    free_bytes: float = math.inf
    """On the disk of the run's folder."""
    silent_s: float = 0.0
    """Since the last step; 0 while no step is expected."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row of metrics.jsonl; those of evaluations alone are left out."""
        if not any(name.startswith("train/") for name in row):
            return
        while self.rows and self.rows[-1]["step"] >= row["step"]:
            self.rows.pop()
        self.rows.append(row)
        del self.rows[:-_MAX_ROWS]

    def column(self, name: str) -> list[float]:
        """A metric of every step that has it."""
        return [float(row[name]) for row in self.rows if row.get(name) is not None]

    def slack(self, name: str) -> float:
        """Factor on the upper limit of an alarm: below 1 while it is on."""
        return _HYSTERESIS if name in self.on else 1.0

    @property
    def gap_limits(self) -> tuple[float, float]:
        """alarms.min_gap and alarms.max_gap, or what fits the dtype."""
        least, most = _LIMITS_OF_GAP[self.dtype]
        settings = self.settings
        return (
            least if settings.min_gap is None else settings.min_gap,
            most if settings.max_gap is None else settings.max_gap,
        )


def reward_collapse(seen: Seen) -> str | None:
    """The mean reward of the last steps is below the best before by a large part of what was
    gained, and by more than chance."""
    rewards, width = seen.column("train/reward_mean"), seen.settings.num_steps
    if len(rewards) < 2 * width:
        return None
    means = _rolling(rewards, width)
    best_at = max(range(len(means) - width), key=means.__getitem__)
    best, last = means[best_at], means[-1]
    gained = best - min(means[: best_at + 1])
    noise = _standard_error(rewards[best_at : best_at + width], rewards[-width:])
    lost = max(seen.settings.reward_drop * gained, _STANDARD_ERRORS * noise)
    if best - last <= max(seen.slack("reward_collapse") * lost, 1e-9):
        return None
    return (
        f"the reward fell from {best:.3f} (best mean of {width} steps) to {last:.3f}; look at "
        "episodes from before and after, and go back to an older checkpoint"
    )


def gap_rising(seen: Seen) -> str | None:
    """Servers and trainer disagree on logprobs more than they did in the beginning, or more and
    more."""
    least, _ = seen.gap_limits
    for name, age, floor in (
        ("train/logprob_gap_mean", "of the trainer's version", least),
        # The policy's own movement is in it, whatever the dtype.
        ("train/logprob_gap_age_1", "one version old", _LIMITS_OF_GAP["bfloat16"][0]),
    ):
        gaps, width = seen.column(name), seen.settings.num_steps
        if len(gaps) < 2 * width:
            continue
        first, last = statistics.median(gaps[:width]), statistics.median(gaps[-width:])
        limit = max(floor, seen.settings.gap_factor * first)
        if last > seen.slack("gap_rising") * limit:
            return (
                f"the gap between the servers' and the trainer's logprobs is {last:.2g} nats on "
                f"tokens {age}, {first:.2g} in the first steps; servers may hold wrong weights, or "
                "kernels differ"
            )
    gaps = [gap for gap in seen.column("train/logprob_gap_mean") if gap > 0][-_MAX_TREND_ROWS:]
    if len(gaps) < _MIN_TREND_ROWS or gaps[-1] <= seen.slack("gap_rising") * least:
        return None
    factor, errors = _trend(gaps)
    # A jump is no drift: between two levels, both halves are flat.
    halves = [_trend(half)[1] for half in (gaps[: len(gaps) // 2], gaps[len(gaps) // 2 :])]
    if factor > _TREND_FACTOR and errors > _TREND_ERRORS and min(halves) > _TREND_ERRORS_OF_HALF:
        return (
            f"the gap between the servers' and the trainer's logprobs grows steadily: {factor:.1f} "
            f"times as large after {len(gaps)} steps, {gaps[-1]:.2g} nats; the servers' weights "
            "drift away from the trainer's"
        )
    return None


def gap_high(seen: Seen) -> str | None:
    """A step's tokens were sampled with other weights than those of their version."""
    gaps, (_, most) = seen.column("train/logprob_gap_mean"), seen.gap_limits
    if not gaps or gaps[-1] <= seen.slack("gap_high") * most:
        return None
    return (
        f"servers and trainer disagree by {gaps[-1]:.2g} nats on tokens of the trainer's version, "
        f"above {most:g}: servers hold wrong weights, or compute otherwise, and little is learned "
        'from such tokens. publish.verify="probe" compares both after each publish'
    )


def wrong_weights(seen: Seen) -> str | None:
    """A server is found with wrong weights again and again."""
    counts = seen.column("publish/wrong_in_a_row")
    if not counts or counts[-1] < _MAX_WRONG:
        return None
    return (
        f"publish.verify found wrong weights on the same server in {counts[-1]:.0f} publishes in a "
        "row; it serves only when it was fed through publish.fallback. events.jsonl and "
        "logs/trainer.log name server and tensor: look at its machine, or stop that server"
    )


def all_stale(seen: Seen) -> str | None:
    """Nearly every group that is over was dropped as too old."""
    if not seen.stats or not seen.old_stats:
        return None
    stale, trained = (
        seen.stats.get(name, 0.0) - seen.old_stats.get(name, 0.0)
        for name in ("buffer/dropped/stale", "buffer/trained_groups")
    )
    limit = seen.slack("all_stale") * seen.settings.max_stale_share
    if stale < _MIN_STALE_GROUPS or stale <= limit * (stale + trained):
        return None
    return (
        f"{stale:.0f} groups were dropped as stale and {trained:.0f} trained since the last look; "
        "lower buffer.pipeline_depth, or raise buffer.max_staleness"
    )


def throughput_halved(seen: Seen) -> str | None:
    """Fewer tokens per second than the same run has had."""
    rates, settings = seen.column("train/tokens_per_s"), seen.settings
    width = settings.num_steps
    if not seen.is_rl or len(rates) < 3 * width:
        return None
    medians = [statistics.median(rates[i : i + width]) for i in range(len(rates) - width + 1)]
    best, last = max(medians[:-width]), medians[-1]
    if last >= min(1.0, settings.min_throughput / seen.slack("throughput_halved")) * best:
        return None
    return (
        f"{last:.0f} tokens/s in the last {width} steps, {best:.0f} before; `outloop status` says "
        "what is waited for"
    )


def disk_low(seen: Seen) -> str | None:
    """Checkpoints and the archive will soon find no room."""
    if seen.free_bytes >= seen.settings.min_disk_gb * 1e9 / seen.slack("disk_low"):
        return None
    return (
        f"{seen.free_bytes / 1e9:.2f} GB are free on the disk of the run's folder; make room, or "
        "lower trainer.keep_checkpoints and trajectories.max_mb"
    )


def many_replaced(seen: Seen) -> str | None:
    """Attempts end without a result, and the run stops soon for it."""
    share = seen.stats.get("buffer/replaced_share", 0.0)
    limit = seen.settings.replaced_share * seen.max_replaced_share * seen.slack("many_replaced")
    if seen.stats.get("buffer/train_attempts", 0.0) < _MIN_ATTEMPTS or share < limit:
        return None
    return (
        f"{share:.1%} of the attempts ended without a result; above "
        f"env.max_replaced_share={seen.max_replaced_share:g} the run stops. `outloop episodes "
        "--failed` says why they ended"
    )


def silence(seen: Seen) -> str | None:
    """No step for a long time."""
    if seen.silent_s < seen.slack("silence") * seen.settings.max_silence_s:
        return None
    return f"no step for {seen.silent_s / 60:.0f} minutes; `outloop status` says what is waited for"


RULES: dict[str, Callable[[Seen], str | None]] = {
    "reward_collapse": reward_collapse,
    "gap_rising": gap_rising,
    "gap_high": gap_high,
    "wrong_weights": wrong_weights,
    "all_stale": all_stale,
    "throughput_halved": throughput_halved,
    "disk_low": disk_low,
    "many_replaced": many_replaced,
    "silence": silence,
}


def _rolling(values: Sequence[float], width: int) -> list[float]:
    return [
        statistics.fmean(values[first : first + width]) for first in range(len(values) - width + 1)
    ]


def _standard_error(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the difference of their means."""
    return math.sqrt(sum(statistics.variance(values) / len(values) for values in (one, other)))


def _trend(values: Sequence[float]) -> tuple[float, float]:
    """By how much positive values grew along the line through their logarithms, and its slope in
    standard errors."""
    logs, places = [math.log(value) for value in values], range(len(values))
    slope, intercept = statistics.linear_regression(places, logs)
    middle = statistics.fmean(places)
    spread = sum((place - middle) ** 2 for place in places)
    rest = sum((y - intercept - slope * x) ** 2 for x, y in zip(places, logs, strict=True))
    error = math.sqrt(rest / (len(values) - 2) / spread)
    return math.exp(slope * (len(values) - 1)), slope / max(error, 1e-12)
