"""Clients that do not read what they are sent, or slowly: on real sockets and both event loops."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import uvloop

from fakes.fake_server import Script
from fakes.live_router import accepting
from outloop.router.http.endpoint import Exchange
from outloop.router.http.protocol import ClientConnection

Play = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Play:
    """Runs a coroutine on one of the loops that routers have."""

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(work)

    return run


def request(*more: str) -> bytes:
    """A request on the wire."""
    return "\r\n".join(["POST / HTTP/1.1", "host: x", "content-length: 0", *more, "", ""]).encode()


class ImpatientConnection(ClientConnection):
    """One that waits for its reader less long."""

    read_timeout_s = 0.2


class PatientConnection(ClientConnection):
    """One that checks its reader only when a test has it do so."""

    read_timeout_s = 3600.0


def connect(address: tuple[str, int]) -> socket.socket:
    """A connection with little room for what its client does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    client.setblocking(False)
    return client


class Served:
    """One connection to an app."""

    def __init__(self, client: socket.socket, state: uvicorn.server.ServerState) -> None:
        self.client = client
        self._state = state

    async def connection(self) -> ClientConnection:
        """The server's side of it."""
        async with asyncio.timeout(60):
            while not self._state.connections:
                await asyncio.sleep(0.005)
        (found,) = self._state.connections
        return found

    async def over(self) -> None:
        """Nothing is left of it on the server's side."""
        async with asyncio.timeout(60):
            while self._state.connections or self._state.tasks:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    app: Any,
    sent: bytes,
    keep_alive_s: float = 0.2,
    connection: type[ClientConnection] = ImpatientConnection,
) -> AsyncIterator[Served]:
    """A client that has sent something and reads nothing."""
    async with accepting(app, keep_alive_s, connection) as (address, state):
        client = connect(address)
        try:
            await asyncio.get_running_loop().sock_sendall(client, sent)
            yield Served(client, state)
        finally:
            client.close()


@pytest.mark.medium
@pytest.mark.parametrize("more", [(), ("connection: close",)], ids=["kept", "close"])
@pytest.mark.parametrize("size", [20_000_000, 3_000_000])
def test_an_unread_answer_is_not_stored(play: Play, size: int, more: tuple[str, ...]) -> None:
    """However large it is, and whether or not the connection was to be closed after it."""

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        await exchange.answer(200, b"z" * size)

    async def go() -> None:
        async with serving(app, request(*more)) as served:
            await served.connection()
            await served.over()

    play(go())


@pytest.mark.medium
def test_an_unread_remainder_is_not_stored(play: Play) -> None:
    """Of an idle connection, which is closed, less may be left than a transport waits for."""
    seen: list[int] = []
    accepted: list[ClientConnection] = []

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        await exchange.start_events()
        while not accepted:
            await asyncio.sleep(0)
        transport = accepted[0].transport
        while not transport.get_write_buffer_size():
            await exchange.send(b"z" * 1000, more=True)
            await asyncio.sleep(0)
        await exchange.send(b"", more=False)
        seen.append(transport.get_write_buffer_size())

    async def go() -> None:
        async with serving(app, request()) as served:
            accepted.append(await served.connection())
            await served.over()

    play(go())
    assert 0 < seen[0] < 16384


@pytest.mark.medium
def test_who_reads_none_of_a_stream_is_gone(play: Play) -> None:
    """A stream waits for its reader, with little of it in memory, then it is sent."""
    most, is_reported = 0, False
    accepted: list[ClientConnection] = []

    async def app(scope, receive, send) -> None:
        nonlocal most, is_reported
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        await exchange.start_events()
        while not accepted:
            await asyncio.sleep(0)
        while await exchange.send(b"z" * 1000, more=True):
            most = max(most, accepted[0].transport.get_write_buffer_size())
            await asyncio.sleep(0)
        is_reported = True

    async def go() -> None:
        async with serving(app, request()) as served:
            accepted.append(await served.connection())
            await served.over()

    play(go())
    assert is_reported
    assert 0 < most < 200_000


@pytest.mark.medium
def test_who_reads_slowly_is_waited_for(play: Play) -> None:
    """As long as some is read each time that it is looked; then no longer."""
    size, num_read = 30_000_000, 0

    async def app(scope, receive, send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.body()
        await exchange.answer(200, b"z" * size)

    async def go() -> None:
        nonlocal num_read
        loop = asyncio.get_running_loop()
        async with serving(app, request(), 3600.0, PatientConnection) as served:
            connection = await served.connection()
            async with asyncio.timeout(60):
                while not connection.flow.write_paused:
                    await asyncio.sleep(0.005)
            unread = connection.transport.get_write_buffer_size
            for _ in range(3):
                before = unread()
                async with asyncio.timeout(60):
                    while unread() > before - 100_000:
                        num_read += len(await loop.sock_recv(served.client, 65536))
                connection.end_unread()
                assert not connection.transport.is_closing()
            connection.end_unread()
            await served.over()

    play(go())
    assert num_read < size


class NarrowConnection(ImpatientConnection):
    """One whose system takes little that its client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)


@pytest.mark.slow
async def test_a_turn_whose_reader_stalls_is_there_for_its_retry(make_stage: Callable) -> None:
    """Its stream ends, its turn is recorded, and the same request gets it whole."""
    stage = await make_stage(connection=NarrowConnection, sampling={"max_new_tokens": 2000})
    stop = stage.renderer.stop_ids[0]
    ids = [*stage.renderer.tokenizer.encode("said " * 150), stop]
    stage.server.answer = lambda request: Script(ids=ids, finish={"type": "stop", "matched": stop})
    episode = await stage.open()
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    wire = json.dumps(body).encode()
    url = stage.http.base_url
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        f"authorization: Bearer {episode['api_key']}",
        f"content-length: {len(wire)}",
    ]
    client = connect((url.host, url.port))
    loop = asyncio.get_running_loop()
    with client:
        await loop.sock_sendall(client, "\r\n".join([*head, "", ""]).encode() + wire)
        async with asyncio.timeout(60):
            while not stage.turns(episode) or stage.app.state.parts.service.num_running:
                await asyncio.sleep(0.01)
        known = stage.app.state.parts.episodes.known(episode["episode_id"])
        ((turn,),) = known.turns.values()
        async with asyncio.timeout(60):
            while turn.has_client:
                await asyncio.sleep(0.01)
    headers = {"authorization": f"Bearer {episode['api_key']}"}
    again = await stage.http.post("/v1/chat/completions", content=wire, headers=headers)
    assert again.text.endswith("data: [DONE]\n\n")
    assert again.text.count("data: ") > 100
    assert len(stage.turns(episode)) == len(stage.server.requests) == 1
