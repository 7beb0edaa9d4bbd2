"""Hands out the places at which answers are judged, so that no answer holds up the others.

Each answer has a short turn first. An answer that needs more has a long turn afterwards: with the
verifier's own limits, from the start, and behind all that wait for a short one. Some places take
short turns only. So an answer that runs into its limits delays another by a short turn at most.
Multilevel feedback queue (Corbato et al. 1962), with two levels, and restarts in place of resuming.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from outloop.envs.verifiers.clock import waiting_for_turn

T = TypeVar("T")
SHORT_S = 1.5
"""Wall time of a short turn."""
SHORT_CPU_S = 1
"""CPU time of a short turn."""


@dataclass(slots=True)
class Place(Generic[T]):
    """One place; the answer that has it may use what is held, or replace it."""

    held: T | None = None
    """A worker or a session; None: to be made."""


class Turns(Generic[T]):
    """The places of one verifier.

    Args:
        num_long: long turns at the same time. A quarter as many places, at least one, are added
            for short turns.
    """

    def __init__(self, num_long: int) -> None:
        self._free = [Place[T]() for _ in range(num_long + max(1, num_long // 4))]
        self._num_long_left = num_long
        self._short: deque[asyncio.Future[Place[T]]] = deque()
        self._long: deque[asyncio.Future[Place[T]]] = deque()

    @asynccontextmanager
    async def turn(self, *, is_long: bool) -> AsyncIterator[Place[T]]:
        """Wait for a place, without a limit, and have it inside the context."""
        place = await self._take(is_long)
        try:
            yield place
        finally:
            self._give_back(place, is_long)

    def take_held(self) -> list[T]:
        """Take what the free places hold away from them."""
        held = [place.held for place in self._free if place.held is not None]
        for place in self._free:
            place.held = None
        return held

    async def _take(self, is_long: bool) -> Place[T]:
        ticket: asyncio.Future[Place[T]] = asyncio.get_running_loop().create_future()
        (self._long if is_long else self._short).append(ticket)
        self._hand_out()
        try:
            with waiting_for_turn(had_one=is_long):
                return await ticket
        except BaseException:
            if ticket.done() and not ticket.cancelled():
                self._give_back(ticket.result(), is_long)
            raise

    def _give_back(self, place: Place[T], is_long: bool) -> None:
        self._free.append(place)
        self._num_long_left += is_long
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and (ticket := _next(self._short)):
            ticket.set_result(self._free.pop())
        while self._free and self._num_long_left and (ticket := _next(self._long)):
            self._num_long_left -= 1
            ticket.set_result(self._free.pop())


def _next(waiting: deque[asyncio.Future[Place[T]]]) -> asyncio.Future[Place[T]] | None:
    """Remove and return the first that still waits."""
    while waiting:
        ticket = waiting.popleft()
        if not ticket.done():  # cancelled
            return ticket
    return None
