"""What failures and prices make of a plan.

Owns: availability, checkpoint intervals and money, by formula.

* A server that fails every F hours and is back after r seconds works for F / (F + r) of the time;
  its turns go on elsewhere from their recorded tokens, so nothing else is lost.
* A trainer of n GPUs, each of which fails every F hours, fails every F / n. A failure costs the
  restart and half the time between checkpoints on average. With T seconds between them and s to
  write one, overhead is s / T + (T / 2 + r) n / F; the best T is sqrt(2 s F / n) (Young 1974, "A
  first order approximation to the optimum checkpoint interval").
* Spot GPUs are failures with a rate of their own, at another price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def availability(*, hours_between: float, recovery_s: float) -> float:
    """Share of the time that something works which fails every `hours_between` hours."""
    return hours_between / (hours_between + recovery_s / 3600.0)


def best_checkpoint_interval_s(*, hours_between: float, write_s: float) -> float:
    """Seconds between checkpoints that lose the least."""
    return math.sqrt(2.0 * write_s * hours_between * 3600.0)


def trainer_share(
    *, hours_between: float, restart_s: float, interval_s: float, write_s: float
) -> float:
    """Share of the time in which a trainer that fails every `hours_between` hours makes progress.

    The first order of both losses, each as its own factor, so that no share is negative.
    """
    lost_s = interval_s / 2.0 + restart_s
    return (
        interval_s
        / (interval_s + write_s)
        * availability(hours_between=hours_between, recovery_s=lost_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Of a GPU for an hour."""

    on_demand: float
    spot: float | None = None
    spot_hours_between: float = 24.0
    """Hours until a spot GPU is taken away, on average."""


def per_step(
    *, servers: int, trainer: int, steps_per_hour: float, of_server: float, of_trainer: float
) -> float:
    """Money for a step with so many GPUs of each, at prices for an hour."""
    return (servers * of_server + trainer * of_trainer) / steps_per_hour
