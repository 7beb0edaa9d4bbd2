"""The page's HTTP face: static files, and JSON of what the folders of runs hold.

Guarantees: no route writes; without the key nothing is served; the browser runs no script
but those of this package, whatever an episode's text holds.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse

from outloop.buffer.errors import NotFound, OutloopError
from outloop.view.archive import EpisodeFilter, RunFolder

COOKIE = "outloop-view"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""On every answer. Trusted types: the browser refuses text in the place of markup."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
Answer = Callable[[Request], Awaitable[Response]]


def create_app(runs: Mapping[str, RunFolder], key: str) -> FastAPI:
    """The application that shows `runs`, by name, to who has `key`."""
    app = FastAPI(
        title="outloop view",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    pages = {
        item.name: item.read_bytes()
        for item in files("outloop.view").joinpath("static").iterdir()
        if item.is_file()
    }

    @app.middleware("http")
    async def guard(request: Request, call_next: Answer) -> Response:
        response = await _admit(request, key, call_next)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(OutloopError)
    async def refuse(request: Request, error: OutloopError) -> JSONResponse:
        status = 404 if isinstance(error, NotFound) else 400
        return JSONResponse({"error": str(error)}, status_code=status)

    app.include_router(_api(runs))

    @app.get("/{name}")
    def page(name: str) -> Response:
        if name not in pages:
            return PlainTextResponse("not found", status_code=404)
        return Response(pages[name], media_type=_TYPES["." + name.rpartition(".")[2]])

    @app.get("/")
    def index() -> Response:
        return page("index.html")

    return app


def _api(runs: Mapping[str, RunFolder]) -> APIRouter:
    """What the page's scripts ask for."""
    api = APIRouter(prefix="/api/runs")

    def run_of(name: str) -> RunFolder:
        if name not in runs:
            raise NotFound(f"run={name!r} is not shown here; there are {sorted(runs)}")
        return runs[name]

    @api.get("")
    def list_runs() -> list[dict[str, Any]]:
        return [run.summary() for run in runs.values()]

    @api.get("/{run}/overview")
    def overview(run: str) -> dict[str, Any]:
        one = run_of(run)
        return {
            "run": one.summary(),
            "metrics": one.metrics(),
            "events": one.events(),
            "fates": one.fates(),
            "components": one.components(),
        }

    @api.get("/{run}/lanes")
    def show_lanes(run: str, last_s: Annotated[float | None, Query(gt=0)] = None) -> dict[str, Any]:
        return run_of(run).lanes(last_s)

    @api.get("/{run}/episodes")
    def list_episodes(run: str, wanted: Annotated[EpisodeFilter, Query()]) -> dict[str, Any]:
        return run_of(run).episodes(wanted)

    @api.get("/{run}/episodes/{episode_id}")
    def show_episode(run: str, episode_id: str) -> dict[str, Any]:
        return run_of(run).episode(episode_id)

    @api.get("/{run}/episodes/{episode_id}/tokens")
    def show_tokens(run: str, episode_id: str) -> dict[str, Any]:
        return run_of(run).tokens(episode_id)

    @api.get("/{run}/groups/{group_id}")
    def show_group(run: str, group_id: str) -> list[dict[str, Any]]:
        return run_of(run).group(group_id)

    @api.get("/{run}/task")
    def show_task(
        run: str, task_id: str, before: Annotated[str | None, Query(max_length=20)] = None
    ) -> dict[str, Any]:
        return run_of(run).task(task_id, before=_version(before))

    return api


def _version(text: str | None) -> int | None:
    """A policy version of an address; none for what is no number."""
    return int(text) if text is not None and text.isdecimal() else None


async def _admit(request: Request, key: str, call_next: Answer) -> Response:
    """Pass on what has the key; the link of the start leaves it as a cookie."""
    if request.method not in ("GET", "HEAD"):
        return PlainTextResponse("this page is read-only", status_code=405)
    linked = request.query_params.get("key")
    if linked is not None and request.url.path == "/" and _is_equal(linked, key):
        response = RedirectResponse("/", status_code=303)
        name = f"{COOKIE}-{request.url.port or 80}"
        response.set_cookie(name, key, httponly=True, samesite="strict")
        return response
    cookie = request.cookies.get(f"{COOKIE}-{request.url.port or 80}", "")
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not (_is_equal(cookie, key) or _is_equal(bearer, key)):
        return PlainTextResponse(
            "open the link that `outloop view` has printed: it holds the key", status_code=401
        )
    return await call_next(request)


def _is_equal(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())
