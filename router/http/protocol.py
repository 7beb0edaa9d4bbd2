"""Connections of clients.

Owns: what of uvicorn's protocol is done more cheaply here: a request begins when its body is there,
a plain answer is one write, a connection has one timer. Does not own: HTTP (uvicorn), requests
(web). Invariant: bytes leave in the order in which they were written, all of them before the
connection is closed; to any ASGI app it is uvicorn.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable, Collection, Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from outloop.router.errors import Refusal

CONNECTION = "outloop.connection"
"""Where an ASGI scope holds its ClientRequest."""
_CLOSE = (b"connection", b"close")
_MAX_HEAD_BYTES = 256 * 1024
_RECEIVE_S = 60.0
"""A request has this long to arrive, beside what a connection may be idle."""
_READ_S = 60.0
"""A client has this long to read some of what it is sent."""
_MIN_READ_BYTES = HIGH_WATER_LIMIT


class ClientRequest(RequestResponseCycle):
    """One request on a connection, and its answer; beside ASGI it has shorter ways of its own."""

    transport: _Gathering  # type: ignore[assignment]
    tasks: Collection[asyncio.Task[Any]]
    """Of all requests of this process that are not over."""

    async def run_asgi(self, app: Any) -> None:
        """As uvicorn's."""
        try:
            await super().run_asgi(app)
        finally:
            # They hold each other, and the garbage collector comes rarely.
            self.scope.pop(CONNECTION, None)  # type: ignore[misc]

    def take_body(self) -> bytes | None:
        """What is left to receive of the body, if all of it is here."""
        if self.more_body or self.disconnected:
            return None
        body, self.body = bytes(self.body), bytearray()
        self.message_event.clear()
        return body

    def is_gone(self) -> bool:
        """True if the client has closed the connection, as far as is known now."""
        # Only who reads notices it, and a large body stops the reading.
        self.flow.resume_reading()
        return bool(self.disconnected or self.transport.is_closing())

    async def respond(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        """A complete answer, as one write; `headers` without content-length, fit for the wire.

        False: the client has left, and nothing was written.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected or self.transport.is_closing():
            return False
        if _CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers = (*headers, _CLOSE)
        pieces = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            pieces += (name, b": ", value, b"\r\n")
        pieces.append(b"content-length: %d\r\n\r\n" % len(body))
        if self.scope["method"] != "HEAD":
            pieces.append(body)
        self.response_started = self.response_complete = True
        answer = b"".join(pieces)
        if len(self.tasks) == 1:
            self.transport.write_now(answer)
        else:
            self.transport.write(answer)
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
        return True


class ClientConnection(HttpToolsProtocol):
    """Uvicorn's protocol without what a router does not need: upgrades and limits of its own."""

    transport: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begun: ClientRequest | None = None
        """A request whose body is awaited."""
        self._timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        """Runs while what was written waits for the client to read it."""
        self._num_unread_bytes = 0
        self._idle_since = 0.0
        self._is_new = True
        """Nothing has been answered yet."""
        self._is_in_head = False
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's; who never says anything is not waited for."""
        gathering = _Gathering(transport, self.loop, self._wait_for_reader)
        super().connection_made(gathering)  # type: ignore[arg-type]
        self._idle_since = self.loop.time()
        self._timer = self.loop.call_later(self.timeout_keep_alive + _RECEIVE_S, self._end_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        super().connection_lost(exc)
        for timer in (self._timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._reader_timer = None

    def pause_writing(self) -> None:
        """As uvicorn's, but that a client that reads nothing is not waited for without end."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """As uvicorn's."""
        super().resume_writing()
        if self._reader_timer is not None and not self.transport.is_closing():
            self._reader_timer.cancel()
            self._reader_timer = None

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, but that a head which does not end is not kept."""
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, in OpenAI's envelope, and not into an answer that has begun."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            refusal = Refusal(400, "invalid_http", msg)
            body = refusal.envelope()
            pieces = [STATUS_LINE[400]]
            for name, value in (*self.server_state.default_headers, *refusal.headers(), _CLOSE):
                pieces += (name, b": ", value, b"\r\n")
            pieces.append(b"content-type: application/json\r\n")
            pieces.append(b"content-length: %d\r\n\r\n" % len(body))
            self.transport.write(b"".join((*pieces, body)))
        self.transport.close()

    def on_message_begin(self) -> None:
        """As uvicorn's, whose scope is made later."""
        self._is_in_head, self._num_head_bytes = True, 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        """A small body is awaited before the app is called, which then need not wait for it."""
        self._is_in_head = False
        parser = self.parser
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        if "%" in path:
            path = urllib.parse.unquote(path)
        version = parser.get_http_version()
        scope: Any = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": parser.get_method().decode("ascii"),
            "root_path": self.root_path,
            "path": self.root_path + path,
            "raw_path": self.root_path.encode("ascii") + url.path,
            "query_string": url.query or b"",
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        earlier = self.cycle
        request = ClientRequest(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        request.tasks = self.tasks
        scope[CONNECTION] = self.cycle = request
        if earlier is not None and not earlier.response_complete:
            # It is answered after the one before it.
            self.flow.pause_reading()
            self.pipeline.appendleft((request, self.app))
        elif self.expect_100_continue or _size_of(self.headers) > HIGH_WATER_LIMIT:
            self._start_asgi_task(request, self.app)
        else:
            self._begun = request

    def on_body(self, body: bytes) -> None:
        """As uvicorn's."""
        cycle = self.cycle
        if cycle.response_complete:
            return
        if not cycle.body:
            # In one piece, as most are, it is not copied.
            cycle.body = body  # type: ignore[assignment]
        else:
            if isinstance(cycle.body, bytes):
                cycle.body = bytearray(cycle.body)
            cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The request's body is complete."""
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.more_body = False
        cycle.message_event.set()
        if self._begun is not None:
            self._begun = None
            self._start_asgi_task(cycle, self.app)

    def on_response_complete(self) -> None:
        """As uvicorn's, but that a timer is not set anew for every request."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self._is_new:
            self._is_new = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_later(self.timeout_keep_alive, self._end_idle)

    def _wait_for_reader(self) -> None:
        if self._reader_timer is None:
            self._num_unread_bytes = self.transport.get_write_buffer_size()
            self._reader_timer = self.loop.call_later(_READ_S, self._end_unread)

    def _end_unread(self) -> None:
        """Drop a connection whose client has read next to nothing of what waits for it."""
        self._reader_timer = None
        num_read = self._num_unread_bytes - self.transport.get_write_buffer_size()
        if num_read < _MIN_READ_BYTES:
            # To close it would be to wait until all is read.
            self.transport.abort()
        else:
            self._wait_for_reader()

    def _end_idle(self) -> None:
        """Close a connection that has been idle, or receiving one request, for too long."""
        self._timer = None
        if self.transport.is_closing():
            return
        request, allowed_s = self.cycle, float(self.timeout_keep_alive)
        if request is None or not request.response_complete:
            if request is not None and (self.pipeline or not request.more_body):
                # It is being answered, or waits for the one before it.
                return
            allowed_s += _RECEIVE_S
        left_s = self._idle_since + allowed_s - self.loop.time()
        if left_s <= 0:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(left_s, self._end_idle)


def _size_of(headers: Sequence[tuple[bytes, bytes]]) -> float:
    """The bytes of a body as its request announces them."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding":
            return float("inf")
    return 0


class _Gathering:
    """A transport that hands on, once in a round of the event loop, all that was written in it.

    The events of a stream are written apart, and each write is a system call. Answers to many
    clients leave together too: each alone would wake its client's process anew.
    """

    __slots__ = ("_loop", "_num_bytes", "_pieces", "_transport", "_when_unread")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        when_unread: Callable[[], None],
    ) -> None:
        """`when_unread` is called when it is closed and not all was sent: that may be never."""
        self._transport = transport
        self._loop = loop
        self._when_unread = when_unread
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        """As a transport's."""
        if not self._pieces:
            self._loop.call_soon(self._hand_on)
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > HIGH_WATER_LIMIT:
            # Whoever writes is to notice that nobody reads.
            self._hand_on()

    def write_now(self, data: bytes) -> None:
        """The same without waiting for what else is written, where there is nobody else."""
        if self._pieces or self._transport.is_closing():
            self.write(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """As a transport's."""
        self._hand_on()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._when_unread()

    def is_closing(self) -> bool:
        """As a transport's."""
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _hand_on(self) -> None:
        pieces, self._pieces, self._num_bytes = self._pieces, [], 0
        if pieces and not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
