"""The dialect routes: from an HTTP request to a turn and back.

Owns: who is speaking, retry keys, delivery, which model name is served. Does not own: wire formats
(dialects), turns (service). Invariant: an episode key reaches its own episode only; an answer is
sent after its turns are recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from outloop.buffer.settings import Settings
from outloop.router.auth import KeyRing
from outloop.router.dialects import messages_request, messages_response
from outloop.router.dialects.base import AnswerHead, AnswerStream, Dialect, TurnRequest, TurnResult
from outloop.router.episodes.episode import Episodes, EpisodeSession
from outloop.router.errors import Refusal
from outloop.router.http.endpoint import Exchange
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.routes.model_names import ModelTable
from outloop.router.routes.upstreams import Upstreams
from outloop.router.turns.in_flight import TurnJob
from outloop.router.turns.service import TurnService

_NUM_DIGITS = 32
"""Of the digest by which identical requests meet."""


class Front:
    """Handlers of the dialect routes."""

    def __init__(
        self,
        settings: Settings,
        keys: KeyRing,
        renderer: PolicyRenderer,
        episodes: Episodes,
        service: TurnService,
        models: ModelTable,
        upstreams: Upstreams,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._renderer = renderer
        self._episodes = episodes
        self._service = service
        self._models = models
        self._upstreams = upstreams

    async def turn(self, dialect: Dialect, exchange: Exchange) -> None:
        """One turn, asked for and answered in `dialect`."""
        session = await self._identify(exchange)
        heard = await self._hear(dialect, exchange, session)
        if heard is None:
            return
        request, retry_key, attempt = heard
        is_retry = attempt is None or (
            attempt > 0 and not session.is_retry_of_refused(retry_key, attempt)
        )
        try:
            await self._answer(dialect, exchange, session, request, retry_key, is_retry=is_retry)
        except Refusal as refusal:
            if refusal.status >= 500 and attempt is not None and not is_retry:
                session.refused_attempts[retry_key] = attempt
            raise
        session.refused_attempts.pop(retry_key, None)

    async def _answer(
        self,
        dialect: Dialect,
        exchange: Exchange,
        session: EpisodeSession,
        request: TurnRequest,
        retry_key: str,
        *,
        is_retry: bool,
    ) -> None:
        job = await self._service.submit(session, request, retry_key=retry_key, is_retry=is_retry)
        job.attach(exchange)
        try:
            if request.stream:
                await _send_stream(exchange, dialect, request, job)
            else:
                job.encode = job.encode or (lambda results: dialect.encode(results, request))
                results = await job.results()
                is_delivered = await exchange.answer(
                    200, job.drafted or dialect.encode(results, request)
                )
                job.is_delivered = job.is_delivered or is_delivered
        finally:
            job.detach(exchange)
        session.let_go(job, retry_key)

    async def _hear(
        self, dialect: Dialect, exchange: Exchange, session: EpisodeSession
    ) -> tuple[TurnRequest, str, int | None] | None:
        """What is asked for, its retry key and how many attempts it says came before (None: it is
        known by an idempotency key); None: an upstream was asked, and has answered.

        The body ends here: thousands that wait for servers would keep thousands of bodies.
        """
        body = await exchange.body()
        if self._upstreams and await self._upstreams.forward(exchange, session, body):
            return None
        request = dialect.decode(body)
        path = exchange.scope["path"].rpartition("/v1/")[2].encode()
        same = hashlib.sha256(path + b"\0" + body).hexdigest()[:_NUM_DIGITS]
        version = self._models.version_of(request.model)
        if version is not None:
            request = replace(request, policy_version=version)
        traceparent = exchange.headers.get(b"traceparent")
        if traceparent is not None:
            state = exchange.headers.get(b"tracestate")
            request = replace(
                request,
                traceparent=traceparent.decode("latin-1"),
                tracestate=state.decode("latin-1") if state is not None else None,
            )
        return request, *_retry(exchange, same)

    async def count_tokens(self, exchange: Exchange) -> None:
        """`POST /v1/messages/count_tokens`: the ids of a conversation rendered in full."""
        await self._identify(exchange)
        request = messages_request.decode_count(await exchange.body())
        self._models.version_of(request.model)
        ids = self._renderer.render(request.messages, request.tools)
        num_ids = len(ids) + len(self._renderer.tokenizer.encode(request.prefill))
        await exchange.answer(200, messages_response.encode_count(num_ids))

    async def models(self, exchange: Exchange) -> None:
        """`GET /v1/models`."""
        await self._identify(exchange)
        served = [_model(name) for name in self._models.names()]
        # Anthropic's clients read pages, OpenAI's a list; each ignores the other's fields.
        ends = {"has_more": False, "first_id": served[0]["id"], "last_id": served[-1]["id"]}
        await exchange.answer(200, msgspec.json.encode({"object": "list", "data": served, **ends}))

    async def model(self, exchange: Exchange) -> None:
        """`GET /v1/models/{model_id}`."""
        await self._identify(exchange)
        name = exchange.path("model_id")
        self._models.check(name)
        await exchange.answer(200, msgspec.json.encode(_model(name)))

    async def _identify(self, exchange: Exchange) -> EpisodeSession:
        key, by_path = exchange.key, exchange.path("episode_id")
        in_path = self._keys.episode_of(by_path) if by_path else None
        if in_path is not None:
            # A client whose own key is fixed has its episode's in the path.
            key, by_path = key if _is_ours(key) else by_path, in_path
        episode_id = self._keys.episode_of(key)
        if episode_id is None:
            if self._settings.router.unkeyed == "serve" and not by_path and not _is_ours(key):
                return EpisodeSession(None, self._renderer)
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


async def _send_stream(
    exchange: Exchange, dialect: Dialect, request: TurnRequest, job: TurnJob
) -> None:
    async def opened() -> AnswerStream:
        head = AnswerHead(
            turn_id=job.turn_ids[0],
            started_at=job.started_at,
            num_prompt_tokens=job.num_prompt_tokens,
            sampling=job.sampling,
        )
        await exchange.start_events()
        return dialect.stream(head, request)

    stream: AnswerStream | None = None
    async for delta in job.stream():
        if stream is None:
            stream = await opened()
            await exchange.send_events(stream.open(), more=True)
        await exchange.send_events(stream.delta(delta), more=True)
    # A refusal before the first delta is still a plain error answer.
    results: Sequence[TurnResult] = await job.results()
    opening = b""
    if stream is None:
        stream = await opened()
        opening = stream.open()
    is_delivered = await exchange.send_events(opening + stream.close(results), more=False)
    job.is_delivered = job.is_delivered or is_delivered


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


def _retry(exchange: Exchange, digest: str) -> tuple[str, int | None]:
    """The key under which identical requests meet, and how many attempts came before this one by
    its own account; None: its idempotency key makes every attempt the same request."""
    idempotency_key = exchange.headers.get(b"idempotency-key")
    if idempotency_key is not None:
        return f"{idempotency_key.decode('latin-1')[:200]}:{digest}", None
    count = exchange.headers.get(b"x-stainless-retry-count", b"0")
    return digest, int(count[:9]) if count.isdigit() else 0
