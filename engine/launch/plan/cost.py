"""Prices of a step, in closed form.

A spot server is taken away every F hours and replaced after r seconds, so it works for F / (F + r)
of the time. Its turns continue elsewhere from their recorded tokens; nothing else is lost.
"""

from __future__ import annotations


def availability(*, hours_between: float, recovery_s: float) -> float:
    """Return the working share of a part that fails every `hours_between` hours."""
    return hours_between / (hours_between + recovery_s / 3600.0)


def per_step(
    *, servers: int, trainer: int, steps_per_hour: float, of_server: float, of_trainer: float
) -> float:
    """Return the price of a step, from numbers of GPUs and their prices per hour."""
    return (servers * of_server + trainer * of_trainer) / steps_per_hour
