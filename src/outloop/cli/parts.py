"""What the commands of single parts have in common: readiness and signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable


def log_ready(part: str) -> Callable[[str], None]:
    """A function that logs the part's URL when it listens."""
    import structlog

    return lambda url: structlog.get_logger().info("part_ready", name=part, url=url)


def run_until_signalled(part: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run an async part; SIGINT and SIGTERM set the event that it is given."""
    import uvloop

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await part(stop)

    uvloop.run(run())
