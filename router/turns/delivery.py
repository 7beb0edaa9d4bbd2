"""Waiting for somebody who has use for a generated turn.

Owns: how long a client that left may take to come back, and what the other processes are told.
Does not own: who waits (in_flight), recording. Invariant: a turn that is given up is counted once.
"""

from __future__ import annotations

from outloop.router.episodes.in_flight import InFlightTurn
from outloop.router.metrics import RouterMetrics
from outloop.router.peers.turn_locator import TurnLocator


class Delivery:
    """Decides whether a generated turn reaches anybody."""

    def __init__(
        self, locator: TurnLocator, metrics: RouterMetrics, *, return_grace_s: float
    ) -> None:
        self._locator = locator
        self._return_grace_s = return_grace_s
        self._metrics = metrics

    async def wait_for_client(self, turn: InFlightTurn) -> None:
        """Wait until somebody has use for the turn, or give up that anybody will."""
        if turn.is_given_up or turn.has_client:
            return
        if turn.episode.opening is not None:
            self._locator.announce_left(turn.episode, turn.retry_key)
        if not await turn.wait_for_client(self._return_grace_s):
            turn.is_given_up = True
            self._metrics.undelivered.inc()
