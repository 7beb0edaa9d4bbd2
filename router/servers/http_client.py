"""HTTP/1.1 to servers, for drawing turns alone.

Owns: connections that are kept alive, one request at a time on each, and their deadlines. Does not
own: bodies and their meaning (wire, generation), which server (pool). Invariant: a connection is
used again only after its whole answer was read; a request that is given up ends its connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools

from outloop.buffer.errors import ServerUnavailable

OnData = Callable[[bytes], bool]
"""Takes a piece of a streamed answer; True: nothing more is wanted."""
_CONNECT_TIMEOUT_S = 5.0
_IDLE_S = 4.0
"""Shorter than uvicorn keeps its side open (5 s), so that no turn meets a closing connection."""
_DRAIN_S = 1.0
"""How long the rest of an answer that nobody wants may take until its connection is closed."""
_OK = 200


class Links:
    """Connections to all servers.

    A general HTTP client costs several times as much per turn as this one request needs.
    """

    def __init__(self) -> None:
        self._addresses: dict[str, _Address] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._num_asked = 0
        """Requests that have no answer yet."""

    async def post(
        self,
        url: str,
        pieces: Sequence[bytes],
        *,
        timeout_s: float,
        headers: Sequence[tuple[str, str]] = (),
        on_data: OnData | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of the answer to a JSON body given in `pieces`.

        With `on_data` the body of a 200 goes there as it comes, and the call returns once it says
        that this is enough, or at the end. What it raises is raised here.

        Raises:
            ServerUnavailable: no connection, none of HTTP, or it broke before the answer's end.
            TimeoutError: the whole of it took longer than `timeout_s`.
        """
        address = self._addresses.get(url)
        if address is None:
            address = self._addresses[url] = _Address(url)
        deadline = time.monotonic() + timeout_s
        link = address.take() or await address.connect(min(timeout_s, _CONNECT_TIMEOUT_S))
        if self._sweeping is None:
            loop = asyncio.get_running_loop()
            self._sweeping = loop.call_later(_IDLE_S, self._sweep)
        self._num_asked += 1
        try:
            return await link.ask(
                address.request(pieces, headers),
                on_data,
                timeout_s=timeout_s,
                deadline=deadline,
                is_alone=self._num_asked == 1,
            )
        finally:
            self._num_asked -= 1

    def cut(self, url: str) -> None:
        """End every connection to `url`: who waits there for an answer gets ServerUnavailable."""
        address = self._addresses.get(url)
        for link in tuple(address.links) if address is not None else ():
            link.cut()

    def close(self) -> None:
        """End every connection that waits for a request."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for address in self._addresses.values():
            address.close_idle(0.0)

    def _sweep(self) -> None:
        """Close what has been idle for too long; again, as long as there is anything."""
        self._sweeping = None
        if any(address.close_idle(_IDLE_S) for address in self._addresses.values()):
            self._sweeping = asyncio.get_running_loop().call_later(_IDLE_S, self._sweep)


class _Address:
    """One URL, and the connections to it that wait for a request."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._url = url
        self._host = parts.hostname or ""
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._head = (
            f"POST {parts.path or '/'} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            "content-type: application/json\r\naccept-encoding: identity\r\n"
        )
        self.idle: list[_Link] = []
        self.links: set[_Link] = set()
        """All of them, also those that wait for an answer."""

    def request(
        self, pieces: Sequence[bytes], headers: Sequence[tuple[str, str]]
    ) -> tuple[bytes, ...]:
        """The request in pieces, head first."""
        more = "".join([f"{name}: {_word(value)}\r\n" for name, value in headers])
        head = f"{self._head}{more}content-length: {sum(map(len, pieces))}\r\n\r\n"
        return (head.encode("latin-1"), *pieces)

    def take(self) -> _Link | None:
        """The connection that was used last; None when none can be used."""
        horizon = time.monotonic() - _IDLE_S
        while self.idle:
            link = self.idle.pop()
            if link.is_usable and link.idle_since > horizon:
                return link
            link.close()
        return None

    async def connect(self, timeout_s: float) -> _Link:
        """A new connection.

        Raises:
            ServerUnavailable: none could be made in time.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, link = await loop.create_connection(
                    lambda: _Link(self), self._host, self._port, ssl=self._is_tls or None
                )
        except (OSError, TimeoutError) as error:
            raise ServerUnavailable(
                f"{self._url}: no connection within {timeout_s:.3g} s "
                f"({type(error).__name__}: {error})"
            ) from error
        return link

    def close_idle(self, idle_s: float) -> int:
        """Close connections that have waited `idle_s` or longer; how many go on waiting."""
        horizon = time.monotonic() - idle_s
        old = [link for link in self.idle if link.idle_since <= horizon]
        self.idle = [link for link in self.idle if link.idle_since > horizon]
        for link in old:
            link.close()
        return len(self.idle)

    def broken(self, why: str) -> ServerUnavailable:
        """The error of an answer that did not come in full."""
        return ServerUnavailable(f"{self._url}: {why}")


class _Link(asyncio.Protocol):
    """One connection; between two requests it is among its address's idle ones."""

    __slots__ = (
        "_address",
        "_answer",
        "_deadline",
        "_draining",
        "_is_asked",
        "_loop",
        "_on_data",
        "_parser",
        "_pieces",
        "_status",
        "_timeout_s",
        "_timer",
        "_transport",
        "idle_since",
        "is_usable",
    )

    def __init__(self, address: _Address) -> None:
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._status = 0
        self._on_data: OnData | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._draining: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Looks whether the answer is late; set when it fires, not for each request."""
        self._deadline = self._timeout_s = 0.0
        self._is_asked = False
        self._transport: Any
        self.idle_since = 0.0
        self.is_usable = True

    async def ask(
        self,
        request: Sequence[bytes],
        on_data: OnData | None,
        *,
        timeout_s: float,
        deadline: float,
        is_alone: bool,
    ) -> tuple[int, bytes]:
        """Send a request; see Links.post."""
        self._answer = self._loop.create_future()
        self._is_asked, self._on_data = True, on_data
        if self._timer is not None and deadline < self._deadline:
            self._timer.cancel()
            self._timer = None
        self._timeout_s, self._deadline = timeout_s, deadline
        if self._timer is None:
            self._expire()
        if is_alone:
            self._send(request)
        else:
            # After what else this round of the event loop does: the requests of many turns then
            # leave together, and wake a server once where each alone would wake it anew.
            self._loop.call_soon(self._send, request)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.close()
            raise

    def _send(self, request: Sequence[bytes]) -> None:
        if self.is_usable:
            self._transport.writelines(request)

    def close(self) -> None:
        """End the connection."""
        self.is_usable = False
        self._transport.close()

    def cut(self) -> None:
        """End the connection at once: its other end may read nothing any more."""
        self.is_usable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._address.links.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        self._address.links.discard(self)
        # The parser holds this object: without it nothing waits for the garbage collector.
        self._parser = None
        if self._timer is not None:
            self._timer.cancel()
        if self._draining is not None:
            self._draining.cancel()
        self._fail(self._address.broken(f"closed before the end of its answer ({exc})"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # What came of the answer's own meaning.
            self._fail(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(self._address.broken(f"answered what is no HTTP ({error})"))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        on_data = self._on_data
        if on_data is None or self._status != _OK:
            self._pieces.append(data)
        elif self._answer is not None and not self._answer.done() and on_data(data):
            self._answer.set_result((self._status, b""))
            self._draining = self._loop.call_later(_DRAIN_S, self.close)

    def on_message_complete(self) -> None:
        if self._status < _OK:
            # 100 Continue and its like; the answer is to come.
            return
        if not self._is_asked:
            # Nobody waits for this: whatever comes next on this connection is not to be trusted.
            self.close()
            return
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._is_asked, self._on_data = False, None
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
        if not self.is_usable:
            return
        if self._parser.should_keep_alive():
            self.idle_since = time.monotonic()
            self._address.idle.append(self)
        else:
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._status, body))

    def _fail(self, error: BaseException) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        if self.is_usable:
            self.close()

    def _expire(self) -> None:
        """Give an answer up that is late; look again when the one that is awaited would be."""
        self._timer = None
        if self._answer is None or self._answer.done():
            return
        left_s = self._deadline - time.monotonic()
        if left_s > 0 and self.is_usable:
            self._timer = self._loop.call_later(left_s, self._expire)
            return
        late = f"{self._address.broken('no answer')} within {self._timeout_s:.3g} s"
        self._fail(TimeoutError(late))


def _word(value: str) -> str:
    """A header's value that cannot begin another header."""
    return value.replace("\r", " ").replace("\n", " ")
