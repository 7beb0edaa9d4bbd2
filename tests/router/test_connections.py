"""Clients' connections, over real sockets."""

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from fakes.live_router import accepting
from outloop.router.http import protocol
from outloop.router.http.endpoint import ClientLeft, Exchange

OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def serving(
    app, keep_alive_s: float = 5.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to `app`."""
    async with accepting(app, keep_alive_s) as (address, _):
        reader, writer = await asyncio.open_connection(*address)
        yield reader, writer
        writer.close()


def request(body: bytes = b"", *more: str) -> bytes:
    """A request on the wire."""
    head = ["POST / HTTP/1.1", "host: x", f"content-length: {len(body)}", *more]
    return "\r\n".join([*head, "", ""]).encode() + body


async def test_head_and_body_are_one_write() -> None:
    """An answer reaches the transport in one piece, and a second one comes after the first."""
    written: list[bytes] = []

    async def app(scope, receive, send) -> None:
        connection = scope["outloop.connection"]
        inner = connection.transport._transport
        if not written:
            write = inner.write
            connection.transport._transport = Recorder(inner, write, written)
        exchange = Exchange(scope, receive, send)
        await exchange.answer(200, await exchange.body())

    async with serving(app) as (reader, writer):
        for body in (b"first", b"second"):
            writer.write(request(body))
            answer = await reader.readuntil(body)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert [piece[-5:] for piece in written] == [b"first", b"econd"]


class Recorder:
    """A transport that remembers what is written to it."""

    def __init__(self, transport, write, written: list[bytes]) -> None:
        self._transport, self._write, self._written = transport, write, written

    def write(self, data: bytes) -> None:
        """As a transport's."""
        self._written.append(data)
        self._write(data)

    def __getattr__(self, name: str):
        return getattr(self._transport, name)


async def test_everything_is_sent_before_the_connection_is_closed() -> None:
    """A client that asked to close gets the whole answer first."""
    body = b"z" * 3_000_000

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        await exchange.start_events()
        for start in range(0, len(body), 100_000):
            await exchange.send_events(body[start : start + 100_000], more=True)
        await exchange.send_events(b"", more=False)

    async with serving(app) as (reader, writer):
        writer.write(request(b"", "connection: close"))
        answer = await reader.read()
        assert answer.count(b"z") == len(body)
        assert answer.endswith(b"0\r\n\r\n")


async def test_a_client_that_left_is_noticed() -> None:
    """Also when its body was so large that reading had been stopped."""
    came, seen = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        assert not exchange.is_gone()
        came.set()
        while not exchange.is_gone():
            await asyncio.sleep(0)
        seen.set()
        await exchange.answer(200, b"nobody reads this")

    for size in (1, 1_000_000):
        came.clear()
        seen.clear()
        async with serving(app) as (_, writer):
            writer.write(request(b"x" * size))
            await came.wait()
            writer.close()
            await asyncio.wait_for(seen.wait(), 60)


async def test_a_small_body_is_there_when_the_app_is_called() -> None:
    """A request whose body is on its way calls nobody; a large one is read by the app."""
    called: list[int] = []

    async def app(scope, receive, send) -> None:
        called.append(int(dict(scope["headers"])[b"content-length"]))
        exchange = Exchange(scope, receive, send)
        await exchange.answer(200, str(len(await exchange.body())).encode())

    async with serving(app) as (reader, writer):
        for size, seen_before_the_end in ((300, []), (200_000, [200_000])):
            called.clear()
            whole = request(b"x" * size)
            writer.write(whole[:-100])
            await writer.drain()
            while called != seen_before_the_end:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert called == seen_before_the_end
            writer.write(whole[-100:])
            assert (await reader.readuntil(b"\r\n\r\n" + str(size).encode())).startswith(OK)


async def test_answers_come_in_the_order_of_the_requests() -> None:
    """Also where several are sent at once, of every kind, and the last asks to close."""

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        body = await exchange.body()
        await asyncio.sleep(0.02 if body == b"slow" else 0)
        if scope["method"] == "POST":
            await exchange.answer(200, b"<" + body[:4] + b">")
        else:
            await exchange.answer(200, b"<get>")

    get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    chunked = request(b"", "transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    chunked += b"4\r\nchun\r\n0\r\n\r\n"
    large, last = request(b"larg" * 50_000), request(b"last", "connection: close")
    async with serving(app) as (reader, writer):
        writer.write(request(b"slow") + get + chunked + large + last)
        answers = await asyncio.wait_for(reader.read(), 60)
    found = [answers.find(word) for word in (b"<slow>", b"<get>", b"<chun>", b"<larg>", b"<last>")]
    assert found == sorted(found)
    assert found[0] > 0
    assert answers.count(b"connection: close") == 1
    assert answers.endswith(b"<last>")


async def test_what_asks_for_the_head_only_gets_no_body() -> None:
    """Its length is told, and the next answer begins where it should."""

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.answer(200, scope["method"].encode() * 100)

    async with serving(app) as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"content-length: 400\r\n" in await reader.readuntil(b"\r\n\r\n")
        writer.write(request())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(OK)


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    """However long an answer takes, the time begins with its end, once."""

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        await asyncio.sleep(0.5)
        await exchange.answer(200, b"here")

    async with serving(app, keep_alive_s=0.2) as (reader, writer):
        for _ in range(2):
            writer.write(request())
            assert (await reader.readuntil(b"here")).startswith(OK)
        assert await asyncio.wait_for(reader.read(), 60) == b""


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-le",
        request(b"body")[:-1],
        request(b"x" * 70_000)[:-1],
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n",
    ],
    ids=["nothing", "head", "body", "large", "chunked"],
)
async def test_a_request_that_does_not_arrive_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, begun: bytes, num_before: int
) -> None:
    """Whatever is missing, also after a whole request; the app, if it was called, is told."""
    monkeypatch.setattr(protocol, "_RECEIVE_S", 0.2)
    left = []

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await exchange.answer(200, await exchange.body())
        except ClientLeft as error:
            left.append(error)

    async with serving(app, keep_alive_s=0.2) as (reader, writer):
        for _ in range(num_before):
            writer.write(request(b"one"))
            await reader.readuntil(b"one")
        writer.write(begun)
        assert await asyncio.wait_for(reader.read(), 60) == b""
    called = b"x" * 100 in begun or b"chunked" in begun
    assert len(left) == called


