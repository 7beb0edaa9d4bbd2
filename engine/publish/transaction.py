"""Publishing a policy version: all of it on every server, or that server is quarantined.

Owns: the phases and their order, verification, what is reported. Does not own: how bytes travel
(transports), which servers exist and what they are said to hold (the registry), when a version is
announced or acknowledged (trainer). Invariant: a server is said to hold a version only after it
took every byte, its checksums agreed and it acknowledged the version; every wait has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from outloop.buffer.errors import DeadlineExceeded, OutloopError, PublishFailed
from outloop.buffer.records import ServerEntry
from outloop.buffer.run import Run
from outloop.engine.publish.client import ServerClient
from outloop.engine.publish.fanout import Fanout, ServerResult
from outloop.engine.publish.transports import Disk, Fed, NamedTensors, SharedMemory, Transport

_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_log = structlog.get_logger()


class Registry(Protocol):
    """Where servers are entered; `outloop.buffer.reader.BufferReader` is one."""

    def servers(self) -> tuple[ServerEntry, ...]: ...

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What a publish did and cost."""

    policy_version: int
    duration_s: float
    num_bytes: int
    """Weight bytes moved to each server."""
    num_buckets: int
    pause_s: float
    """From the first pause until the last server goes on."""
    results: tuple[ServerResult, ...]

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Ids of the servers that do not hold the version."""
        return tuple(r.server_id for r in self.results if r.is_quarantined)


class Publisher:
    """Publishes one version after the other; `close` removes what it used."""

    def __init__(self, run: Run, registry: Registry) -> None:
        settings = run.settings
        self._settings = settings.publish
        self._registry = registry
        self._num_expected = settings.server.num_servers or len(settings.server.urls)
        self._start_timeout_s = settings.server.start_timeout_s
        self._has_published = False
        dtype = torch.float32 if settings.server.dtype == "float32" else torch.bfloat16
        self._transport: Transport
        if self._settings.transport == "disk":
            self._transport = Disk(run.dir / "publish", dtype=dtype)
        else:
            self._transport = SharedMemory(
                bucket_bytes=int(self._settings.bucket_mb * 2**20), dtype=dtype
            )

    def close(self) -> None:
        """Remove shared memory or files."""
        self._transport.close()

    def publish(self, named_tensors: NamedTensors, policy_version: int) -> PublishReport:
        """Make `named_tensors` (Hugging Face names, any float dtype) every server's weights.

        They are sent in `server.dtype` and must be all of the model. In-flight turns are held and
        go on afterwards by `publish.mode`. A server that fails a phase is entered as quarantined
        and fed in full by the next publish.

        Raises:
            DeadlineExceeded: no server is there.
            PublishFailed: no server took the weights.
        """
        entries = self._wait_for_servers()
        began_at = time.monotonic()

        def quarantine(server_id: str) -> None:
            self._registry.set_server_version(server_id, None, quarantined=True)

        self._transport.prepare(named_tensors, policy_version)
        with Fanout(
            entries, phase_timeout_s=self._settings.phase_timeout_s, on_failure=quarantine
        ) as fanout:
            paused_at = time.monotonic()
            fed = self._move(fanout, policy_version)
            resumed_at = time.monotonic()
            for result in fanout.results:
                if not result.is_quarantined:
                    self._registry.set_server_version(
                        result.server_id, policy_version, quarantined=False
                    )
            results = fanout.results
        self._has_published = True
        return PublishReport(
            policy_version=policy_version,
            duration_s=time.monotonic() - began_at,
            num_bytes=fed.num_bytes,
            num_buckets=fed.num_buckets,
            pause_s=resumed_at - paused_at,
            results=results,
        )

    def _move(self, fanout: Fanout, policy_version: int) -> Fed:
        """Every phase between pause and continue."""
        mode, version = self._settings.mode, str(policy_version)
        fanout.run("pause", lambda client, deadline: client.pause(mode, deadline))
        fed = self._transport.feed(fanout)
        if self._settings.verify:

            def verify(client: ServerClient, deadline: float) -> None:
                compare_checksums(client.server_id, fed.checksums, client.checksums(deadline))

            fanout.run("verify", verify)
        fanout.run("version", lambda client, deadline: client.set_version(version, deadline))
        fanout.run("continue", ServerClient.resume)
        return fed

    def _wait_for_servers(self) -> Sequence[ServerEntry]:
        """Servers to feed: before the first publish all that are expected, later those there are.

        A server that does not answer is entered as quarantined, unless none does.

        Raises:
            DeadlineExceeded: none answers within server.start_timeout_s.
        """
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            entries = self._registry.servers()
            answering = [entry for entry in entries if _answers(entry)]
            enough = 1 if self._has_published else self._num_expected
            is_late = time.monotonic() >= deadline
            if answering and (len(answering) >= enough or is_late):
                break
            if is_late:
                raise DeadlineExceeded(
                    who="publisher",
                    phase="wait for servers",
                    peer=f"num_servers={enough} ({len(entries)} registered, none answering)",
                    after_s=self._start_timeout_s,
                )
            time.sleep(_POLL_S)
        for entry in entries:
            if entry not in answering:
                _log.warning("server_quarantined", server_id=entry.server_id, phase="reach")
                self._registry.set_server_version(entry.server_id, None, quarantined=True)
        return answering


def compare_checksums(server_id: str, sent: dict[str, str], held: dict[str, str]) -> None:
    """Refuse a server whose weights are not what was sent.

    Both map Hugging Face names to hex SHA-256 of the tensor's bytes. A server that names its
    parameters otherwise (SGLang fuses some) needs its names translated before.

    Raises:
        PublishFailed: a tensor differs, is missing, or was never sent.
    """
    wrong = sorted(name for name, value in sent.items() if held.get(name, value) != value)
    missing = sorted(sent.keys() - held.keys())
    unsent = sorted(held.keys() - sent.keys())
    for names, what in (
        (wrong, "differ from what was sent"),
        (missing, "were sent but are not there"),
        (unsent, "were never sent"),
    ):
        if names:
            raise PublishFailed(
                f"{server_id}: {len(names)} tensors {what}, the first is {names[0]!r}; "
                "the server is fed again by the next publish"
            )


def _answers(entry: ServerEntry) -> bool:
    try:
        client = ServerClient(entry.server_id, entry.url)
    except OutloopError:
        return False
    try:
        client.model_info(time.monotonic() + _PROBE_TIMEOUT_S)
    except OutloopError:
        return False
    finally:
        client.close()
    return True
