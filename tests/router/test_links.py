"""Connections to servers: every way in which an answer can come, and not come."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from outloop.buffer.errors import ServerUnavailable
from outloop.router.servers.http_client import Links

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"
)


class Peer:
    """A server that answers each request with the next of its scripts, a list of pieces.

    A piece is bytes, an event that is waited for, or None: the connection is closed there.
    """

    def __init__(self, *answers: list[bytes | asyncio.Event | None]) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_open = 0
        self.was_left = asyncio.Event()
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.num_connections += 1
        self.num_open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(size))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    if isinstance(piece, asyncio.Event):
                        await piece.wait()
                        continue
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.was_left.set()
        finally:
            self.num_open -= 1
            writer.close()


@asynccontextmanager
async def serving(
    *answers: list[bytes | asyncio.Event | None],
) -> AsyncIterator[tuple[Peer, Links]]:
    """A peer with its scripts, and links."""
    peer, links = Peer(*answers), Links()
    server = await asyncio.start_server(peer, "127.0.0.1", 0)
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/generate"
    try:
        yield peer, links
    finally:
        links.close()
        server.close()
        await server.wait_closed()


async def ask(peer: Peer, links: Links, on_data: Callable[[bytes], bool] | None = None) -> bytes:
    """One request; its body must be answered with status 200."""
    status, body = await links.post(peer.url, (b'{"a":', b"1}"), timeout_s=30, on_data=on_data)
    assert status == 200
    return body


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED], ids=["plain", "chunked"])
async def test_an_answer_cut_anywhere_is_the_same(answer: bytes) -> None:
    """Wherever packets end, the body is whole, and the connection is used again."""
    cuts = [[answer[:cut], answer[cut:]] for cut in range(1, len(answer))]
    async with serving(*cuts) as (peer, links):
        for _ in cuts:
            assert await ask(peer, links) == b"hello"
        assert peer.num_connections == 1
        assert peer.requests[0].endswith(b'\r\n\r\n{"a":1}')
        assert peer.requests[0].startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")


async def test_answers_at_once_have_a_connection_each() -> None:
    """Concurrent requests never share a connection, and get their own answers."""
    gate = asyncio.Event()
    async with serving(*[[gate, PLAIN]] * 8, *[[PLAIN]] * 8) as (peer, links):
        asked = [asyncio.create_task(ask(peer, links)) for _ in range(8)]
        while len(peer.requests) < 8:
            await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(*asked) == [b"hello"] * 8
        assert await ask(peer, links) == b"hello"
        assert peer.num_connections == 8


async def test_what_comes_before_the_answer_is_no_answer() -> None:
    """100 Continue is passed over."""
    async with serving([b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN]) as (peer, links):
        assert await ask(peer, links) == b"hello"


async def test_an_error_is_handed_over_in_full() -> None:
    """Status and body of an error come back, also where a stream was asked for."""
    answer = b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy"
    async with serving([answer]) as (peer, links):
        got = await links.post(peer.url, (b"{}",), timeout_s=30, on_data=lambda _: True)
        assert got == (503, b"busy")


@pytest.mark.parametrize(
    "answer",
    [
        [PLAIN[:-1], None],
        [CHUNKED[:-3], None],
        [b"HTTP/1.1 200 OK\r\n", None],
        [None],
        [b"what is this\r\n\r\n"],
        [CHUNKED[:50] + b"zz\r\nlo\r\n0\r\n\r\n"],
    ],
    ids=["short", "no last chunk", "half a head", "nothing", "no HTTP", "no chunk size"],
)
async def test_an_answer_that_breaks_off_is_a_failure_of_the_server(answer: list) -> None:
    """What is not complete is never taken for an answer, and the next request has a new link."""
    async with serving(answer, [PLAIN]) as (peer, links):
        with pytest.raises(ServerUnavailable, match=peer.url):
            await ask(peer, links)
        assert await ask(peer, links) == b"hello"
        assert peer.num_connections == 2


async def test_a_server_that_ends_its_connections_is_connected_to_again() -> None:
    """`connection: close` is heeded, and so is a connection closed while it was idle."""
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello"
    async with serving([closing], [PLAIN, None], [PLAIN]) as (peer, links):
        assert await ask(peer, links) == b"hello"
        assert await ask(peer, links) == b"hello"
        while any(link.is_usable for link in links._addresses[peer.url].idle):
            await asyncio.sleep(0)
        assert await ask(peer, links) == b"hello"
        assert peer.num_connections == 3


async def test_nobody_listens() -> None:
    """A refused connection is a failure that names the URL."""
    async with serving() as (peer, links):
        pass
    with pytest.raises(ServerUnavailable, match=peer.url):
        await ask(peer, links)
    with pytest.raises(ServerUnavailable, match="no connection"):
        await links.post("http://no-such-host.invalid/x", (b"",), timeout_s=30)


async def test_an_answer_that_does_not_come_is_waited_for_no_longer() -> None:
    """The deadline ends the request and its connection."""
    async with serving([PLAIN[:20], asyncio.Event()]) as (peer, links):
        with pytest.raises(TimeoutError, match=peer.url):
            await links.post(peer.url, (b"{}",), timeout_s=0.05)
        assert not links._addresses[peer.url].idle


@pytest.mark.parametrize("first_s", [30, 0.3])
async def test_each_request_of_a_connection_has_its_own_deadline(first_s: float) -> None:
    """Whether the one before it might have taken more time or less."""
    async with serving([PLAIN], [PLAIN[:20], asyncio.Event()]) as (peer, links):
        await links.post(peer.url, (b"{}",), timeout_s=first_s)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"within 0\.5 s"):
            await links.post(peer.url, (b"{}",), timeout_s=0.5)
        assert 0.4 < time.monotonic() - started < 20
        assert peer.num_connections == 1


async def test_a_request_that_is_given_up_ends_its_connection() -> None:
    """The server sees that nobody waits, and no later request gets the answer."""
    gate = asyncio.Event()
    async with serving([gate], [PLAIN]) as (peer, links):
        asked = asyncio.create_task(ask(peer, links))
        while not peer.requests:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        gate.set()
        await peer.was_left.wait()
        assert await ask(peer, links) == b"hello"
        assert peer.num_connections == 2


async def test_a_stream_comes_as_it_is_sent_and_ends_when_it_is_enough() -> None:
    """Pieces come before the end; after enough, the rest is read and the connection used again."""
    gate, came = asyncio.Event(), list[bytes]()

    def take(data: bytes) -> bool:
        came.append(data)
        return b"".join(came) == b"hello"

    async with serving([CHUNKED[:60], gate, CHUNKED[60:]], [PLAIN]) as (peer, links):
        asked = asyncio.create_task(ask(peer, links, take))
        while not came:
            await asyncio.sleep(0)
        assert came == [b"hel"]
        gate.set()
        assert await asked == b""
        assert came == [b"hel", b"lo"]
        while not links._addresses[peer.url].idle:
            await asyncio.sleep(0)
        assert await ask(peer, links) == b"hello"
        assert peer.num_connections == 1


async def test_an_error_in_what_takes_the_stream_is_the_callers() -> None:
    """What the taker of pieces raises is raised by the request, and its connection ended."""

    def take(data: bytes) -> bool:
        raise ServerUnavailable(f"refused {data.decode()}")

    async with serving([CHUNKED], [PLAIN]) as (peer, links):
        with pytest.raises(ServerUnavailable, match="refused hel"):
            await ask(peer, links, take)
        await peer.was_left.wait()
        assert await ask(peer, links) == b"hello"


async def test_an_answer_that_nobody_asked_for_ends_the_connection() -> None:
    """A second answer after the first never becomes that of a later request."""
    second = PLAIN.replace(b"hello", b"wrong")
    async with serving([PLAIN + second], [PLAIN]) as (peer, links):
        assert await ask(peer, links) == b"hello"
        assert await ask(peer, links) == b"hello"
        assert peer.num_connections == 2


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a request longer than servers keep it open is closed, without a request."""
    monkeypatch.setattr("outloop.router.servers.http_client._IDLE_S", 0.01)
    async with serving([PLAIN]) as (peer, links):
        assert await ask(peer, links) == b"hello"
        await peer.was_left.wait()
        assert not links._addresses[peer.url].idle
