"""The torch server's HTTP routes: the part of SGLang 0.5.23's that the loop uses.

Routes that change the engine answer after the change.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from outloop.engine.machine.gpu_libraries import own_libraries
from outloop.engine.publish.flattened_bucket import PayloadRefused, read_bucket
from outloop.engine.publish.process_group import in_thread
from outloop.engine.serve.torch_server.constrained_decoding import Grammars
from outloop.engine.serve.torch_server.generate import GenerateEndpoint
from outloop.engine.serve.torch_server.scheduler import Engine
from outloop.engine.serve.torch_server.schemas import (
    MEMORY_TAGS,
    AbortBody,
    CheckBody,
    FromDiskBody,
    FromGroupBody,
    FromTensorBody,
    JoinGroupBody,
    LeaveGroupBody,
    MemoryBody,
    MemoryTag,
    PauseBody,
    VersionBody,
)
from outloop.engine.serve.torch_server.weight_update import UpdateRefused
from outloop.engine.serve.torch_server.weight_update_groups import UpdateGroups
from outloop.engine.serve.torch_server.weights import WeightsRefused

PURPOSE = "outloop's torch server: for laptops and tests. Use SGLang to serve at speed."
_CALL_TIMEOUT_S = 60.0
_T = TypeVar("_T")


class ServerApp:
    """ASGI application of one engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        model_path: str,
        key: str | None = None,
        make_grammars: Callable[[Path, int], Grammars] = Grammars,
    ) -> None:
        """`key`: what every request but for its health must bring as a bearer token;
        `make_grammars`: of the model folder and the size of the vocabulary."""
        self._authorization = f"Bearer {key}".encode() if key else None
        self._engine = engine
        self._model_path = model_path
        self._groups = UpdateGroups(engine.update.live.device)
        self._start_version = engine.weight_version
        grammars = make_grammars(engine.text.folder, engine.update.live.config.vocab_size)
        self._generate = GenerateEndpoint(engine, grammars)
        self._control = FastAPI(
            title="outloop torch server", description=PURPOSE, redirect_slashes=False
        )
        self._add_generation_routes()
        self._add_memory_routes()
        self._add_update_routes()
        self._add_group_routes()
        self._add_version_routes()
        self._add_info_routes()
        self._control.add_exception_handler(RequestValidationError, _on_invalid)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route /generate past FastAPI, which would cost more than the turn's own work."""
        if scope["type"] == "http" and not self._is_allowed(scope):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        is_generate = scope["type"] == "http" and scope["path"] == "/generate"
        target: ASGIApp = self._control
        if is_generate and scope["method"] in ("POST", "PUT"):
            target = self._generate
        await target(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if self._authorization is None or scope["path"] == "/health":
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._authorization)

    async def _in_engine(self, function: Callable[[], _T]) -> _T:
        """Run `function` between two passes.

        Raises:
            TimeoutError: the engine did not run it in time.
        """
        future = asyncio.wrap_future(self._engine.call(function))
        return await asyncio.wait_for(future, _CALL_TIMEOUT_S)

    async def _update(self, function: Callable[[], str]) -> Response:
        """Answer `success` and a message, 400 if the update was refused."""
        return await _answer(self._in_engine(function))

    def _stage(self, body: FromTensorBody) -> None:
        """Write a payload's tensors to the staged weights; in the engine's thread."""
        payloads = body.serialized_named_tensors
        if body.load_format != "flattened_bucket" or len(payloads) != 1:
            raise PayloadRefused(
                f"load_format={body.load_format!r} with {len(payloads)} payloads; the torch server "
                'takes one payload with load_format "flattened_bucket"'
            )
        self._engine.update.write(read_bucket(payloads[0]))

    def _add_generation_routes(self) -> None:
        app, engine = self._control, self._engine

        @app.post("/abort_request")
        async def abort_request(body: AbortBody) -> Response:
            self._generate.abort(body.rid)
            return Response(status_code=200)

        @app.post("/pause_generation")
        async def pause_generation(body: PauseBody) -> dict[str, str]:
            await self._in_engine(lambda: engine.pause(body.mode))
            return {"message": f"Generation paused, mode={body.mode}.", "status": "ok"}

        @app.post("/continue_generation")
        async def continue_generation() -> Response:
            try:
                await self._in_engine(engine.resume)
            except UpdateRefused as error:
                return _outcome(str(error), is_good=False)
            return JSONResponse({"message": "Generation continued.", "status": "ok"})

        @app.post("/flush_cache")
        async def flush_cache() -> Response:
            if await self._in_engine(engine.flush):
                return PlainTextResponse("Cache flushed.")
            return PlainTextResponse("Flush cache failed.", 400)

    def _add_memory_routes(self) -> None:
        app, engine = self._control, self._engine

        async def change(function: Callable[[list[MemoryTag]], None], body: MemoryBody) -> Response:
            tags = body.tags or list(MEMORY_TAGS)
            try:
                await self._in_engine(lambda: function(tags))
            except UpdateRefused as error:
                return _outcome(str(error), is_good=False)
            return JSONResponse(None)

        @app.post("/release_memory_occupation")
        async def release_memory_occupation(body: MemoryBody) -> Response:
            return await change(engine.release_memory, body)

        @app.post("/resume_memory_occupation")
        async def resume_memory_occupation(body: MemoryBody) -> Response:
            return await change(engine.resume_memory, body)

    def _add_update_routes(self) -> None:
        app, engine = self._control, self._engine

        @app.post("/begin_weight_update")
        async def begin_weight_update() -> Response:
            def begin() -> str:
                engine.update.begin()
                return "Weight update begun."

            return await self._update(begin)

        @app.post("/update_weights_from_tensor")
        async def update_weights_from_tensor(body: FromTensorBody) -> Response:
            def write() -> str:
                self._stage(body)
                return "Tensors staged."

            return await self._update(write)

        @app.post("/end_weight_update")
        async def end_weight_update() -> Response:
            def end() -> str:
                engine.update.end()
                engine.weights_changed()
                return "Weight update ended."

            return await self._update(end)

    def _add_group_routes(self) -> None:
        app, engine, groups = self._control, self._engine, self._groups

        @app.post("/init_weights_update_group")
        async def init_weights_update_group(body: JoinGroupBody) -> Response:
            def join() -> str:
                groups.join(
                    body.master_address,
                    body.master_port,
                    rank=body.rank_offset,
                    world_size=body.world_size,
                    name=body.group_name,
                    backend=body.backend,
                )
                return "Group joined."

            return await _answer(asyncio.wrap_future(in_thread(join)))

        @app.post("/destroy_weights_update_group")
        async def destroy_weights_update_group(body: LeaveGroupBody) -> Response:
            def leave() -> str:
                groups.leave(body.group_name)
                return "Group left."

            return await _answer(asyncio.wrap_future(in_thread(leave)))

        @app.post("/update_weights_from_distributed")
        async def update_weights_from_distributed(body: FromGroupBody) -> Response:
            async def update() -> str:
                await self._in_engine(engine.update.require_open)
                receive = in_thread(lambda: groups.receive(body))
                named_tensors = await asyncio.wrap_future(receive)
                await self._in_engine(lambda: engine.update.write(named_tensors))
                return "Tensors staged."

            return await _answer(update())

    def _add_version_routes(self) -> None:
        app, engine = self._control, self._engine

        @app.post("/update_weights_from_disk")
        async def update_weights_from_disk(body: FromDiskBody) -> Response:
            def load() -> str:
                engine.update.load(Path(body.model_path))
                engine.weights_changed()
                return "Weights loaded."

            return await self._update(load)

        @app.post("/update_weight_version")
        async def update_weight_version(body: VersionBody) -> dict[str, Any]:
            await self._in_engine(lambda: engine.set_version(body.new_version))
            return {"success": True, "message": "Version set.", "new_version": body.new_version}

        def scramble() -> None:
            engine.update.scramble()
            engine.weights_changed()

        @app.post("/weights_checker")
        async def weights_checker(body: CheckBody) -> Response:
            if body.action == "reset_tensors":

                def reset() -> str:
                    scramble()
                    return "Weights are random."

                return await self._update(reset)
            if body.action != "checksum":
                return _outcome(
                    f"action={body.action!r}; the torch server knows: checksum, reset_tensors",
                    is_good=False,
                )
            try:
                sums = await self._in_engine(lambda: engine.update.checksums(body.algorithm))
            except UpdateRefused as error:
                return _outcome(str(error), is_good=False)
            ranks = [{"tp_rank": 0, "pp_rank": 0, "checksums": sums}]
            return JSONResponse({"success": True, "message": "", "ranks": ranks})

    def _add_info_routes(self) -> None:
        app, engine = self._control, self._engine
        config = engine.update.live.config

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if engine.is_alive else 503)

        @app.get("/model_info")
        async def model_info() -> dict[str, Any]:
            return {
                "model_path": self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "weight_version": engine.weight_version,
                "architectures": [config.architecture],
            }

        @app.get("/server_info")
        async def server_info() -> dict[str, Any]:
            return {
                "kind": "torch",
                "purpose": PURPOSE,
                "model_path": self._model_path,
                "weight_version": self._start_version,
                "dtype": str(engine.update.live.dtype).removeprefix("torch."),
                "device": str(engine.update.live.device),
                "context_length": engine.max_tokens,
                "max_running_requests": engine.cache.max_running,
                "vocab_size": config.vocab_size,
                "libraries": msgspec.to_builtins(own_libraries()),
            }

        @app.get("/v1/loads")
        async def loads() -> dict[str, Any]:
            load = {
                "num_running_reqs": engine.num_running,
                "num_waiting_reqs": engine.num_waiting,
                "num_used_tokens": int(engine.cache.length.sum()),
                "num_sampled_tokens": engine.num_sampled,
            }
            return {"loads": [load]}


async def _answer(done: Awaitable[str]) -> Response:
    """Answer `success` and a message, 400 if the update was refused."""
    try:
        return _outcome(await done)
    except (UpdateRefused, WeightsRefused, PayloadRefused) as error:
        return _outcome(str(error), is_good=False)


def _outcome(message: str, *, is_good: bool = True) -> Response:
    body = {"success": is_good, "message": message}
    return JSONResponse(body, status_code=200 if is_good else 400)


async def _on_invalid(request: Request, error: Exception) -> Response:
    """SGLang answers 400 where FastAPI's own choice is 422."""
    assert isinstance(error, RequestValidationError)
    message = "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    )
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "code": 400}}, 400
    )
