"""The router as an ASGI application.

Owns: which route does what, starting and stopping of what the routes need. Does not own: sockets
(main), behaviour of routes. Invariant: hot routes are raw ASGI endpoints; FastAPI serves the admin
routes and the OpenAPI document of all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from types import MappingProxyType

import aiohttp
import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outloop.buffer.errors import BufferUnavailable, OutloopError
from outloop.buffer.run import Run
from outloop.buffer.writer import BufferWriter
from outloop.router.audit import AuditLog
from outloop.router.auth import KeyRing
from outloop.router.background import BackgroundWork
from outloop.router.buffer_retry import BufferRetry
from outloop.router.dialects import messages_response
from outloop.router.dialects.table import DIALECTS
from outloop.router.episodes.episode import Episodes
from outloop.router.episodes.sft import ConversationRenderer
from outloop.router.errors import Refusal, as_refusal
from outloop.router.http.endpoint import Endpoint, Handler, Receive, Scope, Send
from outloop.router.http.openapi import describe
from outloop.router.http.rate_limit import RateLimit
from outloop.router.metrics import RouterMetrics
from outloop.router.peers.turn_locator import TurnLocator
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.routes.admin import admin_router
from outloop.router.routes.model_names import ModelTable
from outloop.router.routes.posted import PostedTrajectories
from outloop.router.routes.rewards import Scores
from outloop.router.routes.runner import RunnerRoutes
from outloop.router.routes.turns import TurnRoutes
from outloop.router.routes.upstreams import Upstream, Upstreams, read_upstreams
from outloop.router.servers.generation import Generator
from outloop.router.servers.pool import ServerPool
from outloop.router.timings import DEFAULT_TIMINGS, Timings
from outloop.router.turns.service import TurnService

_IDLE_CONNECTION_S = 4.0
"""Shorter than uvicorn keeps its side open (5 s), so that no turn meets a closing connection."""
_ONE_MODEL = (
    "/v1/models/{model_id:path}",
    "/v1/v1/models/{model_id:path}",
    "/episodes/{episode_id}/v1/models/{model_id:path}",
    "/episodes/{episode_id}/v1/v1/models/{model_id:path}",
)
"""Names may have slashes, so that no dictionary finds these."""
_log = structlog.get_logger()


class Parts:
    """What the routes of one router work with."""

    def __init__(
        self,
        run: Run,
        buffer: BufferWriter,
        renderer: PolicyRenderer,
        upstreams: Mapping[str, Upstream],
        http: aiohttp.ClientSession,
        tasks: asyncio.TaskGroup,
        timings: Timings,
    ) -> None:
        settings, limits = run.settings, run.settings.router
        self._housekeeping_s = timings.housekeeping_s
        self.background = BackgroundWork()
        self.long_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-texts")
        self.buffer = buffer
        self.metrics = RouterMetrics()
        self.keys = KeyRing(run.keys)
        # Each process may fill its share of a server: together they fill it.
        share = -(-settings.server.max_running_requests // limits.num_processes)
        self.pool = ServerPool(
            buffer,
            max_in_flight=share,
            goes_on_in_publish=settings.buffer.max_staleness > 0,
            timings=timings,
        )
        buffer_retry, turn_s = BufferRetry(limits.buffer_timeout_s), limits.turn_timeout_s
        self.episodes = Episodes(buffer, renderer, buffer_retry, timings)
        self.locator = TurnLocator(
            buffer.channel, self.episodes, tasks, timeout_s=turn_s, timings=timings
        )
        self.service = TurnService(
            settings,
            buffer,
            renderer,
            self.episodes,
            Generator(
                http,
                self.pool,
                tasks,
                timeout_s=turn_s,
                may_mix_versions=settings.buffer.max_age > 0,
                keeps_keys=settings.pause_mode == "in_place",
                server_key=run.server_key,
            ),
            self.metrics,
            self.locator,
            buffer_retry,
            tasks,
            self.long_texts,
            timings,
        )
        self.turns = TurnRoutes(
            settings,
            self.keys,
            self.episodes,
            self.service,
            ModelTable(
                settings.model.name,
                self.pool,
                settings.router.upstreams,
                is_kept=settings.server.keeps if settings.server.num_frozen else None,
                timeout_s=turn_s,
            ),
            Upstreams(http, upstreams, self.metrics, timeout_s=settings.router.turn_timeout_s),
            stream_silence_s=timings.stream_silence_s,
        )
        self.audit = AuditLog(is_on=limits.audit_log)
        rate = limits.max_requests_per_s
        self.rate_limit = None if rate is None else RateLimit(rate)
        teacher = settings.trainer.teacher
        self.runner = RunnerRoutes(
            buffer=buffer,
            keys=self.keys,
            pool=self.pool,
            episodes=self.episodes,
            service=self.service,
            conversations=ConversationRenderer(
                renderer, max_context_tokens=settings.model.max_context_tokens
            ),
            posted=PostedTrajectories(settings, renderer),
            metrics=self.metrics,
            scores=Scores(settings, buffer),
            audit=self.audit,
            public_url=settings.router.public_url,
            timings=timings,
            teacher_context_key=teacher.context_key if teacher is not None else None,
        )

    async def report_status(self) -> None:
        """Forget ended episodes, learn of runner keys and report the status, until cancelled."""
        while True:
            await asyncio.sleep(self._housekeeping_s)
            self.episodes.forget_ended()
            self.metrics.in_flight.set(self.service.num_running)
            waiting = "" if self.pool.is_ready else self.pool.describe()
            try:
                self.keys.known = await self.buffer.runner_keys()
                await self.buffer.report_status(
                    "router",
                    {
                        "num_turns_in_flight": str(self.service.num_running),
                        "num_episodes": str(len(self.episodes)),
                        "waits_for": waiting,
                    },
                )
            except BufferUnavailable as error:
                _log.warning("status_not_reported", error=str(error))


def create_app(run: Run, writer: BufferWriter, *, timings: Timings = DEFAULT_TIMINGS) -> RouterApp:
    """The router of `run` over `writer`, which stays the caller's to close.

    Raises:
        SettingsError: the model folder, the renderer or an upstream is wrong.
    """
    renderer = PolicyRenderer(run.settings.model)
    upstreams = read_upstreams(run.settings)

    @asynccontextmanager
    async def lifespan(app: RouterApp) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S)
        async with (
            aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                # What a server or an upstream sets for one episode is not sent for another.
                cookie_jar=aiohttp.DummyCookieJar(),
            ) as http,
            asyncio.TaskGroup() as tasks,
        ):
            parts = Parts(run, writer, renderer, upstreams, http, tasks, timings)
            app.state.parts = parts
            app.endpoints = _endpoints(parts)
            endpoint = partial(Endpoint, metrics=parts.metrics, rate_limit=parts.rate_limit)
            one_model = endpoint(parts.turns.model, method="GET")
            app.router.routes += [Route(path, one_model) for path in _ONE_MODEL]
            app.include_router(
                admin_router(
                    parts.keys,
                    parts.pool,
                    writer,
                    parts.metrics,
                    parts.service,
                    parts.background,
                    run,
                    parts.audit,
                )
            )
            parts.background.start(
                {
                    "follows the registry": parts.pool.run(),
                    "reports its status": parts.report_status(),
                    "listens to the other routers": writer.channel.listen(parts.locator.handlers),
                }
            )
            start = BufferRetry(run.settings.buffer.outage_s)
            parts.keys.known = await start.call(writer.runner_keys)
            app.state.is_serving.set()
            try:
                yield
            finally:
                await parts.service.close()
                await parts.background.stop()
                parts.locator.close()
                parts.long_texts.shutdown(wait=False, cancel_futures=True)

    app = RouterApp(
        title="outloop router",
        version=version("outloop"),
        lifespan=lifespan,
        # To where the Host header says, and with the key.
        redirect_slashes=False,
    )
    app.state.is_serving = asyncio.Event()
    if run.settings.router.cors_origins:
        app.cross_origin = CORSMiddleware(
            app.serve,
            allow_origins=run.settings.router.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["retry-after", "retry-after-ms", "x-request-id", "x-should-retry"],
        )
    app.add_exception_handler(OutloopError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    describe(app)
    return app


class RouterApp(FastAPI):
    """FastAPI whose raw routes are found by one dictionary look-up, without its middleware.

    That saves about as much per request as reading the body costs.
    """

    endpoints: Mapping[str, Endpoint] = MappingProxyType({})
    cross_origin: CORSMiddleware | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with the headers that browsers ask for where a setting allows it."""
        if self.cross_origin is None or scope["type"] != "http":
            await self.serve(scope, receive, send)
            return
        await self.cross_origin(scope, receive, send)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a raw route, or hand on to FastAPI."""
        if scope["type"] == "http":
            pattern, episode_id = _pattern(scope["path"])
            endpoint = self.endpoints.get(pattern)
            if endpoint is not None:
                scope["path_params"] = {"episode_id": episode_id}
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def _pattern(path: str) -> tuple[str, str]:
    """`path` with an episode id in it replaced by `*`, and that id."""
    path = path.rstrip("/")
    if not path.startswith("/episodes/"):
        return path, ""
    episode_id, slash, rest = path[10:].partition("/")
    return f"/episodes/*{slash}{rest}", episode_id


def _endpoints(parts: Parts) -> Mapping[str, Endpoint]:
    """Raw endpoints by path pattern; each refuses other methods itself."""
    turns, runner = parts.turns, parts.runner
    endpoint = partial(Endpoint, metrics=parts.metrics, rate_limit=parts.rate_limit)
    routes: dict[str, tuple[str, Handler]] = {
        "/tasks": ("POST", runner.tasks),
        "/tasks/claim": ("POST", runner.claim),
        "/runners/heartbeat": ("POST", runner.heartbeat),
        "/episodes": ("POST", runner.open),
        "/episodes/*": ("GET", runner.read),
        "/episodes/*/reward": ("POST", runner.reward),
        "/episodes/*/close": ("POST", runner.close),
        "/trajectories": ("POST", runner.trajectories),
    }
    endpoints = {
        pattern: endpoint(handler, method=method) for pattern, (method, handler) in routes.items()
    }
    for prefix in ("", "/episodes/*"):
        endpoints[f"{prefix}/v1/models"] = endpoint(turns.models, method="GET")
        for path, served in DIALECTS.items():
            endpoints[prefix + path] = endpoint(
                partial(turns.turn, served.dialect), method="POST", errors=served.errors
            )
        endpoints[f"{prefix}/v1/messages/count_tokens"] = endpoint(
            turns.count_tokens, method="POST", errors=messages_response.ERRORS
        )
        # Anthropic's clients add /v1 to a base URL that, for all others, ends in /v1 already.
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/models"):
            endpoints[f"{prefix}/v1{path}"] = endpoints[prefix + path]
    return MappingProxyType(endpoints)


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, OutloopError):
        refusal = as_refusal(error)
    elif isinstance(error, HTTPException):
        code = "not_found" if error.status_code == 404 else "refused"
        where = f"{request.method} {request.url.path}"
        refusal = Refusal(
            error.status_code, code, f"{where} is not served: {error.detail}; see /openapi.json"
        )
    else:
        refusal = Refusal(400, "invalid_value", str(error))
    headers = {name.decode(): value.decode() for name, value in refusal.headers()}
    return Response(
        refusal.envelope(), refusal.status, headers=headers, media_type="application/json"
    )
