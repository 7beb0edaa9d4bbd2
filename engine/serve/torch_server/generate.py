"""POST /generate as a thin ASGI endpoint.

Every accepted request is answered, or aborted when its client has left; an answer's ids, logprobs
and spans are of one moment.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from outloop.engine.serve.torch_server.constrained_decoding import Grammars
from outloop.engine.serve.torch_server.prompt_logprobs import prompt_logprobs
from outloop.engine.serve.torch_server.requests import (
    GenerateRequest,
    Running,
    decode_request,
)
from outloop.engine.serve.torch_server.sampling import BadRequest
from outloop.engine.serve.torch_server.scheduler import Engine, check_lengths

_encode = msgspec.json.Encoder().encode
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class Progress:
    """Bridges the engine's thread to the event loop, one call per pass."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, requests: list[Running]) -> None:
        """Notify each request's owner, in the event loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_notify, requests)


def _notify(requests: list[Running]) -> None:
    for request in requests:
        request.on_progress(request)


class GenerateEndpoint:
    """ASGI endpoint of /generate."""

    def __init__(self, engine: Engine, grammars: Grammars) -> None:
        self._engine = engine
        self._grammars = grammars
        self._in_flight: set[str] = set()
        """Request ids."""

    def abort(self, rid: str) -> None:
        """End the request named `rid`; an unknown one is ignored."""
        if rid in self._in_flight:
            self._engine.abort({rid})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await _read_body(receive)
        if body is None:
            return
        updates: asyncio.Queue[int] = asyncio.Queue()
        try:
            wire = decode_request(body)
            rid = wire.rid or secrets.token_hex(16)
            if rid in self._in_flight:
                raise BadRequest(f"rid={rid!r} is in flight already; use a fresh one")
            check_lengths(wire.input_ids, wire.sampling_params.max_new_tokens, self._engine)
            self._engine.text.check_stops(wire.sampling_params.stops)
            request = self._running(wire, rid, updates)
        except BadRequest as error:
            await _send_json(send, 400, error_body(str(error)))
            return
        if not self._engine.is_alive:
            await _send_json(send, 503, error_body("the engine has ended", "unavailable"))
            return
        self._in_flight.add(rid)
        watcher = asyncio.ensure_future(receive())
        watcher.add_done_callback(functools.partial(self._on_message, rid))
        try:
            self._engine.submit(request)
            respond = self._stream if wire.stream else self._answer
            await respond(wire, request, updates, send)
        finally:
            watcher.cancel()
            self._in_flight.remove(rid)
            if request.finish is None:
                self._engine.abort({rid})

    def _on_message(self, rid: str, watcher: asyncio.Future[Message]) -> None:
        has_message = not watcher.cancelled() and watcher.exception() is None
        if has_message and watcher.result()["type"] == "http.disconnect":
            self.abort(rid)

    def _running(self, wire: GenerateRequest, rid: str, updates: asyncio.Queue[int]) -> Running:
        params = wire.sampling_params
        stop_ids: frozenset[int] = frozenset()
        if not params.ignore_eos:
            config = self._engine.update.live.config
            stop_ids = config.eos_token_ids.union(params.stop_token_ids or ())

        def on_progress(request: Running) -> None:
            updates.put_nowait(len(request.output_ids))

        return Running(
            rid=rid,
            prompt_ids=wire.input_ids,
            params=params,
            stop_ids=stop_ids,
            extra_key=wire.extra_key,
            is_streamed=wire.stream,
            on_progress=on_progress,
            num_top=wire.top_logprobs_num if wire.return_logprob else 0,
            wants_support=wire.return_sampling_mask,
            constraint=self._grammars.build(params, stop_ids),
            routes_from=self._routes_from(wire),
        )

    def _routes_from(self, wire: GenerateRequest) -> int | None:
        is_mixture = self._engine.update.live.config.routing is not None
        return wire.routed_experts_start_len if wire.return_routed_experts and is_mixture else None

    async def _answer(
        self, wire: GenerateRequest, request: Running, updates: asyncio.Queue[int], send: Send
    ) -> None:
        await updates.get()
        if (status := _status(request)) != 200:
            assert request.finish is not None
            body = error_body(request.finish["message"], "engine_error", status)
            await _send_json(send, status, body)
            return
        if wire.return_logprob and wire.logprob_start_len == 0:
            # Between two passes, under the weights of then.
            engine, ids, num_top = self._engine, request.prompt_ids, wire.top_logprobs_num
            score = engine.call(lambda: prompt_logprobs(engine.update.live, ids, num_top))
            request.prompt_logprobs, request.prompt_tops = await asyncio.wrap_future(score)
        await _send_json(send, 200, _encode(self._so_far(wire, request, len(request.output_ids))))

    async def _stream(
        self, wire: GenerateRequest, request: Running, updates: asyncio.Queue[int], send: Send
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        is_over = False
        while not is_over:
            num_sampled = await updates.get()
            while not updates.empty():
                num_sampled = updates.get_nowait()
            is_over = request.finish is not None
            if is_over:
                num_sampled = len(request.output_ids)
            if _status(request) != 200:
                assert request.finish is not None
                data = error_body(request.finish["message"], "engine_error", _status(request))
            else:
                data = _encode(self._so_far(wire, request, num_sampled))
            await send(
                {
                    "type": "http.response.body",
                    "body": b"data: " + data + b"\n\n",
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _so_far(self, wire: GenerateRequest, request: Running, end: int) -> dict[str, Any]:
        """The first `end` output tokens of a request in SGLang's shape."""
        ids = request.output_ids[:end]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish if end == len(request.output_ids) else None,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": end,
            "cached_tokens": request.num_cached,
            "weight_version": request.final_version or self._engine.weight_version,
            "weight_versions": list(_spans(request, end)),
            "num_retractions": request.num_retractions,
        }
        if request.routed_experts is not None and end == len(request.output_ids):
            meta["routed_experts"] = base64.b64encode(request.routed_experts).decode()
        if wire.return_sampling_mask:
            supports = request.supports[:end]
            meta["output_token_sampling_mask"] = [ids for ids, _ in supports]
            meta["output_token_sampling_logprobs"] = [logprob for _, logprob in supports]
            meta["output_token_sampling_mask_length"] = len(supports)
        if wire.return_logprob:
            # SGLang has the tokens' text in third place.
            scored: list[float | None] = [None, *request.prompt_logprobs]
            meta["input_token_logprobs"] = (
                [
                    (logprob, token, None)
                    for logprob, token in zip(scored, request.prompt_ids, strict=True)
                ]
                if wire.logprob_start_len == 0
                else []
            )
            meta["output_token_logprobs"] = [
                (logprob, token, None)
                for logprob, token in zip(request.logprobs[:end], ids, strict=True)
            ]
            if wire.top_logprobs_num:
                meta["input_top_logprobs"] = (
                    [None, *([(p, token, None) for p, token in top] for top in request.prompt_tops)]
                    if wire.logprob_start_len == 0
                    else []
                )
                meta["output_top_logprobs"] = [
                    [(logprob, token, None) for logprob, token in top] for top in request.tops[:end]
                ]
        return {"output_ids": ids, "meta_info": meta}


def error_body(message: str, kind: str = "invalid_request_error", code: int = 400) -> bytes:
    """SGLang's error envelope."""
    return _encode({"error": {"message": message, "type": kind, "code": code}})


def _spans(request: Running, end: int) -> Iterator[dict[str, Any]]:
    for version, start, stop in tuple(request.spans):
        if start < end:
            yield {"version": version, "start": start, "end": min(stop, end)}


def _status(request: Running) -> int:
    status = (request.finish or {}).get("status_code")
    return 200 if status is None else int(status)


async def _read_body(receive: Receive) -> bytes | None:
    """The request's body, or None if the client left."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
