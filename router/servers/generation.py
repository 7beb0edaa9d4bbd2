"""Generating one turn at a server over `POST /generate`.

Owns: merging of answers, plain or streamed, and retries on other servers. Does not own: the wire,
choosing a server (pool), text. Invariant: ids, logprobs and versions come from the server's id
fields, never from its text; what is returned is what was generated, each token once.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp
import structlog
from msgspec.structs import replace

from outloop.buffer.errors import DeadlineExceeded, ServerUnavailable
from outloop.buffer.records import Sampling, VersionSpan
from outloop.buffer.routed_experts import RoutedExperts
from outloop.router.errors import Refusal
from outloop.router.servers.generate_api import (
    NO_OPTIONS,
    GenerateOptions,
    Meta,
    Piece,
    Prompt,
    Span,
    read_piece,
    request_body,
)
from outloop.router.servers.pool import NO_AFFINITY, Affinity, Server, ServerPool, VersionGone

OnTokens = Callable[[list[int]], None]
Top = list[tuple[int, float]]
_CONNECT_TIMEOUT_S = 5.0
_DRAIN_S = 1.0
"""How long the rest of an answer of which nothing more is wanted may take."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
_HEADERS = MappingProxyType({"content-type": "application/json", "accept-encoding": "identity"})
_MAX_DIRECT_BYTES = 512 * 1024
_MAX_QUOTED_BYTES = 500
_OK = 200
_MAX_EMPTY_ABORTS = 2
"""Aborts before the first token that are no fault of the server's: it had the turn queued."""
_FINAL = frozenset({400, 413, 422})
"""Statuses of a server that has read the request and will not have it; any other is its failure."""
_SERVER_FAILURES = (aiohttp.ClientError, TimeoutError, ConnectionError, ServerUnavailable)
_log = structlog.get_logger()


class TurnLost(ServerUnavailable):
    """A streamed turn broke off and cannot be continued."""


@dataclass(slots=True)
class Generated:
    """What was generated so far; complete once `finish` is set."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str | None = None
    """stop or length."""
    tops: list[Top] = field(default_factory=list)
    """The most probable ids in each id's place, where they were asked for."""
    supports: list[list[int]] = field(default_factory=list)
    """Among which ids each was sampled, where that was asked for and the server tells; `logprobs`
    are then over these."""
    matched: int | str | None = None
    """The stop id or stop string that ended it."""
    num_handed_on: int = 0
    """Ids that a streaming client has seen."""
    routes: RoutedExperts | None = None
    """Experts of the tokens from the first that were asked for to the last but one, where they were
    asked for and are known."""


