"""What the commands of single parts have in common: their run, readiness and signals."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outloop.buffer.run import Run


def open_as(part: str, run_dir: Path) -> Run:
    """The run of a folder; what this process logs from now on is that part's, and it trusts the
    run's authorities: to be called before a library of HTTP is imported."""
    from outloop.buffer.run import load_run
    from outloop.buffer.telemetry import configure_logging
    from outloop.buffer.tls import trust_authorities

    run = load_run(run_dir)
    trust_authorities(run.settings.run.tls_ca_file)
    configure_logging(part, run.settings.telemetry.log_level)
    return run


def stop_event() -> threading.Event:
    """An event that SIGINT, SIGTERM and SIGHUP set."""
    from outloop.engine.launch.stop_signals import ending_signals

    stop = threading.Event()
    for number in ending_signals():
        signal.signal(number, lambda *_: stop.set())
    return stop


def log_ready(part: str) -> Callable[[str], None]:
    """A function that logs the part's URL when it listens."""
    import structlog

    return lambda url: structlog.get_logger().info("part_ready", name=part, url=url)


def run_until_signalled(part: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run an async part; SIGINT, SIGTERM and SIGHUP set the event that it is given."""
    import uvloop

    from outloop.engine.launch.stop_signals import ending_signals

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, stop.set)
        await part(stop)

    uvloop.run(run())
