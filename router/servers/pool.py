"""Which server generates the next turn.

Owns: the router's view of servers, their load, and waiting for one. Does not own: server
processes, weights, whose turn is next (fair_queue). Invariant: a turn goes only to a server that is
registered, not quarantined, at the acknowledged (or the newer, announced) version, and has fewer
turns in flight than it may; to a server of an earlier version only if the turn names that version;
every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from outloop.buffer.errors import BufferUnavailable, DeadlineExceeded
from outloop.buffer.records import PolicyState, ServerEntry
from outloop.buffer.writer import BufferWriter
from outloop.router.errors import Refusal
from outloop.router.servers.fair_queue import FairQueue, Ticket
from outloop.router.timings import DEFAULT_TIMINGS, Timings

REFRESH_S = 0.25
_REFRESH_WHILE_AWAITED_S = 0.02
"""While a turn or a claim waits for what only the registry can bring: a server, or its version."""
_MAX_SUSPENDED_S = 2.0
_AFFINITY_SLACK = 4
"""An episode, and then its task, stays on its server while that has at most this many turns more
than another."""
_MAX_TASKS = 8192
"""Tasks affinity last server is remembered."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Affinity:
    """The episode of a turn, and its task: what the server of its last turn may have cached."""

    episode_id: str = ""
    task_id: str = ""


NO_AFFINITY = Affinity()


@dataclass(slots=True, eq=False)
class Server:
    """One server as this router sees it."""

    entry: ServerEntry
    policy_version: int | None
    num_in_flight: int = 0
    num_failures: int = 0
    suspended_until: float = 0.0
    """Monotonic seconds; no turns before."""
    deadlines: set[asyncio.Timeout] = field(default_factory=set)
    """Of the calls that are under way there; they end at once when the server has gone."""

    def postpone(self, seconds: float) -> None:
        """Give every call so much longer."""
        for deadline in self.deadlines:
            ends_at = deadline.when()
            if ends_at is not None and not deadline.expired():
                deadline.reschedule(ends_at + seconds)

    def give_up(self) -> None:
        """End every call: the server may never answer."""
        now = asyncio.get_running_loop().time()
        for deadline in self.deadlines:
            if not deadline.expired():
                deadline.reschedule(now)


