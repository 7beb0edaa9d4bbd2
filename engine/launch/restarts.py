"""When a part that ended is started again.

A part may be started again as often as it takes over the life of a run: a server on a spot machine
ends every few hours. The wait before a restart doubles with each short life in a row, so that what
cannot run does not take the machine's time; a life of `healthy_s` forgets the short ones. After
`max_short_lives` in a row the part is given up, with the reason of the last one.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """How long to wait before a restart, in seconds."""

    first_s: float = 1.0
    """After the second short life in a row; after the first there is no wait."""
    max_s: float = 30.0
    healthy_s: float = 60.0
    """A part that lived so long was well: what happened before does not count."""
    max_short_lives: int = 6
    """In a row; one more and the part is given up."""


DEFAULT_BACKOFF = Backoff()


class Restarts:
    """The short lives of the parts of one run, by name."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._num_short_lives: dict[str, int] = {}

    def wait_s(self, name: str, *, lived_s: float) -> float | None:
        """Count an end of part `name` after `lived_s`; the wait in seconds, or None to give up."""
        backoff = self._backoff
        before = 0 if lived_s >= backoff.healthy_s else self._num_short_lives.get(name, 0)
        if before >= backoff.max_short_lives:
            return None
        self._num_short_lives[name] = before + 1
        if before == 0:
            return 0.0
        return float(min(backoff.first_s * 2 ** (before - 1), backoff.max_s))


def was_killed(exit_code: int) -> bool:
    """A signal ended the part; srun and shells report it as 128 + its number."""
    return exit_code < 0 or exit_code > 128


def end_reason(exit_code: int, last_line: str) -> str:
    """Why a part ended, for a person: the signal, or its exit code and last line."""
    if was_killed(exit_code):
        number = -exit_code if exit_code < 0 else exit_code - 128
        name = next((known.name for known in signal.Signals if known == number), number)
        return f"ended by {name}"
    if exit_code == 0:
        return "it was asked to stop"
    return f"exit_code={exit_code}: {last_line}" if last_line else f"exit_code={exit_code}"
