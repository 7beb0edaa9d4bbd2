"""What `make bench-router` puts behind the routers, and the bare relay: cheap programs.

    python tests/bench/router_mock.py serve PORT[,PORT...] [SECONDS] | relay PORT MOCK_PORT

`serve` answers `/generate` (SGLang's form, with logprobs) and `/v1/chat/completions` a fixed time
after the request, whatever the load. What it generates repeats the end of the prompt, so that an
answer that reaches another episode than its own is seen. `relay` is the floor: raw ASGI and one
shared aiohttp session, bytes in and bytes out.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import aiohttp
import msgspec
import uvicorn
import uvloop

LATENCY_S = 0.002
NUM_GENERATED = 32
NUM_ECHOED = 12
"""Ids before the generation prompt that the answer says back."""
FILLER_ID = 66
STREAM_CHUNK = 4
"""Ids for each event of a stream."""
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


class Parameters(msgspec.Struct):
    """What the mock reads of `sampling_params`."""

    max_new_tokens: int
    stop_token_ids: list[int]


class Generate(msgspec.Struct):
    """What the mock reads of a body of `/generate`."""

    input_ids: list[int]
    sampling_params: Parameters
    stream: bool = False


_decode = msgspec.json.Decoder(Generate).decode
_encode = msgspec.json.encode


def generated(request: Generate) -> list[int]:
    """Filler, the end of the last message and a stop id: as many ids as asked for."""
    stop = request.sampling_params.stop_token_ids[0]
    ids = request.input_ids
    end = max((i for i, token in enumerate(ids) if token == stop), default=len(ids))
    echoed = ids[max(0, end - NUM_ECHOED) : end]
    number = request.sampling_params.max_new_tokens
    return [FILLER_ID] * (number - len(echoed) - 1) + echoed + [stop]


def piece(ids: list[int], start: int, end: int) -> bytes:
    """Ids [start, end) as an answer or an event of increments."""
    finish = {"type": "stop", "matched": ids[-1]} if end == len(ids) else None
    return _encode(
        {
            "text": "",
            "output_ids": ids[start:end],
            "meta_info": {
                "id": "x",
                "finish_reason": finish,
                "completion_tokens": end,
                "weight_version": "0",
                "weight_versions": [{"version": "0", "start": 0, "end": end}],
                "output_token_logprobs": [(-0.693147, token, None) for token in ids[start:end]],
            },
        }
    )


TEXT = "The capital of the country that you have asked about is a city by a river. " * 2
CHAT = _encode(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 32, "total_tokens": 1032},
    }
)


def chat_events() -> list[bytes]:
    """As many events as a stream of `/generate` has."""

    def event(delta: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0}
        return b"data: " + _encode({**head, "model": "policy", "choices": [choice]}) + b"\n\n"

    number = NUM_GENERATED // STREAM_CHUNK
    size = len(TEXT) // number
    events = [
        event({"role": "assistant", "content": TEXT[i * size : (i + 1) * size]}, None)
        for i in range(number)
    ]
    return [*events, event({}, "stop"), b"data: [DONE]\n\n"]


class Mock(asyncio.Protocol):
    """One connection; answers in order."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.transport: Any = None
        self.buffer = b""
        self.loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        while True:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end]
            found = _LENGTH.search(head)
            size = int(found.group(1)) if found else 0
            if len(self.buffer) < end + 4 + size:
                return
            body = self.buffer[end + 4 : end + 4 + size]
            self.buffer = self.buffer[end + 4 + size :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        """Answer one request after the fixed time."""
        if head.startswith(b"POST /generate"):
            request = _decode(body)
            ids = generated(request)
            if request.stream:
                step = STREAM_CHUNK
                starts = range(0, len(ids), step)
                events = [
                    b"data: " + piece(ids, s, min(s + step, len(ids))) + b"\n\n" for s in starts
                ]
                self.loop.call_later(self.latency_s, self.stream, [*events, b"data: [DONE]\n\n"])
            else:
                self.loop.call_later(self.latency_s, self.send, piece(ids, 0, len(ids)))
        elif head.startswith(b"POST /v1/chat/completions"):
            if b'"stream":true' in body or b'"stream": true' in body:
                self.loop.call_later(self.latency_s, self.stream, chat_events())
            else:
                self.loop.call_later(self.latency_s, self.send, CHAT)
        else:
            self.send(b'{"model_path": "policy", "status": "ok", "data": []}')

    def send(self, body: bytes) -> None:
        """A plain answer."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
        self.transport.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)

    def stream(self, events: list[bytes]) -> None:
        """Events, one write each, a turn of the loop apart."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
        self.transport.write(head + b"\r\n\r\n")
        self.next_event(events, 0)

    def next_event(self, events: list[bytes], index: int) -> None:
        """The event, then the next one."""
        if self.transport.is_closing():
            return
        if index == len(events):
            self.transport.write(b"0\r\n\r\n")
            return
        event = events[index]
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.loop.call_soon(self.next_event, events, index + 1)


async def serve(ports: Sequence[int], latency_s: float) -> None:
    """Run a mock on each port until killed."""
    loop, make = asyncio.get_running_loop(), partial(Mock, latency_s)
    for port in ports:
        await loop.create_server(make, "127.0.0.1", port, backlog=4096)
    await loop.create_future()


class Relay:
    """A body in, one request, its answer out."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self.session is None:
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {"content-type": "application/json"}
        async with self.session.post(
            self.target + scope["path"], data=body, headers=headers
        ) as answer:
            kind = answer.headers["content-type"].encode()
            start = {"type": "http.response.start", "status": answer.status}
            await send({**start, "headers": [(b"content-type", kind)]})
            if kind.startswith(b"text/event-stream"):
                async for part in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            else:
                body = await answer.read()
                await send({"type": "http.response.body", "body": body})


def serve_relay(app: Any, port: int) -> None:
    """Run an ASGI app as the relay is run, until killed."""
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        log_level="warning",
        http="httptools",
        access_log=False,
    )


def main() -> None:
    """Run one of the two until killed."""
    uvloop.install()
    kind, ports = sys.argv[1], [int(port) for port in sys.argv[2].split(",")]
    if kind == "serve":
        asyncio.run(serve(ports, float(sys.argv[3]) if len(sys.argv) > 3 else LATENCY_S))
    else:
        serve_relay(Relay(f"http://127.0.0.1:{sys.argv[3]}"), ports[0])


if __name__ == "__main__":
    main()
