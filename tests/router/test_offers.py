"""Requests that offer another protocol are served in HTTP/1.1, and nothing of them is lost."""

import asyncio
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from fakes.live_router import accepting
from outloop.router.http.protocol import ClientConnection

BODY = b'{"said":"%s"}' % (b"x" * 300)
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
OFFERS = {
    "h2c": ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
    "capitals": ("CONNECTION: UPGRADE", "UPGRADE: H2C"),
    "websocket": ("Connection: keep-alive, Upgrade", "Upgrade: websocket"),
    "several": ("Upgrade: h2c, TLS/1.0", "Upgrade: websocket", "connection: upgrade"),
    "tls": ("upgrade:TLS/1.0", "connection:upgrade"),
    "empty": ("Upgrade:", "Connection: upgrade"),
    "not named by connection": ("Upgrade: h2c",),
}


def offer(lines: tuple[str, ...], is_chunked: bool) -> bytes:
    """A POST with these lines and BODY."""
    length = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(BODY)}"
    head = "\r\n".join(["POST /first HTTP/1.1", "host: x", *lines, length, "", ""]).encode()
    if not is_chunked:
        return head + BODY
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (BODY[:7], BODY[7:]))
    return head + pieces + b"0\r\n\r\n"


def segments(data: bytes, name: str) -> list[bytes]:
    """The same bytes, cut."""
    if name == "bytes":
        return [data[at : at + 1] for at in range(len(data))]
    end = data.index(b"\r\n\r\n") + 4
    cuts = {
        "whole": [],
        "in the head": [end - 30],
        "after the head": [end],
        "odd": [5, end - 2, end + 9],
    }
    places = [0, *cuts[name], len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


async def served(
    pieces: list[bytes], count: int, connection: Any = ClientConnection
) -> list[tuple[str, str]]:
    """Method with path, and body, of what an app was asked over one connection."""
    asked: list[tuple[str, str]] = []

    async def app(scope, receive, send) -> None:
        body, is_all = b"", False
        while not is_all:
            message = await receive()
            body, is_all = body + message["body"], not message["more_body"]
        asked.append((f"{scope['method']} {scope['path']}", body.decode()))
        head = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    async with accepting(app, 5.0, connection) as (address, _):
        reader, writer = await asyncio.open_connection(*address)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        for _ in range(count):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert head.startswith(b"HTTP/1.1 200 "), head
            assert await reader.readexactly(2) == b"{}"
        writer.close()
    return asked


@pytest.mark.parametrize("cut", ["whole", "in the head", "after the head", "odd", "bytes"])
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("name", OFFERS)
@pytest.mark.parametrize("connection", [ClientConnection, H11Protocol])
async def test_an_offer_is_ignored(connection, name, is_chunked, cut) -> None:
    """The body arrives whole, and the next request of the connection is the next one."""
    data = offer(OFFERS[name], is_chunked) + NEXT + offer(OFFERS[name], is_chunked)
    asked = await served(segments(data, cut), 3, connection)
    first = ("POST /first", BODY.decode())
    assert asked == [first, ("GET /next", ""), first]


async def test_many_offers_in_one_segment_are_ignored() -> None:
    """Each is a request of its own."""
    asked = await served([offer(OFFERS["h2c"], False) * 400], 400)
    assert asked == [("POST /first", BODY.decode())] * 400


async def test_a_body_that_looks_like_a_request_is_a_body() -> None:
    """Nothing is smuggled."""
    hidden = NEXT.replace(b"/next", b"/admin")
    head = "\r\n".join(["POST /a HTTP/1.1", "host: x", *OFFERS["h2c"]])
    data = f"{head}\r\ncontent-length: {len(hidden)}\r\n\r\n".encode() + hidden + NEXT
    assert await served([data], 2) == [("POST /a", hidden.decode()), ("GET /next", "")]


@pytest.mark.parametrize("target", [b"x:443", b"/v1/models"])
async def test_a_tunnel_is_refused(target) -> None:
    """The connection ends, so that nothing behind it is read as a request."""

    async def app(scope, receive, send) -> None:
        raise AssertionError("nothing is served")

    async with accepting(app, 5.0, ClientConnection) as (address, _):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target + NEXT)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 400 ")
        writer.close()


async def run(*command: str, text: str = "") -> list[str]:
    """The lines that a program prints."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(text.encode()), 60)
    assert process.returncode == 0
    return output.decode().splitlines()


def question(size: int) -> str:
    """A body of at least this size."""
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "policy", "messages": messages, "user": "u" * size})


@pytest.mark.parametrize("size", [11, 80_011])
async def test_curl_with_http2_is_served(stage, tmp_path, size) -> None:
    """It offers h2c in its first request; two requests go over one connection."""
    stage.says("yes", "yes")
    episode = await stage.open()
    (tmp_path / "body").write_text(question(size))
    ask = ["--http2", "-sS", "-H", f"Authorization: Bearer {episode['api_key']}"]
    ask += ["-o", str(tmp_path / "answer"), "-w", "%{http_code} %{num_connects}\n"]
    ask += ["-d", f"@{tmp_path / 'body'}", f"{episode['base_url']}/chat/completions"]
    assert await run("curl", *ask, "--next", *ask) == ["200 1", "200 0"]
    assert len(stage.turns(episode)) == 2


@pytest.mark.clients
@pytest.mark.skipif(shutil.which("java") is None, reason="no Java")
async def test_javas_own_client_is_served(stage) -> None:
    """It offers h2c in the first request of each connection."""
    stage.says("yes", "yes", "yes")
    episode = await stage.open()
    program = Path(__file__).parents[1] / "fakes" / "JavaClient.java"
    url = f"{episode['base_url']}/chat/completions"
    bodies = "".join(f"{question(size)}\n" for size in (0, 80_000, 11))
    lines = await run("java", str(program), url, episode["api_key"], text=bodies)
    assert [line.split()[0] for line in lines] == ["200"] * 3
    assert len(stage.turns(episode)) == 3


PACKAGES = ("router", "engine", "src/outloop/view", "envs", "buffer")


def calls_of(name: str) -> list[str]:
    """The arguments of each call of `name` in the sources."""
    root = Path(__file__).parents[2]
    found = []
    for path in (path for package in PACKAGES for path in (root / package).rglob("*.py")):
        for rest in path.read_text().split(f"{name}(")[1:]:
            depths = itertools.accumulate((one == "(") - (one == ")") for one in rest)
            found.append(rest[: next(at for at, depth in enumerate(depths) if depth < 0)])
    return [call for call in found if call != "FastAPI"]


def test_every_port_declines_offers() -> None:
    """The parser is the router's, or h11, which keeps the bodies of such requests."""
    found = [
        (re.search(r"\bhttp=([^,\s]+)", call)[1], 'ws="none"' in call)
        for call in calls_of("uvicorn.Config")
    ]
    assert sorted(found) == [('"h11"', True)] * 3 + [("ClientConnection", True)]


def test_no_port_redirects() -> None:
    """FastAPI's would lead to where the Host header says, with the key."""
    found = [*calls_of(" FastAPI"), *calls_of(" RouterApp")]
    assert len(found) == 4
    assert all("redirect_slashes=False" in call for call in found)
