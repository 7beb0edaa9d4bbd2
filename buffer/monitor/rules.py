"""The rules of alarms: what a run's numbers look like when it goes wrong.

A rule is a function of what was seen so far to a sentence, or None where all is well. Rules know
nothing of where numbers come from or where sentences go.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outloop.buffer.settings.telemetry import AlarmSettings

_STANDARD_ERRORS = 4.0
_MIN_STALE_GROUPS = 8
"""With fewer, too old ones are chance."""
_MIN_ATTEMPTS = 50
_MAX_ROWS = 2000
"""Steps that are remembered."""


@dataclass(kw_only=True)
class Seen:
    """What is known of a run now."""

    settings: AlarmSettings
    max_replaced_share: float = 1.0
    """env.max_replaced_share."""
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
    if best - last <= max(seen.settings.reward_drop * gained, _STANDARD_ERRORS * noise, 1e-9):
        return None
    return (
        f"the reward fell from {best:.3f} (best mean of {width} steps) to {last:.3f}; look at "
        "episodes from before and after, and go back to an older checkpoint"
    )


def gap_rising(seen: Seen) -> str | None:
    """Servers and trainer disagree on logprobs more than they did in the beginning."""
    gaps, settings = seen.column("train/logprob_gap_mean"), seen.settings
    width = settings.num_steps
    if len(gaps) < 2 * width:
        return None
    first, last = statistics.median(gaps[:width]), statistics.median(gaps[-width:])
    if last <= max(settings.min_gap, settings.gap_factor * first):
        return None
    return (
        f"the gap between the servers' and the trainer's logprobs is {last:.2g} nats, {first:.2g} "
        "in the first steps; servers may hold wrong weights, or kernels differ"
    )


def gap_high(seen: Seen) -> str | None:
    """A step's tokens were sampled with other weights than those of their version."""
    gaps = seen.column("train/logprob_gap_mean")
    if not gaps or gaps[-1] <= seen.settings.max_gap:
        return None
    return (
        f"servers and trainer disagree by {gaps[-1]:.2g} nats on tokens of the trainer's version: "
        "servers hold wrong weights, or compute otherwise, and little is learned from such tokens. "
        'publish.verify="probe" compares both after each publish'
    )


def all_stale(seen: Seen) -> str | None:
    """Nearly every group that is over was dropped as too old."""
    if not seen.stats or not seen.old_stats:
        return None
    stale, trained = (
        seen.stats.get(name, 0.0) - seen.old_stats.get(name, 0.0)
        for name in ("buffer/dropped/stale", "buffer/trained_groups")
    )
    if stale < _MIN_STALE_GROUPS or stale <= seen.settings.max_stale_share * (stale + trained):
        return None
    return (
        f"{stale:.0f} groups were dropped as stale and {trained:.0f} trained since the last look; "
        "lower buffer.pipeline_depth, or raise buffer.max_staleness"
    )


def throughput_halved(seen: Seen) -> str | None:
    """Fewer tokens per second than the same run has had."""
    rates, settings = seen.column("train/tokens_per_s"), seen.settings
    width = settings.num_steps
    if len(rates) < 3 * width:
        return None
    medians = [statistics.median(rates[i : i + width]) for i in range(len(rates) - width + 1)]
    best, last = max(medians[:-width]), medians[-1]
    if last >= settings.min_throughput * best:
        return None
    return (
        f"{last:.0f} tokens/s in the last {width} steps, {best:.0f} before; `outloop status` says "
        "what is waited for"
    )


def disk_low(seen: Seen) -> str | None:
    """Checkpoints and the archive will soon find no room."""
    if seen.free_bytes >= seen.settings.min_disk_gb * 1e9:
        return None
    return (
        f"{seen.free_bytes / 1e9:.2f} GB are free on the disk of the run's folder; make room, or "
        "lower trainer.keep_checkpoints and trajectories.max_mb"
    )


def many_replaced(seen: Seen) -> str | None:
    """Attempts end without a result, and the run stops soon for it."""
    share = seen.stats.get("buffer/replaced_share", 0.0)
    limit = seen.settings.replaced_share * seen.max_replaced_share
    if seen.stats.get("buffer/train_attempts", 0.0) < _MIN_ATTEMPTS or share < limit:
        return None
    return (
        f"{share:.1%} of the attempts ended without a result; above "
        f"env.max_replaced_share={seen.max_replaced_share:g} the run stops. `outloop episodes "
        "--failed` says why they ended"
    )


def silence(seen: Seen) -> str | None:
    """No step for a long time."""
    if seen.silent_s < seen.settings.max_silence_s:
        return None
    return f"no step for {seen.silent_s / 60:.0f} minutes; `outloop status` says what is waited for"


RULES: dict[str, Callable[[Seen], str | None]] = {
    "reward_collapse": reward_collapse,
    "gap_rising": gap_rising,
    "gap_high": gap_high,
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
