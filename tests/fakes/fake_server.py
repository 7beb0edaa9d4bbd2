"""A program that speaks a server's `/generate` and answers from a script."""

import asyncio
import base64
import json
import socket
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import uvicorn

from outloop.router.http.protocol import ClientConnection


@dataclass
class Script:
    """What one call generates; `fail` is an HTTP status, or "drop" to cut the connection."""

    ids: list[int]
    finish: dict = field(default_factory=lambda: {"type": "stop", "matched": None})
    fail: int | str | None = None
    drop_after: int | None = None
    """Streamed: cut the connection after this many ids."""
    logprobs: list[float] | None = None
    spans: list[dict] | None = None
    supports: list[list[int]] | None = None
    """Among which ids each is sampled, for those who ask."""
    num_routes_lost: int = 0
    """Rows of routed_experts that are missing."""


def routes_of(ids: list[int]) -> np.ndarray:
    """[len(ids), 2, 2]: the experts of a model of 8 that the fake sends tokens to, by their ids."""
    token = np.asarray(ids, np.int32)
    return np.stack([token % 8, token // 8 % 8, token // 64 % 8, token // 512 % 8], 1).reshape(
        -1, 2, 2
    )


class FakeServer:
    """Records every request; `answer` maps a request body to what is generated."""

    def __init__(self, answer: Callable[[dict], Script]) -> None:
        self.answer = answer
        self.requests: list[dict] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.aborted: list[str] = []
        self.version = "0"
        self.latency_s = 0.0
        self.chunk = 1
        self.is_cumulative = True
        self.has_experts = False
        """Whether it gives routed_experts to those who ask for them."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.step_gate: asyncio.Event | None = None
        self.num_rounds = 1
        """Rounds of the event loop between two pieces: with enough of them each is read alone."""
        self.url = ""

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/abort_request":
            self.aborted.append(json.loads(body)["rid"])
            await self.answer_whole(send, 200, b"")
            return
        assert scope["path"] == "/generate", scope["path"]
        request = json.loads(body)
        self.requests.append(request)
        self.headers.append(dict(scope["headers"]))
        await self.gate.wait()
        await asyncio.sleep(self.latency_s)
        script = self.answer(request)
        if script.fail == "drop":
            raise _Drop
        if script.fail is not None:
            await self.answer_whole(send, script.fail, b'{"error": {"message": "scripted"}}')
            return
        if request["stream"]:
            await self._stream(send, script)
        else:
            piece = self._piece(script, 0, len(script.ids), last=True)
            await self.answer_whole(send, 200, json.dumps(piece).encode())

    def _piece(self, script: Script, start: int, end: int, *, last: bool) -> dict:
        logprobs = script.logprobs or [-0.125 * (1 + i % 7) for i in range(len(script.ids))]
        num_top = self.requests[-1].get("top_logprobs_num", 0)
        spans = script.spans or [{"version": self.version, "start": 0, "end": end}]
        return {
            "text": "not to be relied on",
            "output_ids": script.ids[start:end],
            "meta_info": {
                **(self._routes(script) if last else {}),
                **self._supports(script, start, end),
                "id": "x",
                "finish_reason": script.finish if last else None,
                "completion_tokens": end,
                "weight_version": spans[-1]["version"],
                "weight_versions": spans,
                "output_top_logprobs": [
                    [[p - rank, i + rank, None] for rank in range(num_top)]
                    for p, i in zip(logprobs[start:end], script.ids[start:end], strict=True)
                ]
                if num_top
                else None,
                "output_token_logprobs": [
                    [p, i, None]
                    for p, i in zip(logprobs[start:end], script.ids[start:end], strict=True)
                ],
            },
        }

    def _supports(self, script: Script, start: int, end: int) -> dict:
        if script.supports is None or not self.requests[-1].get("return_sampling_mask"):
            return {}
        left = script.supports[start:end]
        return {
            "output_token_sampling_mask": left,
            "output_token_sampling_logprobs": [-0.5 * len(ids) for ids in left],
        }

    def _routes(self, script: Script) -> dict:
        request = self.requests[-1]
        if not (self.has_experts and request.get("return_routed_experts")):
            return {}
        ids = [*request["input_ids"], *script.ids]
        computed = ids[request["routed_experts_start_len"] : -1]
        rows = routes_of(computed[script.num_routes_lost :])
        return {"routed_experts": base64.b64encode(rows.tobytes()).decode()}

    async def _stream(self, send, script: Script) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        total = len(script.ids)
        for start in range(0, total, self.chunk):
            if self.step_gate is not None and start:
                await self.step_gate.wait()
            end = min(start + self.chunk, total)
            if script.drop_after is not None and end > script.drop_after:
                raise _Drop
            piece = self._piece(script, 0 if self.is_cumulative else start, end, last=end == total)
            data = b"data: " + json.dumps(piece).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
            for _ in range(self.num_rounds):
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def answer_whole(self, send, status: int, body: bytes) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Drop(Exception):
    """Makes uvicorn close the connection; before the answer began it answers 500."""


@asynccontextmanager
async def serving(app, connection=ClientConnection):
    """Serve an ASGI app on a free port of this event loop; yields its URL."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    lifespan = "off" if isinstance(app, FakeServer) else "on"
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools" if isinstance(app, FakeServer) else connection,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.close()
        for inner in server.servers:
            inner.close()
        await server.lifespan.shutdown()
        listener.close()
