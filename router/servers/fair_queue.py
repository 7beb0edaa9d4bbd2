"""Turns that wait for a server.

Owns: whose turn is next. Does not own: which server it gets (pool). Invariant: episodes are served
in rotation, so that one which asks for many turns at once delays another's by one turn a round.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from outloop.router.errors import Refusal

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Ticket(Generic[T]):
    """One turn that waits; `choose` says what it may have now, None: nothing yet."""

    episode_id: str
    choose: Callable[[], T | None]
    granted: asyncio.Future[T] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class FairQueue(Generic[T]):
    """Tickets by episode; the first of each in rotation."""

    def __init__(self) -> None:
        self._tickets: OrderedDict[str, deque[Ticket[T]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def add(self, ticket: Ticket[T]) -> None:
        """Wait behind the other turns of its episode."""
        self._tickets.setdefault(ticket.episode_id, deque()).append(ticket)

    def remove(self, ticket: Ticket[T]) -> None:
        """Wait no more."""
        waiting = self._tickets.get(ticket.episode_id)
        if waiting is not None and ticket in waiting:
            waiting.remove(ticket)
            if not waiting:
                del self._tickets[ticket.episode_id]

    def serve(self, take: Callable[[T], None]) -> None:
        """Hand out what can be had; `take` is called for each before its waiter learns of it."""
        num_passed = 0
        while num_passed < len(self._tickets):
            episode_id, waiting = next(iter(self._tickets.items()))
            ticket = waiting[0]
            try:
                found = ticket.choose()
            except Refusal as refusal:
                self.remove(ticket)
                ticket.granted.set_exception(refusal)
                continue
            self._tickets.move_to_end(episode_id)
            if found is None:
                num_passed += 1
                continue
            num_passed = 0
            self.remove(ticket)
            take(found)
            ticket.granted.set_result(found)
