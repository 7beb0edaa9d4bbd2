"""Publishing a policy version: all of it on every server, or that server is quarantined.

A server is entered with a version only after it took every byte, its checksums agreed and it
acknowledged the version. Transports know how bytes travel, the registry which servers exist, and
the trainer announces and acknowledges versions. Every wait has a deadline.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import structlog

from outloop.buffer.errors import DeadlineExceeded, OutloopError, PublishFailed
from outloop.buffer.events import record_event
from outloop.buffer.records import Libraries, ServerEntry
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.engine.machine.gpu_libraries import own_libraries
from outloop.engine.publish.handed_over_memory import HandedOverMemory, hands_over_memory
from outloop.engine.publish.nccl_compatibility import NcclCompatibility
from outloop.engine.publish.sending.sent import RankTraffic, Sent
from outloop.engine.publish.server_client import KeyRefused, ServerClient, flush_paused
from outloop.engine.publish.server_fanout import Fanout, ServerResult
from outloop.engine.publish.server_memory import Registry, ServerMemory
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.publish.transports.base import Transport
from outloop.engine.publish.transports.registry import build_transport
from outloop.engine.publish.verification.accounts import verify
from outloop.engine.publish.verification.logprob_probe import TOLERANCES, UNVERIFIED, Probe

_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_STAGING_KINDS = frozenset({"torch"})
"""Servers that hold an update apart until it ends; SGLang writes into what it serves."""
_PROBE_AGAIN_S = 30.0
"""Until a quarantined server that did not answer is asked again."""
_NOT_COMPARED = (
    'publish.verify="none": no server is asked whether it holds the weights that it was sent, and '
    "tokens of one that does not are trained; the logprob gap alone shows it. Leave publish.verify "
    "out to compare them"
)
_log = structlog.get_logger()


def _ignore(sentence: str) -> None:
    """The default of `on_wait`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What a publish did and cost; of two transports in one publish, the sums."""

    policy_version: int
    duration_s: float
    num_bytes: int
    """Weight bytes moved to each server."""
    num_buckets: int
    peak_extra_bytes: int
    """The most that a trainer rank's staging held at once, beside the model itself."""
    bucket_bytes: int
    """Size of the largest bucket; staging holds two at most."""
    pause_s: float
    """From the first pause until the last server goes on."""
    results: tuple[ServerResult, ...]
    ranks: tuple[RankTraffic, ...] = ()
    """What each trainer rank sent and received, in the last pass; empty where each had all of the
    weights."""
    wrong_in_a_row: int = 0
    """The most publishes in a row that `publish.verify` refused on one server; those through
    `publish.fallback`, which it accepted, do not end a row."""

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

    def __init__(
        self,
        run: Run,
        registry: Registry,
        *,
        libraries: Libraries | None = None,
        on_warning: Callable[[str], None] = _ignore,
    ) -> None:
        """`libraries`: of the trainer; None: what this process has loaded. `on_warning`: gets a
        sentence where nothing is verified, and when `publish.verify` first refuses what a server
        holds."""
        settings = run.settings
        self._settings = settings
        self._run_dir = run.dir
        self._on_warning = on_warning
        self._wrong: Counter[str] = Counter()
        """By server, the publishes in a row that `publish.verify` refused."""
        if settings.verification == "none":
            _log.warning("publishes_unverified", sentence=_NOT_COMPARED)
            on_warning(_NOT_COMPARED)
        self._registry = registry
        self._key = run.server_key
        self._num_expected = settings.server.num_servers or len(settings.server.urls)
        self._start_timeout_s = settings.server.start_timeout_s
        self._has_published = False
        self._silent_since: dict[str, float] = {}
        """Quarantined servers that did not answer, and when they were last asked."""
        self._memory: ServerMemory | None = None
        """None: servers have devices of their own."""
        self._taken_at = time.monotonic()
        """When servers were last asked for their memory."""
        if settings.trainer.is_colocated:
            self._memory = ServerMemory(
                registry,
                pause_mode="abort" if settings.pause_mode == "abort" else "retract",
                phase_timeout_s=settings.publish.phase_timeout_s,
                start_timeout_s=settings.server.start_timeout_s,
                key=run.server_key,
            )
        self._reach: NcclCompatibility | HandedOverMemory | None = None
        """None: the transport reaches every server."""
        if settings.joins_by_nccl:
            self._reach = NcclCompatibility(libraries or own_libraries())
        elif hands_over_memory(settings):
            self._reach = HandedOverMemory(settings.publish.transport)
        self._transport = build_transport(run, settings.publish.transport)
        self._fallback: Transport | None = None
        if settings.publish.fallback != "none" and settings.publish.transport != "disk":
            self._fallback = build_transport(run, settings.publish.fallback)

    def close(self) -> None:
        """Remove shared memory, files and groups."""
        self._transport.close()
        if self._fallback is not None:
            self._fallback.close()

    def wait_for_servers(self, on_wait: Callable[[str], None]) -> None:
        """Before the trainer takes a device: until the servers that share it have started, because
        what a server takes of a GPU depends on what is free when it starts.

        Raises:
            DeadlineExceeded: none answers within server.start_timeout_s.
        """
        if self._memory is not None:
            self._memory.free()
            self._wait_for_servers(on_wait)

    def take_devices(
        self, *, keeps_weights: bool = False, on_wait: Callable[[str], None] = _ignore
    ) -> None:
        """Have servers that share the trainer's devices pause and give their memory to it, with
        `keeps_weights` all but that of their weights; nothing happens without such servers.

        The next publish, or `give_devices`, wakes them.

        Raises:
            DeadlineExceeded: a server that is starting does not come up.
            PublishFailed: a server is there and keeps its memory.
        """
        if self._memory is not None:
            self._taken_at = time.monotonic()
            self._memory.take(keeps_weights=keeps_weights, on_wait=on_wait)

    def give_devices(self, source: TensorSource) -> None:
        """Let servers that kept their weights go on, once the trainer's tensors have left."""
        if self._memory is not None:
            source.leave()
            self._memory.wake()
            self._memory.free()

    def publish(
        self,
        source: TensorSource,
        policy_version: int,
        *,
        on_wait: Callable[[str], None] = _ignore,
    ) -> PublishReport:
        """Make the tensors of `source` every server's weights.

        Servers that share the trainer's devices must have given their memory (`take_devices`); they
        go on when the tensors of `source` have left, all of them at once.

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
        refusals = {} if self._reach is None else self._reach.refusals(entries)
        holders, main, spare = self._divide(entries, policy_version, refusals)
        error: PublishFailed | None = None
        with _Passes(
            entries, self._registry, self._settings, self._key, self._memory, policy_version
        ) as passes:
            try:
                if self._fallback is None:
                    passes.refuse(refusals, has_others=bool(holders or main))
                if main:
                    passes.send(self._transport, main, source)
            except PublishFailed as failure:
                error = failure
            accepted = passes.accepted
            if self._fallback is not None and not (holders or passes.has_any):
                spare = _answering(entries, self._key)
            try:
                if self._fallback is not None and spare:
                    # Both together would hold more than two buckets.
                    self._transport.release()
                    passes.send(self._fallback, spare, source)
            except PublishFailed as failure:
                error = error or failure
            if self._memory is not None:
                source.leave()
                error = passes.wake() or error
        self._note_wrong(passes.wrong, policy_version, accepted=accepted)
        if error is not None and not (holders or passes.has_any):
            raise error
        self._has_published = True
        report = replace(
            passes.report(duration_s=time.monotonic() - began_at),
            wrong_in_a_row=max((self._wrong[entry.server_id] for entry in entries), default=0),
        )
        if self._memory is None:
            return report
        self._memory.wake()
        self._memory.free()
        return replace(report, pause_s=time.monotonic() - self._taken_at)

    def _note_wrong(
        self, wrong: Mapping[str, str], policy_version: int, *, accepted: Collection[str]
    ) -> None:
        """Count servers that were found with wrong weights, and tell of each one's first time.

        Args:
            wrong: by server, what was found.
            accepted: servers that hold the weights of `publish.transport`: their row ends.
        """
        for server_id in accepted:
            self._wrong.pop(server_id, None)
        for server_id, error in wrong.items():
            self._wrong[server_id] += 1
            if self._wrong[server_id] > 1:
                continue
            sentence = (
                f"{server_id} held other weights than were sent, says publish.verify="
                f'"{self._settings.verification}" at version {policy_version}: {error}. Nothing '
                "it samples now is trained, and the next publish feeds it in full. If that goes "
                "on, the alarm wrong_weights follows: look at the server's machine and its log"
            )
            record_event(
                self._run_dir,
                "wrong_weights",
                server=server_id,
                policy_version=policy_version,
                sentence=sentence,
            )
            self._on_warning(sentence)

    def _divide(
        self, entries: Sequence[ServerEntry], policy_version: int, refusals: Mapping[str, str]
    ) -> tuple[list[ServerEntry], list[ServerEntry], list[ServerEntry]]:
        """Servers that hold the version, those for the transport, those for the fallback; without
        one, those that the transport cannot reach are in none."""
        holders = [
            e
            for e in entries
            if e.policy_version == policy_version
            and not e.is_quarantined
            and "weights" not in e.released
        ]
        rest = [e for e in entries if e not in holders]
        if self._fallback is None:
            return holders, [e for e in rest if e.server_id not in refusals], []
        # The group would be built for the latecomers alone, and then again for all.
        if self._transport.is_joint and holders:
            return holders, [], rest
        main = [e for e in rest if not e.is_quarantined and e.server_id not in refusals]
        return holders, main, [e for e in rest if e not in main]

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
    """Sends to servers through one transport after the other, and adds up the results.

    Servers with devices of their own go on at the end of their pass. Those that share the trainer's
    go on in `wake`, when all passes are over and the trainer's tensors have left.
    """

    def __init__(
        self,
        entries: Sequence[ServerEntry],
        registry: Registry,
        settings: Settings,
        key: str | None,
        memory: ServerMemory | None,
        policy_version: int,
    ) -> None:
        self._registry = registry
        self._key = key
        self._settings = settings
        self._memory = memory
        self._policy_version = policy_version
        self._probe: Probe | None = None
        self._kinds = {entry.server_id: entry.kind for entry in entries}
        self._results = {
            entry.server_id: ServerResult(server_id=entry.server_id, is_quarantined=False)
            for entry in entries
        }
        self.wrong: dict[str, str] = {}
        """Servers that `publish.verify` refused in some pass, and what it found."""
        self._sent: list[tuple[Fanout, Sent]] = []
        self._fanouts = ExitStack()
        self._asleep: list[Fanout] = []
        self._pause_s = 0.0

    def __enter__(self) -> _Passes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fanouts.__exit__(kind, error, trace)

    @property
    def has_any(self) -> bool:
        """True once a server has loaded the weights, and has not failed since."""
        return any(fanout.left for fanout, _ in self._sent)

    @property
    def accepted(self) -> tuple[str, ...]:
        """Servers that hold the weights after the passes so far."""
        return tuple(server_id for fanout, _ in self._sent for server_id in fanout.left)

    def refuse(self, refusals: Mapping[str, str], *, has_others: bool) -> None:
        """Enter servers as failed that the transport cannot reach.

        Raises:
            PublishFailed: there are no others.
        """
        for server_id, sentence in refusals.items():
            self._results[server_id] = ServerResult(
                server_id=server_id, is_quarantined=True, failed_phase="join", error=sentence
            )
            self._quarantine(server_id)
        if refusals and not has_others:
            raise PublishFailed(f"no server took the weights. {'; '.join(refusals.values())}")

    def send(
        self, transport: Transport, entries: Sequence[ServerEntry], source: TensorSource
    ) -> None:
        """All phases on `entries`, but for the last ones of servers on shared devices.

        Raises:
            PublishFailed: none of them took the weights.
        """
        settings = self._settings
        is_summed = settings.verification == "checksum"
        kinds = sorted({entry.kind for entry in entries}) if is_summed else []
        fanout = Fanout(
            entries,
            phase_timeout_s=settings.publish.phase_timeout_s,
            on_failure=self._quarantine,
            key=self._key,
        )
        # A fanout that sleeps is closed with all others.
        with ExitStack() as stack:
            stack.enter_context(fanout)
            try:
                if settings.verification == "probe":
                    tolerance = settings.publish.probe_tolerance
                    self._probe = self._probe or Probe(
                        source, tolerance=tolerance or TOLERANCES[settings.server.dtype]
                    )
                transport.prepare(source, fanout, kinds)
                if self._probe is not None:
                    # Servers must go on to be probed: no turn may come to them meanwhile.
                    for server_id in fanout.left:
                        self._quarantine(server_id)
                if self._can_stage(entries):
                    transport.stage(fanout)
                paused_at = time.monotonic()
                sent = self._move(transport, fanout)
                if self._memory is None:
                    self._go_on(fanout)
                else:
                    self._asleep.append(fanout)
                    self._fanouts.push(stack.pop_all())
                self._pause_s += time.monotonic() - paused_at
                self._sent.append((fanout, sent))
            finally:
                transport.end()
                self._note(fanout)

    def wake(self) -> PublishFailed | None:
        """Let servers on shared devices go on; why none of a pass did, if so."""
        failure: PublishFailed | None = None
        asleep, self._asleep = self._asleep, []
        assert self._memory is not None
        for fanout in asleep:
            try:
                self._memory.resume_cache(fanout)
                self._go_on(fanout)
            except PublishFailed as error:
                failure = error
            finally:
                self._note(fanout)
        return failure

    def report(self, *, duration_s: float) -> PublishReport:
        """What all passes did."""
        sent = [sent for _, sent in self._sent]
        return PublishReport(
            policy_version=self._policy_version,
            duration_s=duration_s,
            num_bytes=max((part.num_bytes for part in sent), default=0),
            num_buckets=sum(part.num_buckets for part in sent),
            peak_extra_bytes=max((part.peak_bytes for part in sent), default=0),
            bucket_bytes=max((part.bucket_bytes for part in sent), default=0),
            pause_s=self._pause_s,
            results=tuple(self._results.values()),
            ranks=sent[-1].ranks if sent else (),
        )

    def _can_stage(self, entries: Sequence[ServerEntry]) -> bool:
        """Whether all of them may take weights while they serve; a probe has them filled at random
        first, and on shared devices they do not serve and have no memory yet."""
        if self._probe is not None or self._memory is not None:
            return False
        return all(entry.kind in _STAGING_KINDS for entry in entries)

    def _quarantine(self, server_id: str) -> None:
        self._registry.set_server_version(server_id, None, quarantined=True)

    def _note(self, fanout: Fanout) -> None:
        self._results |= {result.server_id: result for result in fanout.results}
        self.wrong |= {
            result.server_id: result.error
            for result in fanout.results
            if result.failed_phase == "verify"
        }

    def _move(self, transport: Transport, fanout: Fanout) -> Sent:
        """Every phase from the pause until the weights are there."""
        mode = self._settings.pause_mode
        fanout.run("pause", lambda client, deadline: client.pause(mode, deadline))
        if self._memory is None:
            fanout.run("flush", lambda client, deadline: flush_paused(client, mode, deadline))
        else:
            # They were flushed before they gave their memory.
            self._memory.resume_weights(fanout)
        if self._probe is not None:
            fanout.run("scramble", ServerClient.scramble)
        sent = transport.send(fanout)
        if self._probe is None:
            self._compare_checksums(sent, fanout)
        return sent

    def _go_on(self, fanout: Fanout) -> None:
        """Every phase until the servers are entered with the version."""
        version = str(self._policy_version)
        if self._probe is not None:
            self._let_probe(self._probe, fanout, version)
        else:
            fanout.run("version", lambda client, deadline: client.set_version(version, deadline))
            fanout.run("continue", ServerClient.resume)
        for server_id in fanout.left:
            self._registry.set_server_version(server_id, self._policy_version, quarantined=False)

    def _compare_checksums(self, sent: Sent, fanout: Fanout) -> None:
        def compare(client: ServerClient, deadline: float) -> None:
            kind = self._kinds[client.server_id]
            verify(kind, sent.sums[kind], client, deadline)

        if sent.sums:
            fanout.run("verify", compare)

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
