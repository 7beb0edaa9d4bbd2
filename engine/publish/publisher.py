"""Publishing a policy version: all of it on every server, or that server is quarantined.

A server is entered with a version only after it took every byte, its checksums agreed and it
acknowledged the version. Transports know how bytes travel, the registry which servers exist, and
the trainer announces and acknowledges versions. Every wait has a deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import structlog

from outloop.buffer.errors import DeadlineExceeded, OutloopError, PublishFailed
from outloop.buffer.records import ServerEntry
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.engine.publish.buckets.pipeline import Sent
from outloop.engine.publish.server_client import KeyRefused, ServerClient
from outloop.engine.publish.server_fanout import Fanout, ServerResult
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.publish.transports.base import Transport
from outloop.engine.publish.transports.registry import build_transport
from outloop.engine.publish.verification.accounts import accounts_for
from outloop.engine.publish.verification.logprob_probe import TOLERANCES, UNVERIFIED, Probe

_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_PROBE_AGAIN_S = 30.0
"""Until a quarantined server that did not answer is asked again."""
_log = structlog.get_logger()


def _ignore(sentence: str) -> None:
    """The default of `on_wait`."""


class Registry(Protocol):
    """Where servers are entered; `outloop.buffer.registry.Registry` is one."""

    def servers(self) -> tuple[ServerEntry, ...]: ...

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What a publish did and cost; of two transports in one publish, the sums."""

    policy_version: int
    duration_s: float
    num_bytes: int
    """Weight bytes moved to each server."""
    num_buckets: int
    peak_extra_bytes: int
    """The most that staging held at once, beside the model itself."""
    bucket_bytes: int
    """Size of the largest bucket; staging holds two at most."""
    pause_s: float
    """From the first pause until the last server goes on."""
    results: tuple[ServerResult, ...]

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Ids of the servers that do not hold the version."""
        return tuple(r.server_id for r in self.results if r.is_quarantined)

    @property
    def peak_extra_buckets(self) -> float:
        """`peak_extra_bytes` in buckets."""
        return self.peak_extra_bytes / max(1, self.bucket_bytes)


class Publisher:
    """Publishes one version after the other; `close` removes what it used."""

    def __init__(self, run: Run, registry: Registry) -> None:
        settings = run.settings
        self._settings = settings
        self._registry = registry
        self._key = run.server_key
        self._num_expected = settings.server.num_servers or len(settings.server.urls)
        self._start_timeout_s = settings.server.start_timeout_s
        self._has_published = False
        self._silent_since: dict[str, float] = {}
        """Quarantined servers that did not answer, and when they were last asked."""
        self._transport = build_transport(run, settings.publish.transport)
        self._fallback: Transport | None = None
        if settings.publish.fallback != "none" and settings.publish.transport != "disk":
            self._fallback = build_transport(run, settings.publish.fallback)

    def close(self) -> None:
        """Remove shared memory, files and groups."""
        self._transport.close()
        if self._fallback is not None:
            self._fallback.close()

    def publish(
        self,
        source: TensorSource,
        policy_version: int,
        *,
        on_wait: Callable[[str], None] = _ignore,
    ) -> PublishReport:
        """Make the tensors of `source` every server's weights.

        They are sent in `server.dtype` and must be all of the model. Servers that hold the version
        already are left alone. In-flight turns are held and go on afterwards by `publish.mode`. A
        server that fails a phase is entered as quarantined, and the next publish loads all of its
        weights through `publish.fallback`; when all fail, that is done at once.

        Args:
            on_wait: called with a sentence at every poll while no server is there.

        Raises:
            DeadlineExceeded: no server is there.
            PublishFailed: no server took the weights.
        """
        entries = self._wait_for_servers(on_wait)
        began_at = time.monotonic()
        passes = _Passes(entries, self._registry, self._settings, self._key)
        holders, main, spare = self._divide(entries, policy_version)
        error: PublishFailed | None = None
        try:
            if main:
                passes.send(self._transport, main, source, policy_version)
        except PublishFailed as failure:
            error = failure
        if self._fallback is not None and not (holders or passes.has_any):
            spare = _answering(entries, self._key)
        try:
            if self._fallback is not None and spare:
                # Both together would hold more than two buckets.
                self._transport.release()
                passes.send(self._fallback, spare, source, policy_version)
        except PublishFailed as failure:
            error = error or failure
        if error is not None and not (holders or passes.has_any):
            raise error
        self._has_published = True
        return passes.report(policy_version, duration_s=time.monotonic() - began_at)

    def _divide(
        self, entries: Sequence[ServerEntry], policy_version: int
    ) -> tuple[list[ServerEntry], list[ServerEntry], list[ServerEntry]]:
        """Servers that hold the version, those for the transport, those for the fallback."""
        holders = [
            e for e in entries if e.policy_version == policy_version and not e.is_quarantined
        ]
        rest = [e for e in entries if e not in holders]
        if self._fallback is None:
            return holders, rest, []
        # The group would be built for the latecomers alone, and then again for all.
        if self._transport.is_joint and holders:
            return holders, [], rest
        main = [e for e in rest if not e.is_quarantined]
        return holders, main, [e for e in rest if e.is_quarantined]

    def _wait_for_servers(self, on_wait: Callable[[str], None]) -> Sequence[ServerEntry]:
        """Servers to send to: before the first publish all that are expected, later those present.

        A server that does not answer is entered as quarantined, unless none does.

        Raises:
            DeadlineExceeded: none answers within server.start_timeout_s.
        """
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            entries = self._registry.servers()
            answering = self._reachable(entries)
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
            on_wait(f"{enough} servers ({len(entries)} registered, {len(answering)} answering)")
            time.sleep(_POLL_S)
        for entry in entries:
            if entry not in answering and not entry.is_quarantined:
                _log.warning("server_quarantined", server_id=entry.server_id, phase="reach")
                self._registry.set_server_version(entry.server_id, None, quarantined=True)
        return answering

    def _reachable(self, entries: Sequence[ServerEntry]) -> list[ServerEntry]:
        """The servers that answer, in the order of `entries`; all are asked at once.

        A quarantined one that did not answer is asked again only after a while, or when no other
        answers: what is dead does not cost every publish the time of a probe. One that hangs is
        found here, before the others are paused to wait for it.
        """
        now = time.monotonic()
        asked = [
            entry
            for entry in entries
            if not entry.is_quarantined
            or now - self._silent_since.get(entry.server_id, -math.inf) > _PROBE_AGAIN_S
        ]
        answering = _answering(asked, self._key)
        if not answering and len(asked) < len(entries):
            asked = list(entries)
            answering = _answering(asked, self._key)
        for entry in asked:
            self._silent_since.pop(entry.server_id, None)
            if entry not in answering:
                self._silent_since[entry.server_id] = now
        return answering


class _Passes:
    """Sends to servers through one transport after the other, and adds up the results."""

    def __init__(
        self,
        entries: Sequence[ServerEntry],
        registry: Registry,
        settings: Settings,
        key: str | None,
    ) -> None:
        self._registry = registry
        self._key = key
        self._settings = settings
        self._probe: Probe | None = None
        self._kinds = {entry.server_id: entry.kind for entry in entries}
        self._results = {
            entry.server_id: ServerResult(server_id=entry.server_id, is_quarantined=False)
            for entry in entries
        }
        self._sent: list[Sent] = []
        self._pause_s = 0.0

    @property
    def has_any(self) -> bool:
        """True once a server has loaded the weights."""
        return bool(self._sent)

    def send(
        self,
        transport: Transport,
        entries: Sequence[ServerEntry],
        source: TensorSource,
        policy_version: int,
    ) -> None:
        """All phases on `entries`.

        Raises:
            PublishFailed: none of them took the weights.
        """

        def quarantine(server_id: str) -> None:
            self._registry.set_server_version(server_id, None, quarantined=True)

        settings = self._settings
        is_summed = settings.verification == "checksum"
        kinds = [entry.kind for entry in entries] if is_summed else []
        accounts = accounts_for(
            kinds,
            num_ranks=settings.server.tensor_parallel_size,
            specs=source.specs,
            is_gpu=settings.server.device != "cpu",
        )
        fanout = Fanout(
            entries,
            phase_timeout_s=settings.publish.phase_timeout_s,
            on_failure=quarantine,
            key=self._key,
        )
        try:
            with fanout:
                if settings.verification == "probe":
                    tolerance = settings.publish.probe_tolerance
                    self._probe = self._probe or Probe(
                        source, tolerance=tolerance or TOLERANCES[settings.server.dtype]
                    )
                transport.prepare(source, fanout, accounts)
                if self._probe is not None:
                    # Servers must go on to be probed: no turn may come to them meanwhile.
                    for server_id in fanout.left:
                        quarantine(server_id)
                paused_at = time.monotonic()
                sent = self._move(transport, fanout, policy_version)
                self._pause_s += time.monotonic() - paused_at
                for server_id in fanout.left:
                    self._registry.set_server_version(server_id, policy_version, quarantined=False)
            self._sent.append(sent)
        finally:
            transport.end()
            self._results |= {result.server_id: result for result in fanout.results}

    def report(self, policy_version: int, *, duration_s: float) -> PublishReport:
        """What all passes did."""
        return PublishReport(
            policy_version=policy_version,
            duration_s=duration_s,
            num_bytes=max((sent.num_bytes for sent in self._sent), default=0),
            num_buckets=sum(sent.num_buckets for sent in self._sent),
            peak_extra_bytes=max((sent.peak_bytes for sent in self._sent), default=0),
            bucket_bytes=max((sent.bucket_bytes for sent in self._sent), default=0),
            pause_s=self._pause_s,
            results=tuple(self._results.values()),
        )

    def _move(self, transport: Transport, fanout: Fanout, policy_version: int) -> Sent:
        """Every phase between pause and the last server that goes on."""
        mode, version = self._settings.pause_mode, str(policy_version)
        fanout.run("pause", lambda client, deadline: client.pause(mode, deadline))
        if self._probe is not None:
            fanout.run("scramble", ServerClient.scramble)
        sent = transport.send(fanout)
        if self._probe is not None:
            self._let_probe(self._probe, fanout, version)
        else:
            self._compare_checksums(sent, fanout)
            fanout.run("version", lambda client, deadline: client.set_version(version, deadline))
            fanout.run("continue", ServerClient.resume)
        return sent

    def _compare_checksums(self, sent: Sent, fanout: Fanout) -> None:
        def verify(client: ServerClient, deadline: float) -> None:
            sent.accounts[self._kinds[client.server_id]].verify(client, deadline)

        if sent.accounts:
            fanout.run("verify", verify)

    def _let_probe(self, probe: Probe, fanout: Fanout, version: str) -> None:
        """Resume under a placeholder version, so that servers can be probed.

        Tokens that are generated before the verdict carry it, and the router discards them.
        """
        name = UNVERIFIED + version
        fanout.run("version", lambda client, deadline: client.set_version(name, deadline))
        fanout.run("continue", ServerClient.resume)
        fanout.run("verify", lambda client, deadline: probe.verify(client, name, deadline))
        fanout.run("version", lambda client, deadline: client.set_version(version, deadline))


def _answering(entries: Sequence[ServerEntry], key: str | None) -> list[ServerEntry]:
    """Those that answer a probe; all are asked at once."""
    if not entries:
        return []
    with ThreadPoolExecutor(len(entries), thread_name_prefix="probe") as pool:
        answers = list(pool.map(lambda entry: _answers(entry, key), entries))
    return [entry for entry, answers_now in zip(entries, answers, strict=True) if answers_now]


def _answers(entry: ServerEntry, key: str | None) -> bool:
    try:
        client = ServerClient(entry.server_id, entry.url, key=key)
    except OutloopError:
        return False
    try:
        client.model_info(time.monotonic() + _PROBE_TIMEOUT_S)
    except KeyRefused:
        # It is there; the first phase reports the error.
        return True
    except OutloopError:
        return False
    finally:
        client.close()
    return True
