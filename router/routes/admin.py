"""Operation and control: health, readiness, metrics, servers, pause.

Owns: these routes. Does not own: what they report on. Invariant: nothing here changes an episode.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header
from starlette.responses import Response

from outloop.buffer.run import Run
from outloop.buffer.writer import BufferWriter
from outloop.router.audit import AuditLog
from outloop.router.auth import KeyRing
from outloop.router.background import BackgroundWork
from outloop.router.errors import Refusal, stopping
from outloop.router.metrics import RouterMetrics
from outloop.router.servers.pool import ServerPool
from outloop.router.turns.service import TurnService

Authorization = Annotated[str, Header(description="Bearer ADMIN_KEY")]


def admin_router(
    keys: KeyRing,
    pool: ServerPool,
    buffer: BufferWriter,
    metrics: RouterMetrics,
    service: TurnService,
    background: BackgroundWork,
    run: Run,
    audit: AuditLog,
) -> APIRouter:
    """Routes for operators."""
    routes = APIRouter()
    _add_operation(routes, pool, metrics, service, background)
    _add_control(routes, keys, pool, buffer, run, audit)
    return routes


def _add_operation(
    routes: APIRouter,
    pool: ServerPool,
    metrics: RouterMetrics,
    service: TurnService,
    background: BackgroundWork,
) -> None:
    @routes.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @routes.get("/ready")
    async def ready() -> dict[str, Any]:
        """A server holds the announced version, or, with buffer.max_staleness above 0, the one
        before; 503 until then, and when it stops."""
        if service.is_draining:
            raise stopping()
        if background.failure:
            raise Refusal(503, "router_failed", background.failure, retry_after_s=1.0)
        if not pool.is_ready:
            raise Refusal(
                503, "not_ready", f"the router waits for {pool.describe()}", retry_after_s=1.0
            )
        assert pool.state is not None
        return {"status": "ready", "policy_version": pool.state.announced_version}

    @routes.get("/metrics")
    async def show_metrics() -> Response:
        """Prometheus metrics."""
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")


def _add_control(
    routes: APIRouter,
    keys: KeyRing,
    pool: ServerPool,
    buffer: BufferWriter,
    run: Run,
    audit: AuditLog,
) -> None:
    def require_admin(authorization: str) -> None:
        keys.require_admin(authorization.partition(" ")[2].strip())

    @routes.get("/status")
    async def status(authorization: Authorization = "") -> dict[str, Any]:
        """Every part and server, versions, the queue, and what is waited for since when."""
        require_admin(authorization)
        return {
            "run": run.settings.run.name,
            "num_steps": run.settings.trainer.num_steps,
            **await buffer.run_status(),
        }

    @routes.get("/servers")
    async def servers(authorization: Authorization = "") -> dict[str, Any]:
        """Every registered server as this router sees it."""
        require_admin(authorization)
        return {
            "servers": [
                {
                    **msgspec.to_builtins(server.entry),
                    "num_in_flight": server.num_in_flight,
                    "num_failures": server.num_failures,
                }
                for server in pool.servers
            ]
        }

    @routes.post("/pause")
    async def pause(authorization: Authorization = "") -> dict[str, bool]:
        """Give out no more claims; running episodes go on."""
        require_admin(authorization)
        await buffer.set_paused(True)
        audit.note("pause", "admin")
        return {"is_paused": True}

    @routes.post("/resume")
    async def resume(authorization: Authorization = "") -> dict[str, bool]:
        """Give out claims again."""
        require_admin(authorization)
        await buffer.set_paused(False)
        audit.note("resume", "admin")
        return {"is_paused": False}

    @routes.get("/policy_version")
    async def policy_version(authorization: Authorization = "") -> dict[str, Any]:
        """The announced and the acknowledged version; null before the first."""
        require_admin(authorization)
        state = pool.state
        return {
            "announced_version": state.announced_version if state else None,
            "acknowledged_version": state.acknowledged_version if state else None,
        }
