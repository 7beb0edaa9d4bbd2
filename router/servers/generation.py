"""Drawing one turn from a server over `POST /generate`.

Owns: merging of answers, plain or streamed, and retries on other servers. Does not own: the wire,
choosing a server (pool), text. Invariant: ids, logprobs and versions come from the server's id
fields, never from its text; what is returned is what was drawn, each token once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import structlog

from outloop.buffer.errors import DeadlineExceeded, ServerUnavailable
from outloop.buffer.records import Sampling, VersionSpan
from outloop.router.errors import Refusal
from outloop.router.servers.generate_api import (
    NO_WISH,
    Piece,
    Prompt,
    Span,
    Wish,
    read_piece,
    request_body,
)
from outloop.router.servers.http_client import Links
from outloop.router.servers.pool import NOBODY, Server, ServerPool, Whose, version_gone

OnTokens = Callable[[list[int]], None]
Top = list[tuple[int, float]]
_CONNECT_TIMEOUT_S = 5.0
_MAX_EMPTY_ABORTS = 2
"""Aborts before the first token that are no fault of the server's: it had the turn queued."""
_FINAL = frozenset({400, 413, 422})
"""Statuses of a server that has read the request and will not have it; any other is its failure."""
_SERVER_FAILURES = (aiohttp.ClientError, TimeoutError, ConnectionError, ServerUnavailable)
_log = structlog.get_logger()


class TurnLost(ServerUnavailable):
    """A streamed turn broke off and cannot be continued."""


@dataclass(slots=True)
class Drawn:
    """What was drawn so far; complete once `finish` is set."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str | None = None
    """stop or length."""
    tops: list[Top] = field(default_factory=list)
    """The most probable ids in each id's place, where they were asked for."""
    matched: int | str | None = None
    """The stop id or stop string that ended it."""
    num_handed_on: int = 0
    """Ids that a streaming client has seen."""


