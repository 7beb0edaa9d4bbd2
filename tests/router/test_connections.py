"""Clients' connections, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psutil
import pytest

from fakes.live_router import accepting
from outloop.router.errors import Refusal
from outloop.router.http.endpoint import ClientLeft, Exchange
from outloop.router.http.protocol import ClientConnection

OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def serving(
    app, keep_alive_s: float = 5.0, connection: type[ClientConnection] = ClientConnection
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to `app`."""
    async with accepting(app, keep_alive_s, connection) as (address, _):
        reader, writer = await asyncio.open_connection(*address)
        yield reader, writer
        writer.close()


def request(body: bytes = b"", *more: str) -> bytes:
    """A request on the wire."""
    head = ["POST / HTTP/1.1", "host: x", f"content-length: {len(body)}", *more]
    return "\r\n".join([*head, "", ""]).encode() + body


class StoppedClock(asyncio.SelectorEventLoop):
    """An event loop whose time passes when a test says so, however busy the machine is."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


async def pass_time(seconds: float) -> None:
    """Let a time pass in the running StoppedClock, and what is due in it happen."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StoppedClock)
    loop.now_s += seconds
    for _ in range(5):
        await asyncio.sleep(0)


async def test_everything_is_sent_before_the_connection_is_closed() -> None:
    """A client that asked to close gets the whole answer first."""
    body = b"z" * 3_000_000

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        await exchange.start_events()
        for start in range(0, len(body), 100_000):
            await exchange.send(body[start : start + 100_000], more=True)
        await exchange.send(b"", more=False)

    async with serving(app) as (reader, writer):
        writer.write(request(b"", "connection: close"))
        answer = await reader.read()
        assert answer.count(b"z") == len(body)
        assert answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("size", [1, 1_000_000])
async def test_a_client_that_left_is_noticed(size: int) -> None:
    """Also when its body was large; what is sent then is said not to have reached it."""
    came, seen = asyncio.Event(), asyncio.Event()
    sent = []

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        assert not exchange.is_gone
        came.set()
        while not exchange.is_gone:
            await asyncio.sleep(0)
        sent.append(await exchange.answer(200, b"nobody reads this"))
        seen.set()

    async with serving(app) as (_, writer):
        writer.write(request(b"x" * size))
        await came.wait()
        writer.close()
        await asyncio.wait_for(seen.wait(), 60)
    assert sent == [False]


async def test_the_end_of_an_answer_is_no_leaving() -> None:
    """A client that has its answer has not left, whatever comes after."""
    sent = []

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        body = await exchange.body()
        await asyncio.sleep(0)
        sent.append(await exchange.answer(200, body))
        await asyncio.sleep(0.01)
        sent.append(not exchange.is_gone)

    async with serving(app) as (reader, writer):
        for body in (b"one", b"two"):
            writer.write(request(body))
            await reader.readuntil(body)
    assert sent == [True] * 4


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
def test_a_request_that_does_not_arrive_is_not_waited_for(begun: bytes, num_before: int) -> None:
    """Whatever is missing, also after a whole request; a body that does not come is refused so
    that its client comes again."""
    num_received, came = 0, asyncio.Event()

    class Impatient(ClientConnection):
        head_timeout_s = 0.2

        def data_received(self, data: bytes) -> None:
            nonlocal num_received
            super().data_received(data)
            num_received += len(data)
            came.set()

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send, body_timeout_s=0.2)
        try:
            await exchange.answer(200, await exchange.body())
        except Refusal as refusal:
            await exchange.answer(refusal.status, refusal.envelope(), refusal.headers())

    async def talk() -> bytes:
        async with serving(app, 0.2, Impatient) as (reader, writer):
            for _ in range(num_before):
                writer.write(request(b"one"))
                await reader.readuntil(b"one")
            writer.write(begun)
            while num_received < num_before * len(request(b"one")) + len(begun):
                came.clear()
                await came.wait()
            for _ in range(10):
                await pass_time(0.1)
            return await reader.read()

    with asyncio.Runner(loop_factory=StoppedClock) as runner:
        answer = runner.run(talk())
    if b"\r\n\r\n" in begun:
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"body_too_slow" in answer
        assert b"connection: close" in answer
    else:
        assert answer == b""


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Bytes that a connection takes of endless pieces before it is ended; at most 50 MB."""
    num_sent = 0
    with suppress(ConnectionError):
        while not reader.at_eof() and num_sent < 50_000_000:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
            num_sent += len(piece)
    return num_sent


@pytest.mark.parametrize("piece", [b"a" * 50_000, b"a: b\r\n" * 5_000])
async def test_a_head_without_end_is_not_stored(piece: bytes) -> None:
    """One endless header, or one after the other: refused, whoever sends them."""

    async def app(scope, receive, send) -> None:
        raise AssertionError("no request was complete")

    async with serving(app) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx: y")
        assert await flood(reader, writer, piece) < 5_000_000


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("piece", [b"a" * 50_000, b"a: b\r\n" * 5_000])
async def test_trailers_without_end_are_not_stored(piece: bytes, is_answered: bool) -> None:
    """What comes after a chunked body is not read, also when the answer, a 401, was sent
    before it: neither one endless trailer nor many are kept in memory."""
    headers: list[dict] = []

    async def app(scope, receive, send) -> None:
        headers.append(dict(scope["headers"]))
        exchange = Exchange(scope, receive, send)
        if not is_answered:
            with suppress(ClientLeft):
                await exchange.body()
        await exchange.answer(401, b"no")

    before = psutil.Process().memory_info().rss
    async with serving(app) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"2\r\n{}\r\n0\r\nauthorization: Bearer x\r\nx: y")
        assert await flood(reader, writer, piece) < 5_000_000
    assert all(b"authorization" not in one for one in headers)
    assert psutil.Process().memory_info().rss - before < 20_000_000


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


async def test_a_body_in_many_chunks_is_read() -> None:
    """However little is in each: framing grows with the body."""

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.answer(200, b"<%d>" % len(await exchange.body()))

    async with serving(app) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(200):
            writer.write(b"1\r\nx\r\n" * 1000)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert (await reader.readuntil(b"<200000>")).startswith(OK)


def test_a_slow_request_arrives() -> None:
    """One that takes longer than a connection may be idle, then as long to be answered."""
    came = asyncio.Event()

    class Noting(ClientConnection):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            came.set()

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        body = await exchange.body()
        await pass_time(0.4)
        await exchange.answer(200, body)

    async def talk() -> None:
        async with serving(app, 0.2, Noting) as (reader, writer):
            for body in (b"first", b"second"):
                whole = request(body)
                came.clear()
                writer.write(whole[:-1])
                await came.wait()
                await pass_time(0.4)
                writer.write(whole[-1:])
                assert (await reader.readuntil(body)).startswith(OK)

    with asyncio.Runner(loop_factory=StoppedClock) as runner:
        runner.run(talk())
