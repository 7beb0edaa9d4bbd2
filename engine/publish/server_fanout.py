"""The same phase on every server at once, each in a thread, with one deadline.

A server that failed a phase takes part in none that follow, and the others go on. When no server is
left, PublishFailed names what each of them failed with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import structlog

from outloop.buffer.errors import OutloopError, PublishFailed
from outloop.buffer.records import ServerEntry
from outloop.engine.publish.server_client import ServerClient

Action = Callable[[ServerClient, float], None]
"""Called with a server's client and the phase's deadline (monotonic seconds)."""
_ISOLATE_TIMEOUT_S = 2.0
_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerResult:
    """How a publish went on one server."""

    server_id: str
    is_quarantined: bool
    failed_phase: str = ""
    error: str = ""


class Fanout:
    """Servers of one publish."""

    def __init__(
        self,
        entries: Sequence[ServerEntry],
        *,
        phase_timeout_s: float,
        on_failure: Callable[[str], None],
        key: str | None = None,
    ) -> None:
        """`key`: of the servers, see `Run.server_key`."""
        self._timeout_s = phase_timeout_s
        self._on_failure = on_failure
        self._clients = {e.server_id: ServerClient(e.server_id, e.url, key=key) for e in entries}
        self._gpus = {e.server_id: e.gpus for e in entries}
        self._failures: dict[str, ServerResult] = {}
        self._pool = ThreadPoolExecutor(max(1, len(entries)), thread_name_prefix="publish")

    def __enter__(self) -> Fanout:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for server_id in self.left:
                self.fail(server_id, "publish", str(error))
        self._isolate()
        self._pool.shutdown()
        for client in self._clients.values():
            client.close()

    @property
    def timeout_s(self) -> float:
        """Deadline of a phase."""
        return self._timeout_s

    @property
    def left(self) -> tuple[str, ...]:
        """Ids of the servers that have not failed."""
        return tuple(server_id for server_id in self._clients if server_id not in self._failures)

    def gpus_of(self, server_id: str) -> tuple[str, ...]:
        """Of a server's ranks."""
        return self._gpus[server_id]

    def url_of(self, server_id: str) -> str:
        """Where a server is."""
        return self._clients[server_id].url

    @property
    def results(self) -> tuple[ServerResult, ...]:
        """The result of every server so far, in the order given."""
        return tuple(
            self._failures.get(server_id, ServerResult(server_id=server_id, is_quarantined=False))
            for server_id in self._clients
        )

    def run(self, phase: str, action: Action) -> None:
        """Do `action` on every server that has not failed.

        Raises:
            PublishFailed: no server is left.
        """
        self.finish(phase, self.start(action))

    def start(self, action: Action) -> dict[str, Future[None]]:
        """Begin `action` on every server that has not failed; `finish` must follow."""
        deadline = time.monotonic() + self._timeout_s
        return {
            server_id: self._pool.submit(action, self._clients[server_id], deadline)
            for server_id in self.left
        }

    def finish(self, phase: str, started: dict[str, Future[None]]) -> None:
        """Wait for what `start` began; actions end by their own deadline.

        Raises:
            PublishFailed: no server is left.
        """
        for server_id, future in started.items():
            error = error_of(future)
            if error is not None:
                self.fail(server_id, phase, str(error))
        self.require_some()

    def require_some(self) -> None:
        """Refuse to go on without a server.

        Raises:
            PublishFailed: no server is left.
        """
        if not self.left:
            reasons = "; ".join(
                f"{r.server_id} in phase={r.failed_phase}: {r.error}" for r in self.results
            )
            raise PublishFailed(f"no server took the weights. {reasons}")

    def fail(self, server_id: str, phase: str, error: str) -> None:
        """Leave a server out from now on; only its first failure counts."""
        if server_id in self._failures:
            return
        _log.warning("server_quarantined", server_id=server_id, phase=phase, error=error)
        self._failures[server_id] = ServerResult(
            server_id=server_id, is_quarantined=True, failed_phase=phase, error=error
        )
        self._on_failure(server_id)

    def _isolate(self) -> None:
        """Have failed servers end their turns, so that the router repeats them elsewhere."""
        deadline = time.monotonic() + _ISOLATE_TIMEOUT_S

        def isolate(client: ServerClient) -> None:
            try:
                client.pause("abort", deadline)
            except OutloopError as error:
                _log.info("isolation_failed", server_id=client.server_id, error=str(error))

        for future in [
            self._pool.submit(isolate, self._clients[server_id]) for server_id in self._failures
        ]:
            future.result()


def error_of(future: Future[Any]) -> OutloopError | None:
    """Wait for an action that ends by its own deadline; how it failed, None if it did not."""
    try:
        future.result()
    except OutloopError as error:
        return error
    return None