class Generator:
    """Draws turns, any number at once; `session` is for asking servers to stop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        pool: ServerPool,
        *,
        timeout_s: float,
        may_mix_versions: bool,
        server_key: str | None = None,
    ) -> None:
        """`server_key`: of the servers, see `Run.server_key`."""
        self._headers = {"Authorization": f"Bearer {server_key}"} if server_key else {}
        self._session = session
        self._links = Links()
        self._pool = pool
        pool.on_left = lambda url: self._links.cut(f"{url}/generate")
        self._timeout_s = timeout_s
        self._may_mix_versions = may_mix_versions
        self._aborts: set[asyncio.Task[None]] = set()

    async def draw(
        self,
        prompt: Prompt,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
        *,
        rid: str,
        preferred: str | None = None,
        whose: Whose = NOBODY,
        policy_version: int | None = None,
        on_tokens: OnTokens | None = None,
        wish: Wish = NO_WISH,
    ) -> tuple[Drawn, str]:
        """Draw until a stop or the limit; returns what was drawn and the id of the last server.

        A dead server is replaced; what it drew is kept if versions may mix. `on_tokens` streams.

        Raises:
            DeadlineExceeded: no server finished the turn within the turn timeout.
            TurnLost: a streamed turn was lost halfway and cannot be continued.
            Refusal: 400, the server refuses the request; 404, no server holds `policy_version`.
        """
        deadline = time.monotonic() + self._timeout_s
        drawn, attempt, num_empty_aborts = Drawn(), 0, 0
        while not _is_over(drawn, sampling, stop_ids):
            server = await self._pool.acquire(
                preferred, whose, timeout_s=self._remaining(deadline), policy_version=policy_version
            )
            preferred, num_before = server.entry.server_id, len(drawn.ids)
            version: int | None = None
            attempt += 1
            name = f"{rid}-{attempt}"
            try:
                self._keep_or_restart(drawn, server, wish, is_streamed=on_tokens is not None)
                body = request_body(
                    prompt.followed_by(drawn.ids),
                    sampling,
                    stop_ids,
                    rid=name,
                    max_new_tokens=sampling.max_new_tokens - len(drawn.ids),
                    policy_version=server.policy_version,
                    stream=on_tokens is not None,
                    wish=wish,
                )
                await self._call(server, body, drawn, on_tokens, wish, name, deadline)
                version = drawn.spans[-1].policy_version if len(drawn.ids) > num_before else None
                _check_version(drawn, policy_version)
                num_empty_aborts += drawn.finish is None and len(drawn.ids) <= num_before
                if num_empty_aborts > _MAX_EMPTY_ABORTS:
                    raise ServerUnavailable(f"{server.entry.url} aborts the turn at once")
            except _SERVER_FAILURES as error:
                if isinstance(error, TurnLost):
                    raise
                self._pool.suspend(server, f"{type(error).__name__}: {error}")
            finally:
                self._pool.release(server, policy_version=version)
            if drawn.finish is None:
                # Whoever ended it early (a publish, a quarantine) has entered so in the registry.
                await self._pool.refresh_if_possible()
        return drawn, preferred or ""

    async def close(self) -> None:
        """Wait for the abort requests that are on their way; close connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_CONNECT_TIMEOUT_S)
        self._links.close()

    def _remaining(self, deadline: float) -> float:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(
                who="router",
                phase="draw a turn",
                peer=self._pool.describe(),
                after_s=self._timeout_s,
            )
        return remaining

    def _abort_soon(self, server: Server, rid: str) -> None:
        abort = asyncio.create_task(self._abort(server, rid))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)

    async def _abort(self, server: Server, rid: str) -> None:
        """Ask the server to stop drawing `rid`; one that does not answer is left alone."""
        try:
            async with self._session.post(
                f"{server.entry.url}/abort_request",
                json={"rid": rid},
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S),
            ):
                pass
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.info("abort_failed", server_id=server.entry.server_id, error=str(error))

    def _keep_or_restart(
        self, drawn: Drawn, server: Server, wish: Wish, *, is_streamed: bool
    ) -> None:
        """Decide what becomes of ids that an earlier server drew.

        Raises:
            TurnLost: a client has seen ids that cannot be kept.
        """
        same = not drawn.spans or drawn.spans[-1].policy_version == server.policy_version
        # Another server's grammar would begin anew in the middle of the answer.
        may_keep = wish.json_schema is None
        if not (may_keep and (same or self._may_mix_versions)):
            drawn.ids, drawn.logprobs, drawn.spans, drawn.tops = [], [], [], []
        if is_streamed and drawn.num_handed_on > len(drawn.ids):
            raise TurnLost(
                f"a streamed turn was lost after {drawn.num_handed_on} tokens: its server failed "
                "and the rest may not be drawn elsewhere; send the request again"
            )

    async def _call(
        self,
        server: Server,
        body: tuple[bytes, ...],
        drawn: Drawn,
        on_tokens: OnTokens | None,
        wish: Wish,
        rid: str,
        deadline: float,
    ) -> None:
        """One request to one server; one that is given up here is aborted there."""
        left_s = self._remaining(deadline)
        try:
            await self._request(server, body, drawn, on_tokens, wish.trace, left_s)
        except (asyncio.CancelledError, TimeoutError):
            self._abort_soon(server, rid)
            raise

    async def _request(
        self,
        server: Server,
        body: tuple[bytes, ...],
        drawn: Drawn,
        on_tokens: OnTokens | None,
        trace: tuple[tuple[str, str], ...],
        timeout_s: float,
    ) -> None:
        """Adds what the server draws to `drawn`; sets its finish unless the turn was aborted."""
        events = _Events(drawn, server, on_tokens) if on_tokens is not None else None
        try:
            status, answer = await self._links.post(
                f"{server.entry.url}/generate",
                body,
                timeout_s=timeout_s,
                headers=(*trace, *self._headers.items()),
                on_data=events.add if events is not None else None,
            )
        finally:
            if events is not None and drawn.finish is None:
                # What came before the server failed was drawn and counts.
                events.end()
        if status in _FINAL:
            raise Refusal(
                400,
                "server_refused",
                f"the server refused the turn with status={status}: {_start_of(answer)}",
            )
        if status >= 400:
            raise ServerUnavailable(
                f"{server.entry.url}/generate answered status={status}: {_start_of(answer)}"
            )
        if events is None:
            merge = _Merge(drawn)
            piece = read_piece(answer)
            merge.add(piece)
            merge.finish(piece, server)


