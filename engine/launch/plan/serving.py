"""Servers that share their speed among the turns they run.

Owns: when turns end on a pool of equal servers. Invariant: all running turns advance at one speed,
that of the mean number of turns a server; more than `max_running` a server wait in order.

A server that decodes n sequences at once takes a + b n seconds for a token of each: a is the time
to read the weights once, b that of one sequence's cache (Pope et al. 2022, "Efficiently Scaling
Transformer Inference", section 3). Both follow from two measured speeds: of one sequence, 1/(a+b),
and of m at once, m/(a + b m).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from outloop.buffer.errors import SettingsError
from outloop.buffer.packing import servers_to_keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """A pool of equal servers."""

    count: int
    tokens_per_s_alone: float
    """Of one sequence that a server runs alone."""
    tokens_per_s: float
    """Of a server that runs `max_running` sequences, together."""
    max_running: int
    packed: int | None = None
    """router.packed_turns_per_server; None: all servers run the turns, equally."""

    def __post_init__(self) -> None:
        if self.tokens_per_s > self.max_running * self.tokens_per_s_alone * (1 + 1e-9):
            raise SettingsError(
                f"servers.tokens_per_s={self.tokens_per_s:g} is more than servers.max_running="
                f"{self.max_running} sequences of servers.tokens_per_s_alone="
                f"{self.tokens_per_s_alone:g} can give; at most "
                f"{self.max_running * self.tokens_per_s_alone:g} is possible: measure both on the "
                "same server"
            )

        if self.packed is not None and not 2 <= self.packed <= self.max_running:
            raise SettingsError(
                f"servers.packed={self.packed} turns on a server that runs servers.max_running="
                f"{self.max_running}; 2 to {self.max_running} is allowed"
            )

    def seconds_per_token(self, running: float) -> float:
        """Of each of `running` sequences on one server; a + b n of the module's docstring."""
        alone = 1.0 / self.tokens_per_s_alone
        if self.max_running == 1:
            return alone
        full = self.max_running / self.tokens_per_s
        slope = (full - alone) / (self.max_running - 1)
        return alone + slope * (max(running, 1.0) - 1.0)

    @property
    def capacity(self) -> float:
        """Tokens a second of the whole pool when it is full."""
        return self.count * self.tokens_per_s


class Serving:
    """Turns on a pool, in time.

    Every running turn gains the same number of tokens, so one counter of tokens since the start
    orders all endings (processor sharing in virtual time, Parekh and Gallager 1993).
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._now = 0.0
        self._gained = 0.0
        self._running: list[tuple[float, int, object]] = []
        self._waiting: deque[tuple[float, object]] = deque()
        self._number = 0
        self._is_paused = False
        self.num_kept = servers.count
        """Servers that the turns are placed on."""
        self.tokens = 0.0
        """Sampled so far."""
        self.idle_s = 0.0
        """Seconds of servers without a turn so far."""

    def _speed(self) -> float:
        if self._is_paused or not self._running:
            return 0.0
        number = len(self._running)
        return 1.0 / self._servers.seconds_per_token(number / min(self.num_kept, number))

    def keep(self, num_episodes: int) -> int:
        """Place turns as the router does with so many episodes in flight; returns how many of them
        have their next turn on another server."""
        before, packed = self.num_kept, self._servers.packed
        if packed is None:
            return 0
        self.num_kept = servers_to_keep(
            before, num_episodes, num_servers=self._servers.count, turns_per_server=packed
        )
        return round(num_episodes * max(0.0, 1.0 - self.num_kept / before))

    def advance(self, now: float) -> None:
        """Let time pass until `now`."""
        gained = (now - self._now) * self._speed()
        self._gained += gained
        self.tokens += gained * len(self._running)
        num_idle = self._servers.count - min(self.num_kept, len(self._running))
        self.idle_s += (now - self._now) * num_idle
        self._now = now

    def next_end(self) -> float:
        """When the next turn ends if nothing changes; infinity: none will."""
        speed = self._speed()
        if speed == 0.0:
            return float("inf")
        return self._now + max(0.0, self._running[0][0] - self._gained) / speed

    def add(self, tokens: float, turn: object) -> None:
        """A turn of `tokens` arrives now; it waits where all places are taken."""
        if len(self._running) >= self._servers.count * self._servers.max_running:
            self._waiting.append((tokens, turn))
            return
        self._number += 1
        heapq.heappush(self._running, (self._gained + tokens, self._number, turn))

    def end_next(self) -> object:
        """Take out the turn whose end is now, and let a waiting one begin."""
        self._gained = max(self._gained, self._running[0][0])
        turn = heapq.heappop(self._running)[2]
        if self._waiting:
            self.add(*self._waiting.popleft())
        return turn

    def pause(self) -> None:
        """Turns stand still, as while weights are exchanged."""
        self._is_paused = True

    def resume(self) -> None:
        """Turns go on."""
        self._is_paused = False
