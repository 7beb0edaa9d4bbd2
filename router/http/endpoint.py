"""Requests and answers on raw ASGI.

Owns: bodies, headers, keys in headers, the envelope around every failure. Does not own: routes.
Invariant: an endpoint answers exactly once, whatever happens in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from outloop.buffer.errors import OutloopError
from outloop.router.errors import (
    OPENAI_ERRORS,
    ErrorForm,
    Refusal,
    as_refusal,
    body_too_large,
    not_json,
)
from outloop.router.http.compression import decoded
from outloop.router.http.protocol import connection_of
from outloop.router.http.rate_limit import RateLimit
from outloop.router.metrics import RouterMetrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")

MAX_RUNNER_BODY_BYTES = 64 * 1024 * 1024
"""Of bodies that only the holder of the runner key sends: task lists, conversations."""
_RECEIVE_S = 60.0
"""A body has this long to arrive, unless an exchange says otherwise."""
_log = structlog.get_logger()
T = TypeVar("T")


class ClientLeft(OutloopError):
    """The client closed the connection before its request was complete."""


class Exchange:
    """One request and its answer, over ASGI."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, body_timeout_s: float = _RECEIVE_S
    ) -> None:
        """`body_timeout_s`: the body has this long to arrive."""
        self.scope = scope
        self._body_timeout_s = body_timeout_s
        self._receive = receive
        self._send = send
        self.is_started = False
        self._is_answered = False
        self._connection = connection_of(scope)
        self.headers: dict[bytes, bytes] = dict(scope["headers"])

    @property
    def key(self) -> str:
        """The bearer key, or `x-api-key`; empty when none was sent."""
        value = self.headers.get(b"authorization", b"").decode("latin-1")
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer" and key:
            return key.strip()
        return self.headers.get(b"x-api-key", b"").decode("latin-1")

    @property
    def base_url(self) -> str:
        """Where the client reached us, without a trailing slash."""
        host = self.headers.get(b"host", b"").decode("latin-1")
        if not host:
            host = "{}:{}".format(*self.scope["server"])
        return f"{self.scope['scheme']}://{host}"

    @property
    def num_body_bytes(self) -> int | None:
        """Size of the body as the client announces it, still compressed; None: it does not."""
        announced = self.headers.get(b"content-length")
        return int(announced) if announced is not None else None

    def path(self, name: str) -> str:
        """A path parameter; empty when the route has none of that name."""
        return str(self.scope.get("path_params", {}).get(name, ""))

    async def body(self, max_bytes: int = MAX_RUNNER_BODY_BYTES) -> bytes:
        """The whole request body, as it was before the client compressed it.

        Raises:
            Refusal: 413, it has more than `max_bytes`; 415 and 400, it is compressed as nothing
                here reads it; 400, it is not UTF-8; 503, it did not arrive in time.
            ClientLeft: the client closed the connection.
        """
        # For the first of it the connection waits no longer than for a head (protocol).
        whole, is_all = await self._receive_piece()
        if len(whole) > max_bytes:
            raise body_too_large(max_bytes)
        if not is_all:
            whole = await self._receive_rest(whole, max_bytes)
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None:
            whole = await decoded(whole, encoding, max_bytes)
        try:
            # Parts of a body are decoded late, in many places: here it is known of all of them.
            whole.decode()
        except UnicodeDecodeError as error:
            raise Refusal(400, "invalid_value", f"the body is not UTF-8: {error}") from error
        return whole

    async def _receive_piece(self) -> tuple[bytes, bool]:
        """A piece of the body, and whether it is the last."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("the client left while its request was read")
        return message.get("body", b""), not message.get("more_body", False)

    async def _receive_rest(self, first: bytes, max_bytes: int) -> bytes:
        pieces, size, is_all = [first], len(first), False
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while not is_all:
                    piece, is_all = await self._receive_piece()
                    size += len(piece)
                    if size > max_bytes:
                        raise body_too_large(max_bytes)
                    pieces.append(piece)
        except TimeoutError as error:
            raise Refusal(
                503,
                "body_too_slow",
                f"the body did not arrive within {self._body_timeout_s:.0f} s; send it again",
                retry_after_s=1.0,
                closes_connection=True,
            ) from error
        return b"".join(pieces)

    async def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The body as the decoder's type.

        Raises:
            Refusal: 400, not JSON or not of that type.
        """
        body = await self.body()
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise Refusal(400, "invalid_value", f"the body is not valid: {error}") from error
        except msgspec.DecodeError as error:
            raise not_json(body, error) from error

    async def answer(self, status: int, body: bytes, headers: Headers = ()) -> bool:
        """Send a complete answer; False if the client had left before it was sent."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [JSON, length, *headers])
        return await self.send(body, more=False)

    async def start(self, status: int, headers: Headers) -> None:
        """Begin an answer that comes in pieces."""
        self.is_started = True
        await self._send(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )

    async def start_events(self, headers: Headers = ()) -> None:
        """Begin an answer of server-sent events."""
        await self.start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                *headers,
            ],
        )

    async def send(self, body: bytes, *, more: bool) -> bool:
        """Send a piece of the answer; `more=False` ends it. False if the client had left."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._is_answered = not more
        return not self._connection.is_lost

    @property
    def is_gone(self) -> bool:
        """True if the client has closed the connection before its answer was complete, as far as
        is known now."""
        return self._connection.is_lost and not self._is_answered

    async def wait_gone(self) -> None:
        """Return when the client has closed the connection. After the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _without_key(path: str) -> str:
    """What of a path a log may show: an episode may stand in it by its key."""
    return f"/episodes/*/{path.split('/', 3)[-1]}" if path.startswith("/episodes/") else path


def _too_deep() -> Refusal:
    return Refusal(
        400,
        "nested_too_deeply",
        "the body holds JSON that nests hundreds of levels deep; send that part as text",
    )


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """A handler as an ASGI app that turns every failure into an envelope."""

    def __init__(
        self,
        handler: Handler,
        *,
        method: str,
        metrics: RouterMetrics,
        errors: ErrorForm = OPENAI_ERRORS,
        rate_limit: RateLimit | None = None,
    ) -> None:
        self._handler = handler
        self._rate_limit = rate_limit
        self._errors = errors
        self._method = method
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            if scope["method"] != self._method:
                raise Refusal(
                    405,
                    "method_not_allowed",
                    f"{scope['method']} {scope['path']} is not served; use {self._method}",
                )
            if self._rate_limit is not None:
                self._rate_limit.take(exchange.key)
            await self._handler(exchange)
        except ClientLeft:
            return
        except OutloopError as error:
            await self._refuse(exchange, as_refusal(error))
        except RecursionError:
            # Of a decoder: how deeply a body nests is its sender's choice, so sending it again
            # would not help.
            await self._refuse(exchange, _too_deep())
        except Exception:  # noqa: BLE001 - the process boundary: the client gets a 500, we the trace
            _log.exception("request_failed", path=_without_key(scope["path"]))
            await self._refuse(
                exchange,
                Refusal(500, "internal_error", "the router failed; see its log", retry_after_s=1.0),
            )

    async def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        self._metrics.refusals.labels(refusal.code).inc()
        if exchange.is_started:
            await exchange.send(self._errors.event(refusal), more=False)
        else:
            body = self._errors.envelope(refusal)
            await exchange.answer(refusal.status, body, refusal.headers())