class _Merge:
    """Adds the answer of one call to what earlier calls drew."""

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn
        self._base = len(drawn.ids)
        self._last_version: str | None = None
        self._spans: list[Span] | None = None
        self._is_finished = False

    def add(self, piece: Piece) -> list[int]:
        """The ids that are new in this piece, cumulative or incremental alike."""
        drawn, meta = self._drawn, piece.meta_info
        have = len(drawn.ids) - self._base
        total = meta.completion_tokens
        ids = piece.output_ids
        is_incremental = total is not None and total == have + len(ids) and len(ids) != total
        new = ids if is_incremental else ids[have:]
        drawn.ids += new
        logprobs = meta.output_token_logprobs
        if logprobs is not None:
            have_logprobs = len(drawn.logprobs) - self._base
            fresh = logprobs if is_incremental else logprobs[have_logprobs:]
            drawn.logprobs += [entry[0] for entry in fresh]
        if meta.output_top_logprobs is not None:
            tops = meta.output_top_logprobs
            have_tops = len(drawn.tops) - self._base
            drawn.tops += map(_top, tops if is_incremental else tops[have_tops:])
        self._last_version = meta.weight_version or self._last_version
        self._spans = meta.weight_versions or self._spans
        return new

    def finish(self, piece: Piece, server: Server) -> None:
        """Set finish and versions after the last piece; the second call does nothing.

        Raises:
            ServerUnavailable: the answer is not complete, or not at a known version.
        """
        drawn, reason = self._drawn, piece.meta_info.finish_reason
        if self._is_finished:
            return
        self._is_finished = True
        num_new = len(drawn.ids) - self._base
        if len(drawn.logprobs) != len(drawn.ids):
            num_logprobs = len(drawn.logprobs) - self._base
            self._forget()
            raise ServerUnavailable(
                f"{server.entry.url} gave {num_logprobs} logprobs for {num_new} output ids"
            )
        if num_new:
            try:
                drawn.spans += self._version_spans(num_new)
            except ValueError as error:
                self._forget()
                raise ServerUnavailable(
                    f"{server.entry.url} answered with a weight_version that is no "
                    f"policy_version: {error}"
                ) from error
        if reason is not None and reason.type in ("stop", "length") and drawn.ids:
            drawn.finish, drawn.matched = reason.type, reason.matched

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

    def _forget(self) -> None:
        del self._drawn.ids[self._base :]
        del self._drawn.logprobs[self._base :]
        del self._drawn.tops[self._base :]


def _top(entries: list[tuple[float | None, int, Any]] | None) -> Top:
    return [(token, p) for p, token, _ in entries or () if p is not None]


class _Events:
    """A streamed answer as it comes."""

    def __init__(self, drawn: Drawn, server: Server, on_tokens: OnTokens) -> None:
        self._drawn = drawn
        self._server = server
        self._on_tokens = on_tokens
        self._merge = _Merge(drawn)
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
        """No more will come."""
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
            self._drawn.num_handed_on += len(new)
            self._on_tokens(new)
        return is_last


def _start_of(answer: bytes) -> str:
    return answer[:500].decode(errors="replace")


def _check_version(drawn: Drawn, policy_version: int | None) -> None:
    """Refuse what other weights drew, because they were published in the middle of the turn."""
    if policy_version is not None and any(
        span.policy_version != policy_version for span in drawn.spans
    ):
        raise version_gone(policy_version)


def _is_over(drawn: Drawn, sampling: Sampling, stop_ids: tuple[int, ...]) -> bool:
    """True if nothing is left to draw, also when the server died before it could say so."""
    if drawn.finish is None and drawn.ids:
        if drawn.ids[-1] in stop_ids:
            drawn.finish, drawn.matched = "stop", drawn.ids[-1]
        elif len(drawn.ids) >= sampling.max_new_tokens:
            drawn.finish = "length"
    return drawn.finish is not None
