"""The router's own entry point within a test, and its connections without the rest.

Owns: starting and ending both. Does not own: runs, apps, clients. Invariant: what is started here
is over when its context is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from outloop.buffer.run import Run
from outloop.router.http.protocol import ClientConnection
from outloop.router.main import serve


@asynccontextmanager
async def live_router(
    run: Run, *, stop: asyncio.Event | None = None, port: int | None = None
) -> AsyncIterator[str]:
    """A router of `run`; its URL. It ends at `stop`, or with the context."""
    stop = stop or asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(run, stop=stop, on_ready=ready.set_result, port=port))
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED, timeout=60)
    try:
        if not ready.done():
            await task
        yield ready.result()
    finally:
        stop.set()
        await task


@asynccontextmanager
async def accepting(
    app: Any, keep_alive_s: float, connection: type[ClientConnection] = ClientConnection
) -> AsyncIterator[tuple[tuple[str, int], uvicorn.server.ServerState]]:
    """An address whose connections to `app` are of this class, and what is known of them."""
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=keep_alive_s,
    )
    config.load()
    loop, state = asyncio.get_running_loop(), uvicorn.server.ServerState()
    listening = await loop.create_server(lambda: connection(config, state, {}), "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname(), state
    finally:
        listening.close()
        await asyncio.gather(*state.tasks)
