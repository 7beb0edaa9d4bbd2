"""A program in SGLang's place: its command line, its routes, and its end where SGLang asserts.

    python -m fakes.sglang_stand_in -P ENTRYPOINT [--check] TABLE

What samples is outloop's torch server, in one process that holds the model once. A server of
`tp_size` N takes N payloads of a bucket, one for each of its ranks, which must agree to the byte.
Where SGLang 0.5.23 asserts, in its memory calls and between them, this ends as SGLang does. It has
no checksums of SGLang's parameters: publish.verify must be "probe".
"""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import uvicorn

from outloop.buffer.settings import build_settings
from outloop.engine.publish.flattened_bucket import read_bucket
from outloop.engine.serve.torch_server.app import ServerApp
from outloop.engine.serve.torch_server.generate import Progress
from outloop.engine.serve.torch_server.process import build_engine
from outloop.engine.serve.torch_server.scheduler import Engine

ASSERTED = ("/release_memory_occupation", "/resume_memory_occupation", "/continue_generation")
"""Calls that SGLang does not refuse: it ends, or uses memory that is not there."""


class StandIn:
    """ASGI application of one server."""

    def __init__(self, app: ServerApp, engine: Engine, *, num_ranks: int) -> None:
        self._app = app
        self._engine = engine
        self._num_ranks = num_ranks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Take payloads itself; pass on everything else."""
        path = scope.get("path", "")
        if path == "/update_weights_from_tensor":
            await self._take(receive, send)
            return

        async def watch(message: Any) -> None:
            if message.get("status", 200) >= 400 and path in ASSERTED:
                sys.stderr.write(f"{path}: an assertion of SGLang\n")
                os._exit(1)
            await send(message)

        await self._app(scope, receive, watch)

    async def _take(self, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        payloads = json.loads(body)["serialized_named_tensors"]
        answer: dict[str, Any] = {"success": True, "message": "Success"}
        try:
            await asyncio.wrap_future(self._engine.call(lambda: self._write(payloads)))
        except (AssertionError, ValueError) as error:
            answer = {"success": False, "message": str(error)}
        content = json.dumps(answer).encode()
        start = {"type": "http.response.start", "status": 200, "headers": []}
        start["headers"] = [(b"content-type", b"application/json")]
        await send(start)
        await send({"type": "http.response.body", "body": content})

    def _write(self, payloads: list[str]) -> None:
        """Every rank reads its own payload, and all of them the same."""
        assert len(payloads) == self._num_ranks, f"{len(payloads)} payloads"
        ranks = [read_bucket(payload) for payload in payloads]
        for other in ranks[1:]:
            for (name, tensor), (other_name, other_tensor) in zip(ranks[0], other, strict=True):
                assert name == other_name
                assert torch.equal(tensor, other_tensor), f"ranks were given different {name}"
        self._engine.update.write(ranks[0])


async def serve(table: dict[str, Any], key: str) -> None:
    """Until the process is ended."""
    settings = build_settings(
        {
            "model": {"path": table["model_path"], "max_context_tokens": table["context_length"]},
            "server": {"max_running_requests": table["max_running_requests"]},
        },
        source="the table",
    )
    engine = build_engine(settings, notify=Progress(asyncio.get_running_loop()))
    engine.set_version(table["weight_version"])
    app = ServerApp(engine, model_path=str(Path(table["model_path"])), key=key or None)
    engine.start()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((table["host"], table["port"]))
    listener.listen(512)
    config = uvicorn.Config(
        StandIn(app, engine, num_ranks=table["tp_size"]),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def main(arguments: list[str]) -> None:
    """As SGLang's entry point is called."""
    if "--check" in arguments:
        return
    torch.set_num_threads(1)
    asyncio.run(serve(json.loads(arguments[-1]), sys.stdin.readline().strip()))


if __name__ == "__main__":
    main(sys.argv[1:])
