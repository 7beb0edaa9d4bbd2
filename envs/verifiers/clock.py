"""Measures the time that one verification works, without the time that it waits for others."""

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
        end: monotonic time at which it must end, even if it only waited.
    """

    def __init__(self, limit_s: float, end: float) -> None:
        self._started = time.monotonic()
        self.limit_s = max(0.0, min(limit_s, end - self._started))
        self._end = end
        self._waited_s = 0.0
        self._num_waiting = 0
        self._waiting_since = 0.0
        self.had_turn = False
        """Whether the answer has used up a turn at the machine."""

    @property
    def left_s(self) -> float:
        """Seconds that it may still work."""
        return self.limit_s - (time.monotonic() - self._started - self.waited_s)

    @property
    def waited_s(self) -> float:
        """Seconds that it has waited for its turn."""
        waiting_s = time.monotonic() - self._waiting_since if self._num_waiting else 0.0
        return self._waited_s + waiting_s

    @property
    def until_end_s(self) -> float:
        """Seconds until `end`."""
        return self._end - time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the clock inside the context."""
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
        """Wait until `working` is done (True), or until a time has passed (False)."""
        while not working.done():
            left_s = min(self.left_s, self.until_end_s)
            if left_s <= 0:
                return False
            await asyncio.wait({working}, timeout=left_s)
        return True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let this clock measure the tasks that are created inside the context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


@contextmanager
def waiting_for_turn(*, had_one: bool = False) -> Iterator[None]:
    """Stop the clock of the current verification, if there is one.

    Args:
        had_one: the answer has used up a turn, and waits for a longer one.
    """
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.had_turn = clock.had_turn or had_one
    with clock.waiting():
        yield
