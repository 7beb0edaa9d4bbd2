"""POST /generate as a thin ASGI endpoint.

Every accepted request is answered, or aborted when its client has left; an answer's ids, logprobs
and spans are of one moment.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
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
            self._loop.call_soon_threadsafe(_tell, requests)


def _tell(requests: list[Running]) -> None:
    for request in requests:
        request.on_progress(request)


class GenerateEndpoint:
    """ASGI endpoint of /generate."""

    def __init__(self, engine: Engine, *, is_incremental: bool) -> None:
        self._engine = engine
        self._is_incremental = is_incremental
        self._grammars = Grammars(engine.text.folder, engine.update.live.config.vocab_size)
        self._in_flight: dict[str, list[Running]] = {}
        """By the rid that the client knows."""

    def abort(self, rid: str) -> None:
        """End every sequence of the request named `rid`; an unknown one is nothing to end."""
        running = self._in_flight.get(rid)
        if running:
            self._engine.abort({request.rid for request in running})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await _read_body(receive)
        if body is None:
            return
        rid = ""
        try:
            wire = decode_request(body)
            rid = wire.rid or secrets.token_hex(16)
            if rid in self._in_flight:
                raise BadRequest(f"rid={rid!r} is in flight already; use a fresh one")
            prompts = self._prompts(wire)
            if wire.stream and len(prompts) * wire.sampling_params.n > 1:
                raise BadRequest("stream=true with several sequences is not supported; send one")
            self._engine.text.check_stops(wire.sampling_params.stops)
            updates: asyncio.Queue[int] = asyncio.Queue()
            running = self._running(wire, rid, prompts, updates)
        except BadRequest as error:
            await _send_json(send, 400, error_body(str(error)))
            return
        if not self._engine.is_alive:
            await _send_json(send, 503, error_body("the engine has ended", "unavailable"))
            return
        self._in_flight[rid] = running
        watcher = asyncio.ensure_future(receive())
        watcher.add_done_callback(functools.partial(self._on_message, rid))
        try:
            self._engine.submit(running)
            if wire.stream:
                await self._stream(wire, running[0], updates, send)
            else:
                await self._answer(wire, running, updates, send)
        finally:
            watcher.cancel()
            del self._in_flight[rid]
            unfinished = {request.rid for request in running if request.finish is None}
            if unfinished:
                self._engine.abort(unfinished)

    def _on_message(self, rid: str, watcher: asyncio.Future[Message]) -> None:
        has_message = not watcher.cancelled() and watcher.exception() is None
        if has_message and watcher.result()["type"] == "http.disconnect":
            self.abort(rid)

    def _prompts(self, wire: GenerateRequest) -> list[list[int]]:
        """Prompts as ids, checked."""
        if wire.text is not None:
            texts = [wire.text] if isinstance(wire.text, str) else wire.text
            prompts = [self._engine.text.encode(text) for text in texts]
        else:
            given: Any = wire.input_ids
            prompts = given if _is_batch(wire) else [given]
            if len({type(item) for item in given}) > 1:
                raise BadRequest("input_ids mixes ids and lists; send ids, or lists of ids")
        for prompt in prompts:
            check_lengths(prompt, wire.sampling_params.max_new_tokens, self._engine)
        return prompts

    def _running(
        self,
        wire: GenerateRequest,
        rid: str,
        prompts: list[list[int]],
        updates: asyncio.Queue[int],
    ) -> list[Running]:
        params = wire.sampling_params
        stop_ids: frozenset[int] = frozenset()
        if not params.ignore_eos:
            config = self._engine.update.live.config
            stop_ids = config.eos_token_ids.union(params.stop_token_ids or ())

        def on_progress(request: Running) -> None:
            updates.put_nowait(len(request.output_ids))

        num = len(prompts) * params.n
        found = []
        for index in range(num):
            seed = params.sampling_seed
            # The choices of one prompt must differ, and repeat when the request does.
            own_seed = None if seed is None else seed + (index % params.n) * 0x632BE59BD9B4E019
            found.append(
                Running(
                    rid=rid if num == 1 else f"{rid}_{index}",
                    prompt_ids=prompts[index // params.n],
                    params=params,
                    stop_ids=stop_ids,
                    stops=params.stops,
                    extra_key=wire.extra_key,
                    is_streamed=wire.stream,
                    on_progress=on_progress,
                    seed=own_seed,
                    num_top=wire.top_logprobs_num if wire.return_logprob else 0,
                    constraint=self._grammars.build(params, stop_ids),
                )
            )
        return found

    async def _answer(
        self,
        wire: GenerateRequest,
        running: list[Running],
        updates: asyncio.Queue[int],
        send: Send,
    ) -> None:
        for _ in running:
            await updates.get()
        failed = next((status for r in running if (status := _status(r)) != 200), 200)
        if failed != 200:
            reason = next(r.finish for r in running if _status(r) != 200)
            assert reason is not None
            await _send_json(send, failed, error_body(reason["message"], "engine_error", failed))
            return
        if wire.return_logprob and wire.logprob_start_len == 0:
            await self._score_prompts(running)
        answers = [self._piece(wire, request, 0, len(request.output_ids)) for request in running]
        is_list = len(running) > 1 or _is_batch(wire)
        await _send_json(send, 200, _encode(answers if is_list else answers[0]))

    async def _score_prompts(self, running: list[Running]) -> None:
        """Enter the prompts' own logprobs; between two passes, under the weights of then."""
        engine = self._engine

        def score(request: Running) -> list[float]:
            return prompt_logprobs(engine.update.live, request.prompt_ids)

        for request in running:
            future = engine.call(functools.partial(score, request))
            request.prompt_logprobs = await asyncio.wrap_future(future)

    async def _stream(
        self, wire: GenerateRequest, request: Running, updates: asyncio.Queue[int], send: Send
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        num_sent, is_over = 0, False
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
                start = num_sent if self._is_incremental else 0
                data = _encode(self._piece(wire, request, start, num_sampled))
            num_sent = num_sampled
            await send(
                {
                    "type": "http.response.body",
                    "body": b"data: " + data + b"\n\n",
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _piece(
        self, wire: GenerateRequest, request: Running, start: int, end: int
    ) -> dict[str, Any]:
        """Output tokens [start, end) of a request in SGLang's shape; counts are of all so far."""
        ids = request.output_ids[:end]
        finish = request.finish if end == len(request.output_ids) else None
        text = self._engine.text
        matched = finish.get("matched") if finish else None
        piece_text = text.answer(ids, request.params, matched)
        if start:
            piece_text = piece_text[len(text.answer(ids[:start], request.params, None)) :]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": end,
            "cached_tokens": request.num_cached,
            "cached_tokens_details": None,
            "reasoning_tokens": 0,
            "weight_version": request.final_version or self._engine.weight_version,
            "weight_versions": list(_spans(request, end)),
            "num_retractions": request.num_retractions,
            "dp_rank": None,
        }
        if finish is not None:
            meta["e2e_latency"] = time.monotonic() - request.arrived_at
            meta["queue_time"] = (request.first_run_at or time.monotonic()) - request.arrived_at
        if wire.return_logprob:
            is_scored = wire.logprob_start_len == 0
            meta["input_token_logprobs"] = (
                [
                    (logprob, token, self._token_text(wire, token))
                    for logprob, token in zip(
                        [None, *request.prompt_logprobs], request.prompt_ids, strict=True
                    )
                ]
                if is_scored
                else []
            )
            meta["output_token_logprobs"] = [
                (logprob, token, self._token_text(wire, token))
                for logprob, token in zip(request.logprobs[start:end], ids[start:end], strict=True)
            ]
            meta["output_token_logprobs_length"] = end
            if wire.top_logprobs_num:
                meta["output_top_logprobs"] = [
                    [(logprob, token, self._token_text(wire, token)) for logprob, token in top]
                    for top in request.tops[start:end]
                ]
        return {"text": piece_text, "output_ids": ids[start:], "meta_info": meta}

    def _token_text(self, wire: GenerateRequest, token: int) -> str | None:
        if not wire.return_text_in_logprobs:
            return None
        return self._engine.text.decode([token], skip_special=False)


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


def _is_batch(wire: GenerateRequest) -> bool:
    ids: Any = wire.input_ids
    return isinstance(wire.text, list) or bool(ids and isinstance(ids[0], list))


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
