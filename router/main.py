"""The router's process.

Owns: its socket, its entry in the run's registry, starting and stopping. Does not own: routes.
Invariant: it is registered and `on_ready` is called only when requests are accepted.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from outloop.buffer.errors import PartFailed, SettingsError
from outloop.buffer.registry import advertised_url
from outloop.buffer.run import Run
from outloop.buffer.settings import RouterSettings
from outloop.buffer.tls import check_certificate
from outloop.buffer.writer import BufferWriter
from outloop.router.app import RouterApp, create_app
from outloop.router.buffer_retry import BufferRetry
from outloop.router.http.protocol import ClientConnection

_BACKLOG = 4096
_SWITCH_S = 0.0005
_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that it is they who close them."""
_SHUTDOWN_TIMEOUT_S = 5


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to the command line."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    run: Run,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    port: int | None = None,
    advertise: str | None = None,
) -> None:
    """Serve until `stop` is set, then finish running turns for at most router.drain_timeout_s.

    Args:
        port: in place of router.port: a router that is started again keeps its address, because
            agents hold it.
        advertise: the name or address under which other machines reach this one.

    Raises:
        SettingsError: the model folder, the renderer, the address or the certificate is wrong.
        BufferUnavailable: Redis cannot be reached.
    """
    start = BufferRetry(run.settings.buffer.outage_s)
    writer = await start.call(BufferWriter.connect, run)
    try:
        app = create_app(run, writer)
        with _bind(run, port) as listener:
            host, bound = listener.getsockname()[:2]
            settings = run.settings
            cert, key = settings.router.tls_cert_file, settings.router.tls_key_file
            url = advertised_url(host, bound, advertise, is_tls=cert is not None)
            check_certificate(
                "router",
                settings.router,
                ca_file=settings.run.tls_ca_file,
                host=urlsplit(url).hostname,
            )
            server = _Server(
                uvicorn.Config(
                    app,
                    loop="none",
                    http=ClientConnection,
                    ws="none",
                    lifespan="on",
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    proxy_headers=False,
                    timeout_keep_alive=_KEEP_ALIVE_S,
                    timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
                    ssl_certfile=cert,
                    ssl_keyfile=key,
                )
            )
            serving = asyncio.create_task(server.serve([listener]))
            await _first(serving, app.state.is_serving.wait())
            if serving.done():
                serving.result()
                raise PartFailed("the router's HTTP server ended by itself; see its log")
            background = app.state.parts.background
            facts = {"url": url, "pid": str(os.getpid())}
            await start.call(writer.register_part, "router", facts)
            on_ready(url)
            await _first(serving, stop.wait(), background.has_failed.wait())
            if serving.done() and not stop.is_set():
                serving.result()
                raise PartFailed("the router's HTTP server ended by itself; see its log")
            if not background.failure:
                await _drain(run, app, server, listener)
            server.should_exit = True
            await serving
            if background.failure:
                raise PartFailed(f"{background.failure}; see its log")
    finally:
        await writer.close()


async def _drain(run: Run, app: RouterApp, server: _Server, listener: socket.socket) -> None:
    """Finish what is under way; what is left of the deadline is for requests to upstreams."""
    settings = run.settings.router
    deadline = time.monotonic() + settings.drain_timeout_s
    if shares_port(settings):
        # New connections reach the other processes at once; a router that is alone goes on
        # accepting, to say that it is stopping.
        for accepting in server.servers:
            accepting.close()
        listener.close()
    await app.state.parts.service.drain(settings.drain_timeout_s)
    remaining = math.ceil(deadline - time.monotonic())
    server.config.timeout_graceful_shutdown = max(_SHUTDOWN_TIMEOUT_S, remaining)


def shares_port(settings: RouterSettings) -> bool:
    """True if other processes may listen on the same port."""
    return settings.shares_port or settings.num_processes > 1


def own_the_process() -> None:
    """Tune the interpreter for a router that has a process to itself.

    Most of what a router allocates lives as long as an episode: the collector's usual cadence costs
    it a seventh of its CPU and finds next to nothing. The thread that renders long conversations
    gives way to the event loop ten times as often as by default: every turn has some twenty steps,
    and each would wait for it.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def _first(serving: asyncio.Task[None], *events: Coroutine[Any, Any, bool]) -> None:
    """Wait for one of the events, or for the server to end."""
    waiting = [asyncio.create_task(event) for event in events]
    await asyncio.wait([serving, *waiting], return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


def _bind(run: Run, port: int | None) -> socket.socket:
    settings = run.settings.router
    port = settings.port if port is None else port
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it answers wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port(settings):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((settings.host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"router.host={settings.host!r} router.port={port}: cannot listen there "
            f"({error}); choose another, or port 0 for any free one"
        ) from error
    return listener