class ServerPool:
    """Servers of the run; `run` keeps them up to date."""

    def __init__(
        self,
        buffer: BufferWriter,
        *,
        max_in_flight: int | None = None,
        goes_on_in_publish: bool = False,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        """Know no server.

        Args:
            max_in_flight: turns in flight at each server at once; more wait here.
            goes_on_in_publish: episodes may start while servers load the announced version.
        """
        self._goes_on_in_publish = goes_on_in_publish
        self._buffer = buffer
        self._max_in_flight = max_in_flight
        self._grace_s = timings.server_grace_s
        self._queue: FairQueue[Server] = FairQueue()
        self._task_servers: OrderedDict[str, str] = OrderedDict()
        self._servers: dict[str, Server] = {}
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()
        self._num_awaiting_registry = 0
        self._asleep_since: float | None = None
        """Monotonic seconds: the last time that all servers were seen asleep."""
        self._asleep_s = 0.0
        self.state: PolicyState | None = None

    @property
    def servers(self) -> tuple[Server, ...]:
        """Every registered server."""
        return tuple(self._servers.values())

    @property
    def clock_s(self) -> float:
        """Seconds by a clock that stands still while the servers' memory is the trainer's: what a
        turn waits for then is no failure of theirs."""
        return time.monotonic() - self._asleep_s

    @property
    def num_in_flight(self) -> int:
        """Turns that are being generated now."""
        return sum(server.num_in_flight for server in self._servers.values())

    @property
    def is_busy(self) -> bool:
        """True while turns wait for room on servers that hold their version."""
        return any(self._is_servable(version) for version in self._queue.policy_versions)

    @property
    def versions(self) -> frozenset[int]:
        """Versions that some server may generate with now."""
        return self.frozen_versions | frozenset(
            server.policy_version
            for server in self._servers.values()
            if server.policy_version is not None and self._may_serve(server)
        )

    @property
    def frozen_versions(self) -> frozenset[int]:
        """Earlier versions that servers keep through publishes."""
        return frozenset(
            server.policy_version
            for server in self._servers.values()
            if server.policy_version is not None and server.entry.is_frozen
        )

    @property
    def is_ready(self) -> bool:
        """True once a server holds the announced version, or one by which episodes may start."""
        state = self.state
        return (
            state is not None
            and state.announced_version is not None
            and state.acknowledged_version is not None
            and (self._goes_on_in_publish or state.acknowledged_version == state.announced_version)
            and any(self._may_serve(server) for server in self._servers.values())
        )

    async def run(self) -> None:
        """Follow the registry until cancelled; a buffer that is away is asked again."""
        while True:
            await self.refresh_if_possible()
            self._hurry.clear()
            if self._is_registry_awaited():
                await asyncio.sleep(_REFRESH_WHILE_AWAITED_S)
                continue
            try:
                async with asyncio.timeout(REFRESH_S):
                    await self._hurry.wait()
            except TimeoutError:
                continue

    def _is_registry_awaited(self) -> bool:
        """True if somebody waits who is not helped by a turn that ends somewhere."""
        return self._num_awaiting_registry > 0 or any(
            not self._is_servable(version) for version in self._queue.policy_versions
        )

    def _is_servable(self, policy_version: int | None) -> bool:
        """True if some server may serve the version, as soon as it has room."""
        return any(self._may_serve(server, policy_version) for server in self._servers.values())

    async def refresh(self) -> None:
        """Read the registry once."""
        state = await self._buffer.policy_state()
        self.state = state
        known = {entry.server_id for entry in state.servers}
        for gone in self._servers.keys() - known:
            left = self._servers.pop(gone)
            asyncio.get_running_loop().call_later(self._grace_s, self._leave, left)
        for entry in state.servers:
            server = self._servers.get(entry.server_id)
            if server is None:
                self._servers[entry.server_id] = Server(entry, entry.policy_version)
                continue
            if server.entry.url != entry.url:
                server.num_failures, server.suspended_until = 0, 0.0
            server.entry, server.policy_version = entry, entry.policy_version
        self._stop_clock()
        self._changed.set()
        self._queue.serve(self._take)

    def _stop_clock(self) -> None:
        """Postpone the deadlines of turns by the time that all servers were asleep since the last
        refresh."""
        now = time.monotonic()
        if self._asleep_since is not None:
            seconds = now - self._asleep_since
            self._asleep_s += seconds
            for server in self._servers.values():
                server.postpone(seconds)
        others = [s for s in self._servers.values() if not s.entry.is_frozen]
        is_asleep = bool(others) and all(server.entry.released for server in others)
        self._asleep_since = now if is_asleep else None

    async def refresh_if_possible(self) -> None:
        """Read the registry once; what is known stays if the buffer is away."""
        try:
            await self.refresh()
        except BufferUnavailable as error:
            _log.warning("policy_state_unavailable", error=str(error))

    async def wait_until(
        self, is_true: Callable[[], bool], *, timeout_s: float, who: str, phase: str
    ) -> None:
        """Wait until `is_true` holds after some refresh.

        Raises:
            DeadlineExceeded: `timeout_s` has passed.
        """
        if is_true():
            return
        deadline = time.monotonic() + timeout_s
        self._num_awaiting_registry += 1
        self._hurry.set()
        try:
            while not is_true():
                remaining = deadline - time.monotonic()
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), max(0.0, remaining))
                except TimeoutError:
                    raise DeadlineExceeded(
                        who=who, phase=phase, peer=self.describe(), after_s=timeout_s
                    ) from None
        finally:
            self._num_awaiting_registry -= 1

    async def acquire(
        self,
        preferred: str | None,
        affinity: Affinity = NO_AFFINITY,
        *,
        timeout_s: float,
        policy_version: int | None = None,
    ) -> Server:
        """The least loaded server that may serve, `preferred` if it is not much busier.

        Without a preferred one, the last that served the task, affinity prompt it may have cached.
        The caller gives it back with `release`. With `policy_version`, one that holds it. Turns
        that wait are served in rotation of their episodes.

        Raises:
            DeadlineExceeded: none could serve for `timeout_s`.
            Refusal: 404, no server holds `policy_version`.
        """

        choose = partial(self._choose, preferred, affinity, policy_version)
        server = choose() if not self._queue else None
        if server is not None:
            self._take(server)
        else:
            ticket = Ticket(affinity.episode_id, choose, policy_version)
            server = await self._wait_for_one(ticket, timeout_s)
        if affinity.task_id and preferred is None:
            self._task_servers[affinity.task_id] = server.entry.server_id
            self._task_servers.move_to_end(affinity.task_id)
            if len(self._task_servers) > _MAX_TASKS:
                self._task_servers.popitem(last=False)
        return server

    async def _wait_for_one(self, ticket: Ticket[Server], timeout_s: float) -> Server:
        self._queue.add(ticket)
        if not self._is_servable(ticket.policy_version):
            self._hurry.set()
        deadline = self.clock_s + timeout_s
        try:
            self._queue.serve(self._take)
            while not ticket.granted.done() and (left_s := deadline - self.clock_s) > 0:
                await asyncio.wait([ticket.granted], timeout=left_s)
        except asyncio.CancelledError:
            if ticket.granted.done() and ticket.granted.exception() is None:
                self.release(ticket.granted.result(), policy_version=None)
            raise
        finally:
            self._queue.remove(ticket)
        if not ticket.granted.done():
            raise DeadlineExceeded(
                who="router", phase="choose a server", peer=self.describe(), after_s=timeout_s
            )
        return ticket.granted.result()

    def _leave(self, server: Server) -> None:
        """Give up the calls of a server that left the registry and did not come back soon."""
        if all(other.entry.url != server.entry.url for other in self._servers.values()):
            server.give_up()

    def _take(self, server: Server) -> None:
        server.num_in_flight += 1

    def release(self, server: Server, *, policy_version: int | None) -> None:
        """Give a server back; `policy_version` is what it answered with, None if it did not."""
        server.num_in_flight -= 1
        if policy_version is not None:
            server.num_failures = 0
            server.policy_version = policy_version
        if self._queue:
            self._queue.serve(self._take)

    def suspend(self, server: Server, reason: str) -> None:
        """Send nothing to a server that failed for a moment, longer each time."""
        server.num_failures += 1
        # No float holds what doubles a thousand times.
        pause_s = min(0.1 * 2 ** min(server.num_failures - 1, 8), _MAX_SUSPENDED_S)
        server.suspended_until = time.monotonic() + pause_s
        asyncio.get_running_loop().call_later(pause_s, self._queue.serve, self._take)
        _log.warning(
            "server_failed",
            server_id=server.entry.server_id,
            url=server.entry.url,
            reason=reason,
            suspended_s=pause_s,
        )

    def describe(self) -> str:
        """Who could serve and why it does not, for error messages."""
        if not self._servers:
            return "a server to register (none has)"
        state = self.state
        announced = state.announced_version if state else None
        parts = [
            f"{s.entry.server_id} (policy_version={s.policy_version}, "
            f"is_quarantined={s.entry.is_quarantined}, num_failures={s.num_failures}, "
            f"num_in_flight={s.num_in_flight})"
            for s in self._servers.values()
        ]
        return f"a server at announced_version={announced}: {', '.join(parts)}"

    def _may_serve(self, server: Server, policy_version: int | None = None) -> bool:
        """Whether it may generate with this version; None: with whichever the run is at."""
        if policy_version not in (None, server.policy_version):
            return False
        if server.entry.is_frozen:
            return policy_version is not None
        state = self.state
        return (
            state is not None
            and state.acknowledged_version is not None
            and not server.entry.is_quarantined
            and server.policy_version is not None
            and server.policy_version in (state.acknowledged_version, state.announced_version)
        )

    def _choose(
        self, preferred: str | None, affinity: Affinity, policy_version: int | None
    ) -> Server | None:
        """Return the least loaded server, or `preferred` with a few turns more."""
        if policy_version is not None and policy_version not in self.versions:
            raise VersionGone(policy_version)
        preferred = preferred or self._task_servers.get(affinity.task_id)
        now = time.monotonic()
        best: Server | None = None
        usual: Server | None = None
        for server in self._servers.values():
            number = server.num_in_flight
            if (
                server.suspended_until <= now
                and (self._max_in_flight is None or number < self._max_in_flight)
                and self._may_serve(server, policy_version)
            ):
                if best is None or number < best.num_in_flight:
                    best = server
                if server.entry.server_id == preferred:
                    usual = server
        if usual is None or best is None:
            return best
        return usual if usual.num_in_flight <= best.num_in_flight + _AFFINITY_SLACK else best


class VersionGone(Refusal):
    """A turn asked for weights that no server has any more."""

    def __init__(self, policy_version: int) -> None:
        super().__init__(
            404,
            "model_not_found",
            f"policy_version={policy_version} is held by no server any more; leave the version out",
            param="model",
        )


def version_away(policy_version: int) -> Refusal:
    """Make the refusal of a version that servers keep and none holds now.

    A client may repeat it, and an episode that ends by it is played again, never scored.
    """
    return Refusal(
        503,
        "version_replaced",
        f"policy_version={policy_version} is held by no server now: the one that keeps it is "
        "loading it, or has moved to a newer one; raise server.num_frozen to keep more",
        retry_after_s=0.5,
    )
