"""Device memory of servers that share their GPUs with the trainer.

The order is the one that SGLang 0.5.23 asserts: pause (what runs is retracted or aborted), flush
until nothing runs, release; later resume weights, update them, resume the cache, continue. SGLang
ends itself when a part is released or resumed twice, and does not say what is released, so that is
entered in the registry before each call. A note that proves wrong, after a trainer's death between
note and call, costs a server's restart.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol
from urllib.parse import urlsplit

import structlog

from outloop.buffer.errors import DeadlineExceeded, PublishFailed
from outloop.buffer.records import ServerEntry
from outloop.engine.publish.server_client import ServerClient, flush_paused
from outloop.engine.publish.server_fanout import Fanout

Tag = Literal["weights", "kv_cache", "cuda_graph"]
WEIGHTS: tuple[Tag, ...] = ("weights",)
CACHE: tuple[Tag, ...] = ("kv_cache", "cuda_graph")
_POLL_S = 0.1
_CONNECT_TIMEOUT_S = 2.0
_log = structlog.get_logger()


class Registry(Protocol):
    """Where it is entered who holds what."""

    def servers(self) -> tuple[ServerEntry, ...]: ...

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None: ...

    def set_released(self, server_id: str, tags: Sequence[str]) -> None: ...

    def claim_devices(self) -> tuple[str, ...]: ...

    def free_devices(self) -> None: ...


class ServerMemory:
    """The memory of a run's servers, taken for the trainer and given back."""

    def __init__(
        self,
        registry: Registry,
        *,
        pause_mode: Literal["retract", "abort"],
        phase_timeout_s: float,
        start_timeout_s: float,
        key: str | None,
    ) -> None:
        """`start_timeout_s`: how long a server that is starting is waited for."""
        self._registry = registry
        self._mode: Literal["retract", "abort"] = pause_mode
        self._phase_timeout_s = phase_timeout_s
        self._start_timeout_s = start_timeout_s
        self._key = key

    def take(self, *, keeps_weights: bool, on_wait: Callable[[str], None]) -> None:
        """Have every server give its memory to the trainer: all of it, or all but its weights.

        Servers that are starting are waited for; those that are gone hold nothing.

        Raises:
            DeadlineExceeded: a server neither started nor gave up.
            PublishFailed: a server is there and holds its memory.
        """
        self._wait_for_starts(on_wait)
        tags = CACHE if keeps_weights else CACHE + WEIGHTS
        entries = [e for e in self._registry.servers() if not set(tags) <= set(e.released)]
        if not entries:
            return

        def leave_out(server_id: str) -> None:
            self._registry.set_server_version(server_id, None, quarantined=True)

        fanout = self._fanout(entries, leave_out)
        try:
            with fanout:
                fanout.run("pause", lambda client, deadline: client.pause(self._mode, deadline))
                fanout.run(
                    "flush", lambda client, deadline: flush_paused(client, self._mode, deadline)
                )
                for entry in entries:
                    self._registry.set_released(entry.server_id, _union(entry.released, tags))
                missing = {e.server_id: _without(tags, e.released) for e in entries}
                fanout.run(
                    "release",
                    lambda client, deadline: client.release_memory(
                        missing[client.server_id], deadline
                    ),
                )
        except PublishFailed as error:
            _log.warning("no_server_gave_its_memory", sentence=str(error))
        failed = {
            r.server_id: f"phase={r.failed_phase}: {r.error}"
            for r in fanout.results
            if r.is_quarantined
        }
        self._require_gone([e for e in entries if e.server_id in failed], failed, on_wait)

    def resume_weights(self, fanout: Fanout) -> None:
        """Take the memory of the weights again, where it was released.

        Raises:
            PublishFailed: no server is left.
        """
        self._resume("resume weights", fanout, WEIGHTS)

    def resume_cache(self, fanout: Fanout) -> None:
        """Take the rest again; nothing of the trainer's may be on the devices any more.

        Raises:
            PublishFailed: no server is left.
        """
        self._resume("resume kv_cache", fanout, CACHE)

    def wake(self) -> None:
        """Have servers that gave their cache alone go on with it and with the weights they hold.

        One that fails is quarantined.
        """
        entries = [
            e
            for e in self._registry.servers()
            if e.released and not e.is_quarantined and "weights" not in e.released
        ]
        if not entries:
            return

        def quarantine(server_id: str) -> None:
            self._registry.set_server_version(server_id, None, quarantined=True)

        try:
            with self._fanout(entries, quarantine) as fanout:
                self.resume_cache(fanout)
                fanout.run("continue", ServerClient.resume)
        except PublishFailed as error:
            _log.warning("no_server_went_on", sentence=str(error))

    def free(self) -> None:
        """The trainer holds nothing on the devices: servers may start."""
        self._registry.free_devices()

    def _wait_for_starts(self, on_wait: Callable[[str], None]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while starting := self._registry.claim_devices():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    who="trainer",
                    phase="take the GPUs that it shares with servers",
                    peer=f"{', '.join(starting)}, which started and is not there yet",
                    after_s=self._start_timeout_s,
                )
            on_wait(f"{', '.join(starting)} to start, before the trainer takes its GPUs")
            time.sleep(_POLL_S)

    def _resume(self, phase: str, fanout: Fanout, tags: Sequence[Tag]) -> None:
        entries = {e.server_id: e for e in self._registry.servers()}
        wanted = {
            server_id: tuple(tag for tag in tags if tag in entries[server_id].released)
            for server_id in fanout.left
            if server_id in entries
        }

        def resume(client: ServerClient, deadline: float) -> None:
            if wanted.get(client.server_id):
                client.resume_memory(wanted[client.server_id], deadline)

        fanout.run(phase, resume)
        for server_id in fanout.left:
            if wanted.get(server_id):
                left = _without(entries[server_id].released, wanted[server_id])
                self._registry.set_released(server_id, left)

    def _fanout(self, entries: Sequence[ServerEntry], on_failure: Callable[[str], None]) -> Fanout:
        return Fanout(
            entries, phase_timeout_s=self._phase_timeout_s, on_failure=on_failure, key=self._key
        )

    def _require_gone(
        self,
        entries: Sequence[ServerEntry],
        failed: dict[str, str],
        on_wait: Callable[[str], None],
    ) -> None:
        """Wait until nothing listens where these servers were: a process that ended holds nothing.

        Raises:
            PublishFailed: one is still there.
        """
        deadline = time.monotonic() + self._phase_timeout_s
        for entry in entries:
            while _listens(entry.url):
                why = failed[entry.server_id]
                if time.monotonic() > deadline:
                    raise PublishFailed(
                        f"{entry.server_id} at {entry.url} does not give its device memory to the "
                        f"trainer and still runs ({why}). They share GPUs "
                        "(trainer.is_colocated), so that the trainer cannot go on: end that "
                        "server's process, and start the run again"
                    )
                on_wait(f"{entry.server_id} to end; it did not give its memory ({why})")
                time.sleep(_POLL_S)


def _listens(url: str) -> bool:
    """Whether a process, stopped ones included, holds the port of `url`."""
    parts = urlsplit(url)
    try:
        with socket.create_connection(
            (parts.hostname or "", parts.port or 80), timeout=_CONNECT_TIMEOUT_S
        ):
            return True
    except TimeoutError:
        return True
    except OSError:
        return False


def _union(before: Sequence[str], tags: Sequence[str]) -> tuple[str, ...]:
    return (*before, *_without(tags, before))


def _without(tags: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    return tuple(tag for tag in tags if tag not in others)