class Generator:
    """Generates turns, any number at once."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        pool: ServerPool,
        tasks: asyncio.TaskGroup,
        *,
        timeout_s: float,
        may_mix_versions: bool,
        keeps_keys: bool = False,
        server_key: str | None = None,
    ) -> None:
        """
        Args:
            keeps_keys: turns in flight keep keys and values across a publish (publish.mode =
                "in_place").
            tasks: servers are asked in it to stop what is given up here.
            server_key: of the servers, see `Run.server_key`.
        """
        self._headers = dict(_HEADERS)
        if server_key:
            self._headers["authorization"] = f"Bearer {server_key}"
        self._http = http
        self._pool = pool
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._may_mix_versions = may_mix_versions
        self._keeps_keys = keeps_keys

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
        *,
        rid: str,
        preferred: str | None = None,
        affinity: Affinity = NO_AFFINITY,
        policy_version: int | None = None,
        on_tokens: OnTokens | None = None,
        options: GenerateOptions = NO_OPTIONS,
    ) -> tuple[Generated, str]:
        """Generate until a stop or the limit; returns what came and the id of the last server.

        A dead server is replaced; what it gave is kept if versions may mix. `on_tokens` streams.

        Raises:
            DeadlineExceeded: no server finished the turn within the turn timeout.
            TurnLost: a streamed turn was lost halfway and cannot be continued.
            Refusal: 400, the server refuses the request; 404, no server holds `policy_version`.
        """
        deadline = self._pool.clock_s + self._timeout_s
        generated, attempt, num_empty_aborts = Generated(), 0, 0
        while not _is_over(generated, sampling, stop_ids):
            server = await self._pool.acquire(
                preferred,
                affinity,
                timeout_s=self._remaining(deadline),
                policy_version=policy_version,
            )
            preferred, num_before = server.entry.server_id, len(generated.ids)
            version: int | None = None
            attempt += 1
            name = f"{rid}-{attempt}"
            try:
                self._keep_or_restart(generated, server, options, is_streamed=on_tokens is not None)
                num_before, asked = len(generated.ids), server.policy_version
                now = _after(generated, options)
                body = request_body(
                    prompt.followed_by(generated.ids),
                    sampling,
                    stop_ids,
                    rid=name,
                    max_new_tokens=sampling.max_new_tokens - len(generated.ids),
                    policy_version=asked,
                    stream=on_tokens is not None,
                    options=now,
                )
                try:
                    await self._call(server, body, generated, on_tokens, now, name, deadline)
                finally:
                    self._note_prefill(generated, server, num_before, asked)
                version = (
                    generated.spans[-1].policy_version if len(generated.ids) > num_before else None
                )
                _check_version(generated, policy_version)
                num_empty_aborts += generated.finish is None and len(generated.ids) <= num_before
                if num_empty_aborts > _MAX_EMPTY_ABORTS:
                    raise ServerUnavailable(f"{server.entry.url} aborts the turn at once")
            except _SERVER_FAILURES as error:
                if isinstance(error, TurnLost):
                    raise
                self._pool.suspend(server, f"{type(error).__name__}: {error}")
            finally:
                self._pool.release(server, policy_version=version)
            if generated.finish is None:
                # Whoever ended it early (a publish, a quarantine) has entered so in the registry.
                await self._pool.refresh_if_possible()
        return generated, preferred or ""

    def _note_prefill(
        self, generated: Generated, server: Server, num_before: int, asked: int | None
    ) -> None:
        """Stamp what a server generated with the version that it may have prefilled by.

        SGLang names the version that sampled a token. A turn that waits at the publish, prefilled
        but without a token, attends to keys and values of the version before.
        """
        if not self._keeps_keys or server.entry.kind != "sglang" or asked is None:
            return
        for place, span in enumerate(generated.spans):
            if span.start == num_before and span.end > num_before:
                if span.policy_version > asked:
                    prefill = VersionSpan(policy_version=asked, start=num_before, end=num_before)
                    generated.spans.insert(place, prefill)
                return

    def _remaining(self, deadline: float) -> float:
        remaining = deadline - self._pool.clock_s
        if remaining <= 0:
            raise DeadlineExceeded(
                who="router",
                phase="generate a turn",
                peer=self._pool.describe(),
                after_s=self._timeout_s,
            )
        return remaining

    async def _abort(self, server: Server, rid: str) -> None:
        """Ask the server to stop generating `rid`; one that does not answer is left alone."""
        try:
            async with self._http.post(
                f"{server.entry.url}/abort_request",
                json={"rid": rid},
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S),
            ):
                pass
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.info("abort_failed", server_id=server.entry.server_id, error=str(error))

    def _keep_or_restart(
        self, generated: Generated, server: Server, options: GenerateOptions, *, is_streamed: bool
    ) -> None:
        """Decide what becomes of ids that an earlier server generated.

        Raises:
            TurnLost: a client has seen ids that cannot be kept.
        """
        same = not generated.spans or generated.spans[-1].policy_version == server.policy_version
        # Another server's grammar would begin again in the middle of the answer.
        may_keep = options.json_schema is None
        if not (may_keep and (same or self._may_mix_versions)):
            generated.ids, generated.logprobs, generated.spans, generated.tops = [], [], [], []
            generated.supports, generated.routes = [], None
        if is_streamed and generated.num_handed_on > len(generated.ids):
            raise TurnLost(
                f"a streamed turn was lost after {generated.num_handed_on} tokens: its server "
                "failed and the rest may not be generated elsewhere; send the request again"
            )

    async def _call(
        self,
        server: Server,
        body: bytes,
        generated: Generated,
        on_tokens: OnTokens | None,
        options: GenerateOptions,
        rid: str,
        deadline: float,
    ) -> None:
        """One request to one server; one that is given up here is aborted there.

        Adds what the server generates to `generated`; sets its finish unless it was aborted.
        """
        limit = asyncio.timeout(self._remaining(deadline))
        server.deadlines.add(limit)
        try:
            async with (
                limit,
                self._http.post(
                    f"{server.entry.url}/generate",
                    # aiohttp wants large bodies as files.
                    data=body if len(body) <= _MAX_DIRECT_BYTES else io.BytesIO(body),
                    headers={**self._headers, **dict(options.trace)},
                    timeout=_TIMEOUT,
                    allow_redirects=False,
                ) as answer,
            ):
                if answer.status != _OK:
                    raise await _failure(answer, server)
                if on_tokens is None:
                    merge, piece = _Merge(generated, options), read_piece(await answer.read())
                    merge.add(piece)
                    merge.finish(piece, server)
                else:
                    await _read_events(answer, _Events(generated, server, on_tokens, options))
        except aiohttp.ClientError:
            raise
        except (asyncio.CancelledError, TimeoutError):
            self._tasks.create_task(self._abort(server, rid))
            raise
        finally:
            server.deadlines.discard(limit)


async def _failure(answer: aiohttp.ClientResponse, server: Server) -> Refusal | ServerUnavailable:
    """What an answer without a result means for the turn."""
    start = _start_of(await answer.content.read(_MAX_QUOTED_BYTES))
    if answer.status in _FINAL:
        return Refusal(
            400,
            "server_refused",
            f"the server refused the turn with status={answer.status}: {start}",
        )
    return ServerUnavailable(
        f"{server.entry.url}/generate answered status={answer.status}: {start}"
    )


async def _read_events(answer: aiohttp.ClientResponse, events: _Events) -> None:
    """Read a streamed answer to its end; what came before the server failed counts."""
    try:
        async for data in answer.content.iter_any():
            if events.add(data):
                break
    except BaseException:
        with suppress(ServerUnavailable):
            events.end()
        raise
    events.end()
    # Read to its end, the connection can be used again.
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await answer.read()


class _Merge:
    """Adds the answer of one call to what earlier calls generated."""

    def __init__(self, generated: Generated, options: GenerateOptions) -> None:
        """`options`: those of the call."""
        self._generated = generated
        self._wanted = options.routes
        self._wants_support = options.wants_support
        self._routes: str | None = None
        self._base = len(generated.ids)
        self._last_version: str | None = None
        self._spans: list[Span] | None = None
        self._is_finished = False

    def add(self, piece: Piece) -> list[int]:
        """The ids that are new in this piece, cumulative or incremental alike."""
        generated, meta = self._generated, piece.meta_info
        have = len(generated.ids) - self._base
        total = meta.completion_tokens
        ids = piece.output_ids
        is_incremental = total is not None and total == have + len(ids) and len(ids) != total
        new = ids if is_incremental else ids[have:]
        generated.ids += new
        logprobs = meta.output_token_logprobs
        if logprobs is not None:
            have_logprobs = len(generated.logprobs) - self._base
            fresh = logprobs if is_incremental else logprobs[have_logprobs:]
            generated.logprobs += [entry[0] for entry in fresh]
        if self._wants_support and meta.output_token_sampling_mask is not None:
            self._add_supports(meta, is_incremental=is_incremental)
        if meta.output_top_logprobs is not None:
            tops = meta.output_top_logprobs
            have_tops = len(generated.tops) - self._base
            generated.tops += map(_top, tops if is_incremental else tops[have_tops:])
        self._routes = meta.routed_experts or self._routes
        self._last_version = meta.weight_version or self._last_version
        self._spans = meta.weight_versions or self._spans
        return new

    def _add_supports(self, meta: Meta, *, is_incremental: bool) -> None:
        """What each token was sampled among, and in place of its logprob that over these ids."""
        generated, masks = self._generated, meta.output_token_sampling_mask or []
        fresh = masks if is_incremental else masks[len(generated.supports) - self._base :]
        logprobs = meta.output_token_sampling_logprobs or []
        values = logprobs if is_incremental else logprobs[len(logprobs) - len(fresh) :]
        end = len(generated.supports) + len(fresh)
        if len(values) == len(fresh) and end == len(generated.logprobs):
            generated.logprobs[len(generated.supports) :] = values
            generated.supports += fresh

    def finish(self, piece: Piece, server: Server) -> None:
        """Set finish and versions after the last piece; the second call does nothing.

        Raises:
            ServerUnavailable: the answer is not complete, or not at a known version.
        """
        generated, reason = self._generated, piece.meta_info.finish_reason
        if self._is_finished:
            return
        self._is_finished = True
        num_new = len(generated.ids) - self._base
        if len(generated.logprobs) != len(generated.ids):
            num_logprobs = len(generated.logprobs) - self._base
            self._forget()
            raise ServerUnavailable(
                f"{server.entry.url} gave {num_logprobs} logprobs for {num_new} output ids"
            )
        routes = self._read_routes(num_new)
        if num_new:
            try:
                generated.spans += self._version_spans(num_new)
            except ValueError as error:
                self._forget()
                raise ServerUnavailable(
                    f"{server.entry.url} answered with a weight_version that is no "
                    f"policy_version: {error}"
                ) from error
        if routes is not None:
            before = generated.routes
            generated.routes = routes if before is None else before.followed_by(routes)
        if reason is not None and reason.type in ("stop", "length") and generated.ids:
            generated.finish, generated.matched = reason.type, reason.matched

    def _version_spans(self, num_new: int) -> list[VersionSpan]:
        spans = self._spans or [Span(self._last_version or "none", 0, num_new)]
        found: list[VersionSpan] = []
        for index, span in enumerate(spans):
            start = found[-1].end if found else self._base
            last = index == len(spans) - 1
            end = self._base + (num_new if last else min(span.end, num_new))
            if end > start:
                found.append(VersionSpan(policy_version=int(span.version), start=start, end=end))
        return found

    def _read_routes(self, num_new: int) -> RoutedExperts | None:
        if self._wanted is None or self._routes is None:
            return None
        try:
            return self._wanted.read(self._routes, num_new=num_new)
        except ServerUnavailable:
            self._forget()
            raise

    def _forget(self) -> None:
        del self._generated.ids[self._base :]
        del self._generated.logprobs[self._base :]
        del self._generated.tops[self._base :]
        del self._generated.supports[self._base :]


def _top(entries: list[tuple[float | None, int, Any]] | None) -> Top:
    return [(token, p) for p, token, _ in entries or () if p is not None]


class _Events:
    """A streamed answer as it comes."""

    def __init__(
        self, generated: Generated, server: Server, on_tokens: OnTokens, options: GenerateOptions
    ) -> None:
        self._generated = generated
        self._server = server
        self._on_tokens = on_tokens
        self._merge = _Merge(generated, options)
        self._held: list[bytes] = []

    def add(self, data: bytes) -> bool:
        """Take what came; True once the answer is complete.

        Raises:
            ServerUnavailable: the server broke off its stream.
        """
        *lines, rest = data.split(b"\n")
        if not lines:
            self._held.append(rest)
            return False
        lines[0] = b"".join((*self._held, lines[0]))
        self._held = [rest]
        return any(line.startswith(b"data:") and self._take(line[5:].strip()) for line in lines)

    def end(self) -> None:
        """No more will come, or is wanted."""
        self._merge.finish(Piece(), self._server)

    def _take(self, data: bytes) -> bool:
        if data == b"[DONE]":
            return True
        piece = read_piece(data)
        if piece.error is not None:
            reason = piece.error if isinstance(piece.error, str) else piece.error.message
            raise ServerUnavailable(f"{self._server.entry.url} broke off its stream: {reason}")
        new = self._merge.add(piece)
        is_last = piece.meta_info.finish_reason is not None
        if is_last:
            self._merge.finish(piece, self._server)
        if new:
            self._generated.num_handed_on += len(new)
            self._on_tokens(new)
        return is_last


def _start_of(answer: bytes) -> str:
    return answer.decode(errors="replace")


def _check_version(generated: Generated, policy_version: int | None) -> None:
    """Refuse what other weights generated because they were published during the turn."""
    if policy_version is not None and any(
        span.policy_version != policy_version for span in generated.spans
    ):
        raise VersionGone(policy_version)


def _after(generated: Generated, options: GenerateOptions) -> GenerateOptions:
    """The options of the call that goes on after `generated`."""
    if options.routes is None or not generated.ids:
        return options
    return replace(options, routes=options.routes.after(generated.routes, len(generated.ids)))


def _is_over(generated: Generated, sampling: Sampling, stop_ids: tuple[int, ...]) -> bool:
    """True if nothing is left to generate, also when the server died before it could say so."""
    if generated.finish is None and generated.ids:
        if generated.ids[-1] in stop_ids:
            generated.finish, generated.matched = "stop", generated.ids[-1]
        elif len(generated.ids) >= sampling.max_new_tokens:
            generated.finish = "length"
    return generated.finish is not None
