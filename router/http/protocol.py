"""Clients' connections: uvicorn's, bounded where it has no bounds.

Owns: how much a client may send that is no body, how long it may take to send a request's head, and
how long it may leave an answer unread; declining offers of other protocols. Does not own: HTTP
(uvicorn), bodies (endpoint). Invariant: only callbacks of asyncio, of the parser and of an answer's
end are overridden, and each calls uvicorn's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "outloop.connection"
_MAX_HEAD_BYTES = 256 * 1024
"""Of a request without its body: its head, trailers, and what divides a chunked body."""
_MAX_FRAMING = 8
"""A chunked body may come with so many times its own bytes around it."""
_MIN_READ_BYTES = 64 * 1024


class _Parser(httptools.HttpRequestParser):
    """Reads requests of a connection; none leads to another protocol.

    httptools takes what follows a head with `Upgrade` for the other protocol, and would lose the
    body. A server may ignore the offer (RFC 9110, 7.8): such a head is read again without it.
    """

    def __init__(self, connection: ClientConnection) -> None:
        super().__init__(connection)
        self._connection = connection
        # As uvicorn's.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        """Read more of the connection.

        Raises:
            httptools.HttpParserError: it is no HTTP, or asks for a tunnel.
        """
        parser, left = self, memoryview(data)
        while True:
            try:
                super(_Parser, parser).feed_data(left)
                return
            except httptools.HttpParserUpgrade as offer:
                left = left[offer.args[0] :]
                head = self._connection.head_without_offer()
                parser = self._connection.parser = _Parser(self._connection)
                super(_Parser, parser).feed_data(head)


class ClientConnection(HttpToolsProtocol):
    """One connection; what exceeds a bound ends it."""

    head_timeout_s = 60.0
    """A head, and the first of a body, have this long to arrive; before the first request, a
    connection may be idle as long."""
    read_timeout_s = 60.0
    """A client has this long to read some of what it is sent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's; who never says anything is not waited for."""
        super().connection_made(transport)
        self.parser = _Parser(self)
        self.is_lost = False
        self._is_between_requests = True
        self._is_in_head = False
        self._num_bytes = self._num_body_bytes = 0
        self._num_unread_bytes = 0
        self._reading: asyncio.TimerHandle | None = None
        self._head: asyncio.TimerHandle | None = self.loop.call_later(
            self.head_timeout_s, transport.close
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self.is_lost = True
        super().connection_lost(exc)
        for timer in (self._head, self._reading):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """As uvicorn's; heads and trailers without end are not kept."""
        if self._is_between_requests and self._head is None:
            self._head = self.loop.call_later(self.head_timeout_s, self.transport.close)
        self._num_bytes += len(data)
        super().data_received(data)
        others = self._num_bytes - self._num_body_bytes
        if others > _MAX_HEAD_BYTES + _MAX_FRAMING * self._num_body_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins; whoever serves it can ask after its connection."""
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"connection": self}}
        self._is_in_head = True
        self._num_bytes = self._num_body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is kept; one that comes after the body is not, since nobody reads it."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is here; one that offers another protocol is read again."""
        self._is_in_head = self._is_between_requests = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body is here."""
        self._num_body_bytes += len(body)
        self._has_begun_to_arrive()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of the request is here."""
        if self.parser.should_upgrade():
            return
        self._is_between_requests = True
        self._has_begun_to_arrive()
        super().on_message_complete()
        if not self.pipeline:
            # uvicorn reads on when it is asked for more, and a client that leaves is to be noticed.
            self.flow.resume_reading()

    def head_without_offer(self) -> bytes:
        """Write the last head anew, without its offer of another protocol.

        Raises:
            httptools.HttpParserError: it asks for a tunnel.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("no tunnels are served")
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += (b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade")
        return b"\r\n".join([*lines, b"", b""])

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent; it is not waited for without end."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def on_response_complete(self) -> None:
        """As uvicorn's; what is left of the last answer of a connection may be too little for
        `pause_writing`, and closing waits until it is read."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection is closed, and dropped where what is left is not read either."""
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    def _has_begun_to_arrive(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _refuse_head(self) -> None:
        if self._is_in_head and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        self.transport.close()

    def _wait_for_reader(self) -> None:
        if self._reading is None:
            self._num_unread_bytes = self.transport.get_write_buffer_size()
            self._reading = self.loop.call_later(self.read_timeout_s, self.end_unread)

    def end_unread(self) -> None:
        """Drop a connection whose client has read next to nothing of what waits for it."""
        self._reading = None
        num_read = self._num_unread_bytes - self.transport.get_write_buffer_size()
        if num_read < _MIN_READ_BYTES:
            # To close it would be to wait until all is read.
            self.transport.abort()
        else:
            self._wait_for_reader()


def connection_of(scope: Mapping[str, Any]) -> ClientConnection:
    """The connection over which a request came."""
    connection: ClientConnection = scope["extensions"][_EXTENSION]["connection"]
    return connection
