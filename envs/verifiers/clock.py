"""Times one verification without the time that it waits for its turn.

What other verifications take is counted against no answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_current: ContextVar[VerifierClock | None] = ContextVar("verifier_clock", default=None)


class VerifierClock:
    """Counts down while a verification works.

    Args:
        limit_s: how long it may work.
        end: monotonic time at which it is over, however long it waited.
    """

    def __init__(self, limit_s: float, end: float) -> None:
        self._started = time.monotonic()
        self.limit_s = max(0.0, min(limit_s, end - self._started))
        self._end = end
        self._waited_s = 0.0
        self._num_waiting = 0
        self._waiting_since = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that it may still work."""
        return self.limit_s - (time.monotonic() - self._started - self.waited_s)

    @property
    def waited_s(self) -> float:
        """Seconds that it waited for its turn so far."""
        waiting_s = time.monotonic() - self._waiting_since if self._num_waiting else 0.0
        return self._waited_s + waiting_s

    @property
    def until_end_s(self) -> float:
        """Seconds until it is over, whether it works or waits."""
        return self._end - time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The clock stands still within."""
        if not self._num_waiting:
            self._waiting_since = time.monotonic()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._waited_s += time.monotonic() - self._waiting_since

    async def watch(self, working: asyncio.Future[Any]) -> bool:
        """Wait until `working` is done (True) or either time has passed (False)."""
        while not working.done():
            left_s = min(self.left_s, self.until_end_s)
            if left_s <= 0:
                return False
            await asyncio.wait({working}, timeout=left_s)
        return True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tasks that are made within are timed by this clock."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


@contextmanager
def waiting_for_turn() -> Iterator[None]:
    """Stop the clock of the verification that runs here, if one does."""
    clock = _current.get()
    if clock is None:
        yield
        return
    with clock.waiting():
        yield
