"""Clients' connections, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from outloop.router.connections import ClientConnection
from outloop.router.web import Exchange


@asynccontextmanager
async def serving(app) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to `app`."""
    config = uvicorn.Config(app, http=ClientConnection, lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    state = uvicorn.server.ServerState()
    listening = await loop.create_server(
        lambda: ClientConnection(config, state, {}), "127.0.0.1", 0
    )
    try:
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        yield reader, writer
        writer.close()
    finally:
        listening.close()
        await asyncio.gather(*state.tasks)


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
