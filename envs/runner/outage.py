"""Tells whether the environment is away, by the attempts that ended last.

While each of them failed for the environment's reasons, one attempt at a time finds out whether it
is back. To replace every attempt at once would fail as many again. An environment that has never
worked is not away; FailureLog stops such a run.
"""

from __future__ import annotations

_NUM_ALIKE = 4
"""So many attempts in a row say that the environment is away."""
_MARGIN_S = 1.0
_NO_LIMIT = 2**31


class Outage:
    """The attempts of one runner. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._probe: str | None = None
        self._has_worked = False
        self._num_failed = 0
        self._longest_s = 0.0
        """Of the attempts that failed in a row."""

    def start(self, episode_id: str, now: float) -> None:
        """Note that an attempt starts."""
        self._started[episode_id] = now
        if self._has_worked and self._num_failed >= _NUM_ALIKE:
            self._probe = episode_id

    def end(self, episode_id: str, now: float, *, has_failed: bool) -> None:
        """Note that an attempt ended; `has_failed`: by the environment."""
        lasted_s = now - self._started.pop(episode_id, now)
        if self._probe == episode_id:
            self._probe = None
        self._has_worked |= not has_failed
        self._num_failed = self._num_failed + 1 if has_failed else 0
        self._longest_s = max(self._longest_s, lasted_s) if has_failed else 0.0

    def num_allowed(self, now: float) -> int:
        """The number of further attempts that may start."""
        if not self._has_worked or self._num_failed < _NUM_ALIKE:
            return _NO_LIMIT
        if self._probe is None:
            return 1
        if now - self._started[self._probe] <= 2 * self._longest_s + _MARGIN_S:
            return 0
        # It plays for longer than those that failed: the environment is back.
        self._num_failed, self._longest_s = 0, 0.0
        return _NO_LIMIT
