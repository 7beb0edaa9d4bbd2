"""Turns that wait for a server.

Owns: whose turn is next. Does not own: which server it gets (pool). Invariant: episodes are served
in rotation, so that one which asks for many turns at once delays another's by one turn a round; to
add a turn and to serve one each cost the same however many wait.
"""

from __future__ import annotations

import asyncio
import itertools
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
    policy_version: int | None = None
    """The only version that may serve it. Tickets of one version are offered the same servers:
    where one of them gets nothing, none does."""
    granted: asyncio.Future[T] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _Episode(Generic[T]):
    """Waiting turns of one episode, and its place in the rotation."""

    __slots__ = ("place", "tickets")

    def __init__(self, place: int) -> None:
        self.place = place
        self.tickets: deque[Ticket[T]] = deque()


class FairQueue(Generic[T]):
    """Tickets by episode, in rotation; those of each version apart."""

    def __init__(self) -> None:
        self._rotations: dict[int | None, OrderedDict[str, _Episode[T]]] = {}
        self._places = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._rotations)

    @property
    def policy_versions(self) -> tuple[int | None, ...]:
        """The versions that are waited for; None: any."""
        return tuple(self._rotations)

    def add(self, ticket: Ticket[T]) -> None:
        """Wait behind the other turns of its episode."""
        rotation = self._rotations.setdefault(ticket.policy_version, OrderedDict())
        episode = rotation.get(ticket.episode_id)
        if episode is None:
            episode = rotation[ticket.episode_id] = _Episode(next(self._places))
        episode.tickets.append(ticket)

    def remove(self, ticket: Ticket[T]) -> None:
        """Wait no more."""
        rotation = self._rotations.get(ticket.policy_version, OrderedDict())
        episode = rotation.get(ticket.episode_id)
        if episode is None or ticket not in episode.tickets:
            return
        episode.tickets.remove(ticket)
        if not episode.tickets:
            del rotation[ticket.episode_id]
        if not rotation:
            del self._rotations[ticket.policy_version]

    def serve(self, take: Callable[[T], None]) -> None:
        """Hand out what can be had; `take` is called for each before its waiter learns of it."""
        while self._serve_one(take):
            pass

    def _serve_one(self, take: Callable[[T], None]) -> bool:
        """Serve, or refuse, the first ticket in rotation that can be; False: none can."""
        for rotation in sorted(self._rotations.values(), key=_place_of_first):
            episode_id, episode = next(iter(rotation.items()))
            ticket = episode.tickets[0]
            try:
                found = ticket.choose()
            except Refusal as refusal:
                self.remove(ticket)
                ticket.granted.set_exception(refusal)
                return True
            if found is None:
                continue
            rotation.move_to_end(episode_id)
            episode.place = next(self._places)
            self.remove(ticket)
            take(found)
            ticket.granted.set_result(found)
            return True
        return False


def _place_of_first(rotation: OrderedDict[str, _Episode[T]]) -> int:
    return next(iter(rotation.values())).place
