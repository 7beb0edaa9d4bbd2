"""Serves small applications on loopback, as the far side of an adapter."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

Serve = Callable[[web.Application], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start an application on a free port; its base URL. All are ended after the test."""
    runners: list[web.AppRunner] = []

    async def start(app: web.Application) -> str:
        # As the real servers do: a client that leaves ends what it asked for.
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()