@pytest.mark.parametrize("piece", [b"a" * 50_000, b"a: b\r\n" * 5_000])
async def test_a_head_without_end_is_not_kept(piece: bytes) -> None:
    """One endless header, or one after the other: refused, whoever sends them."""

    async def app(scope, receive, send) -> None:
        raise AssertionError("no request was complete")

    async with serving(app) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx: y")
        num_sent = 0
        with suppress(ConnectionError):
            while not reader.at_eof() and num_sent < 100 * len(piece):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
                num_sent += len(piece)
            answer = await asyncio.wait_for(reader.read(), 60)
            assert answer.startswith(b"HTTP/1.1 400 ")
        assert num_sent < 100 * len(piece)


@pytest.mark.parametrize(
    "sent",
    [
        b"rubbish\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\na: \x00\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 300_000,
    ],
)
async def test_what_is_no_http_is_refused_in_the_envelope(sent: bytes) -> None:
    """Nothing says which dialect was meant: OpenAI's, and the connection is closed."""

    async def app(scope, receive, send) -> None:
        with suppress(ClientLeft):
            await Exchange(scope, receive, send).body()

    async with serving(app) as (reader, writer):
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 60)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nx-should-retry: false" in head
    assert b"\r\nconnection: close" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


async def test_rubbish_after_a_request_does_not_get_into_its_answer() -> None:
    """What has begun to be answered ends where the rubbish came."""
    began, heard = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        await exchange.start_events()
        await exchange.send_events(b"first", more=True)
        began.set()
        await exchange.wait_gone()
        heard.set()

    async with serving(app) as (reader, writer):
        writer.write(request(b"body"))
        await began.wait()
        writer.write(b"rubbish\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        await asyncio.wait_for(heard.wait(), 60)
    assert answer.endswith(b"first\r\n")


async def test_a_large_head_is_read() -> None:
    """What a client may well send, in any number of pieces."""

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.answer(200, b"%d" % len(exchange.headers[b"x"]))

    async with serving(app) as (reader, writer):
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx: ")
            for _ in range(20):
                writer.write(b"a" * 10_000)
                await asyncio.sleep(0.001)
            writer.write(b"\r\n\r\n")
            assert (await reader.readuntil(b"200000")).startswith(OK)


async def test_a_slow_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes longer than a connection may be idle, then as long to be answered."""
    monkeypatch.setattr(protocol, "_RECEIVE_S", 30.0)

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        body = await exchange.body()
        await asyncio.sleep(0.4)
        await exchange.answer(200, body)

    async with serving(app, keep_alive_s=0.2) as (reader, writer):
        for body in (b"first", b"second"):
            whole = request(body)
            writer.write(whole[:-1])
            await asyncio.sleep(0.4)
            writer.write(whole[-1:])
            assert (await reader.readuntil(body)).startswith(OK)


async def test_a_request_that_is_over_leaves_nothing_to_the_garbage_collector() -> None:
    """What was made for it is freed with its answer: collections are rare in a router."""
    requests: list[weakref.ref] = []

    async def app(scope, receive, send) -> None:
        requests.append(weakref.ref(scope["outloop.connection"]))
        exchange = Exchange(scope, receive, send)
        await exchange.answer(200, await exchange.body())

    gc.disable()
    try:
        async with serving(app) as (reader, writer):
            for body in (b"one", b"two"):
                writer.write(request(body))
                await reader.readuntil(body)
            await asyncio.sleep(0)
            assert requests[0]() is None
    finally:
        gc.enable()
