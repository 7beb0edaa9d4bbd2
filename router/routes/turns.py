"""The dialect routes: from an HTTP request to a turn and back.

Owns: who is speaking, retry keys, delivery, which model name is served. Does not own: wire formats
(dialects), turns (service). Invariant: an episode key reaches its own episode only; an answer is
sent after its turns are recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
from msgspec.structs import replace

from outloop.buffer.settings import Settings
from outloop.router.auth import KeyRing
from outloop.router.dialects import messages_request, messages_response
from outloop.router.dialects.base import AnswerHead, AnswerStream, Dialect, TurnRequest, TurnResult
from outloop.router.episodes.episode import Episodes, LiveEpisode
from outloop.router.episodes.in_flight import InFlightTurn
from outloop.router.errors import Refusal
from outloop.router.http.endpoint import Exchange, Headers
from outloop.router.routes.model_names import ModelTable
from outloop.router.routes.upstreams import Upstreams
from outloop.router.turns.service import TurnService

_LARGE_BODY_BYTES = 64 * 1024
"""One larger body of an episode at a time is read and rendered."""
_DIGEST_CHARS = 32
_COMMENT = b": waiting\n\n"
"""Of server-sent events: every client passes over it."""


class TurnRoutes:
    """Handlers of the dialect routes."""

    def __init__(
        self,
        settings: Settings,
        keys: KeyRing,
        episodes: Episodes,
        service: TurnService,
        models: ModelTable,
        upstreams: Upstreams,
        *,
        stream_silence_s: float,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._episodes = episodes
        self._service = service
        self._models = models
        self._upstreams = upstreams
        self._stream_silence_s = stream_silence_s
        self._max_body_bytes = int(settings.router.max_body_mb * 2**20)

    async def turn(self, dialect: Dialect, exchange: Exchange) -> None:
        """One turn, asked for and answered in `dialect`."""
        episode = await self._authenticate(exchange)
        is_large = _may_be_large(exchange)
        async with episode.large_body if is_large else nullcontext():
            try:
                asked = await self._read(dialect, exchange, episode)
            except Refusal as refusal:
                episode.num_asked += 1
                await self._service.budgets.note(episode, refusal)
                raise
            if asked is None:
                return
            request, retry_key, attempt = asked
            is_retry = episode.is_retry(retry_key, attempt)
            with episode.noting_refusal(retry_key, None if is_retry else attempt):
                turn = await self._service.submit(
                    episode, request, retry_key=retry_key, is_retry=is_retry
                )
            turn.attach(exchange)
            if is_large:
                await turn.planned()
        try:
            with episode.noting_refusal(retry_key, None if is_retry else attempt):
                is_delivered = await self._answer(dialect, exchange, request, turn)
            turn.is_delivered = turn.is_delivered or is_delivered
        finally:
            turn.detach(exchange)
        episode.forget_delivered(turn)

    async def _read(
        self, dialect: Dialect, exchange: Exchange, episode: LiveEpisode
    ) -> tuple[TurnRequest, str, int | None] | None:
        """What is asked for, its retry key and how many attempts it says came before (None: it is
        known by an idempotency key); None: an upstream was asked, and has answered.

        The body ends here: thousands that wait for servers would keep thousands of bodies.
        """
        body = await exchange.body(self._max_body_bytes)
        if self._upstreams and await self._upstreams.forward(exchange, episode, body):
            return None
        request = dialect.decode(body)
        if self._models.is_any_frozen(request.model):
            version = await self._models.frozen_version(episode)
            request = replace(request, policy_version=version, is_any_frozen=True)
        else:
            asked = self._models.version_of(request.model)
            if asked is None:
                asked = self._models.version_of_evaluation(episode)
            request = replace(request, policy_version=asked)
        traceparent = exchange.headers.get(b"traceparent")
        if traceparent is not None:
            state = exchange.headers.get(b"tracestate")
            request = replace(
                request,
                traceparent=traceparent.decode("latin-1"),
                tracestate=state.decode("latin-1") if state is not None else None,
            )
        return request, *_retry(exchange, body)

    async def _answer(
        self, dialect: Dialect, exchange: Exchange, request: TurnRequest, turn: InFlightTurn
    ) -> bool:
        """Send a turn's answer; False if the client had left before its end."""
        if request.stream:
            return await _send_stream(exchange, dialect, request, turn, self._stream_silence_s)
        results = await turn.results()
        return await exchange.answer(200, dialect.encode(results, request), _request_id(turn))

    async def count_tokens(self, exchange: Exchange) -> None:
        """`POST /v1/messages/count_tokens`: the ids of a conversation rendered in full."""
        episode = await self._authenticate(exchange)
        async with episode.large_body if _may_be_large(exchange) else nullcontext():
            request = messages_request.decode_count(await exchange.body(self._max_body_bytes))
            if not self._models.is_any_frozen(request.model):
                self._models.version_of(request.model)
            num_ids = await self._service.count_tokens(episode, request)
        await exchange.answer(200, messages_response.encode_count(num_ids))

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`."""
        await self._authenticate(exchange)
        served = [_model(name) for name in self._models.names()]
        # Anthropic's clients read pages, OpenAI's a list; each ignores the other's fields.
        ends = {"has_more": False, "first_id": served[0]["id"], "last_id": served[-1]["id"]}
        await exchange.answer(200, msgspec.json.encode({"object": "list", "data": served, **ends}))

    async def model(self, exchange: Exchange) -> None:
        """`GET /v1/models/{model_id}`."""
        await self._authenticate(exchange)
        name = exchange.path("model_id")
        self._models.check(name)
        await exchange.answer(200, msgspec.json.encode(_model(name)))

    async def _authenticate(self, exchange: Exchange) -> LiveEpisode:
        key, by_path = exchange.key, exchange.path("episode_id")
        in_path = self._keys.episode_of(by_path) if by_path else None
        if in_path is not None:
            # A client whose own key is fixed has its episode's in the path.
            key, by_path = key if _is_ours(key) else by_path, in_path
        episode_id = self._keys.episode_of(key)
        if episode_id is None:
            if self._settings.router.unkeyed == "serve" and not by_path and not _is_ours(key):
                return self._episodes.unkeyed()
            raise Refusal(
                401,
                "invalid_api_key",
                "this route needs an episode key as `Authorization: Bearer KEY`; "
                + ("the key that was sent is none of this run" if key else "no key was sent"),
            )
        if by_path and by_path != episode_id:
            raise Refusal(
                401,
                "wrong_episode",
                f"the key that was sent does not open episode {by_path!r}; "
                "use the base_url and the api_key of the same episode",
            )
        return self._episodes.known(episode_id) or await self._episodes.get(episode_id)


def _may_be_large(exchange: Exchange) -> bool:
    """True if a body is to be read and rendered while no other of its episode is."""
    num_bytes = exchange.num_body_bytes
    if num_bytes is None or b"content-encoding" in exchange.headers:
        return True
    return num_bytes > _LARGE_BODY_BYTES


async def _send_stream(
    exchange: Exchange,
    dialect: Dialect,
    request: TurnRequest,
    turn: InFlightTurn,
    silence_s: float,
) -> bool:
    """Send a turn's events, and a comment after each `silence_s` without one; False if the client
    had left before the last."""

    async def opened() -> AnswerStream:
        head = AnswerHead(
            turn_id=turn.turn_ids[0],
            started_at=turn.started_at,
            num_prompt_tokens=turn.num_prompt_tokens,
            sampling=turn.sampling,
        )
        await exchange.start_events(_request_id(turn))
        return dialect.stream(head, request)

    stream: AnswerStream | None = None
    async for delta in turn.stream(silence_s):
        if delta is None:
            # Before the first delta a refusal is still a plain error answer.
            if stream is not None:
                await exchange.send(_COMMENT, more=True)
            continue
        if stream is None:
            stream = await opened()
            await exchange.send(stream.open(), more=True)
        await exchange.send(stream.delta(delta), more=True)
    results: Sequence[TurnResult] = await turn.results()
    opening = b""
    if stream is None:
        stream = await opened()
        opening = stream.open()
    return await exchange.send(opening + stream.close(results), more=False)


def _request_id(turn: InFlightTurn) -> Headers:
    """The turn's id in the headers in which OpenAI's and Anthropic's clients look for one."""
    turn_id = turn.turn_ids[0].encode()
    return [(b"x-request-id", turn_id), (b"request-id", turn_id)]


def _model(name: str) -> dict[str, Any]:
    """A model as both OpenAI and Anthropic describe one."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "outloop",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _is_ours(key: str) -> bool:
    return key.startswith("ol-")


def _retry(exchange: Exchange, body: bytes) -> tuple[str, int | None]:
    """The key under which identical requests meet, and how many attempts came before this one by
    its own account; None: its idempotency key makes every attempt the same request."""
    path = exchange.scope["path"].rpartition("/v1/")[2].encode()
    digest = hashlib.sha256(path + b"\0" + body).hexdigest()[:_DIGEST_CHARS]
    idempotency_key = exchange.headers.get(b"idempotency-key")
    if idempotency_key is not None:
        return f"{idempotency_key.decode('latin-1')[:200]}:{digest}", None
    count = exchange.headers.get(b"x-stainless-retry-count", b"0")
    return digest, int(count[:9]) if count.isdigit() else 0
