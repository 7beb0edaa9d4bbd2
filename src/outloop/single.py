"""All parts of a run in one process, for a debugger.

The functions of `outloop router|server|runner|trainer` run in threads of this process, so a
breakpoint in any of them is hit. Only Redis is a process of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import structlog
from rich.console import Console

from outloop.buffer.errors import DeadlineExceeded
from outloop.buffer.rich_terminal import show_table
from outloop.buffer.settings import Settings
from outloop.engine.launch.launcher import Launcher, router_url, running
from outloop.engine.launch.run_summary import draw_curve, result_table
from outloop.engine.launch.serving import refuse_frozen
from outloop.engine.serve.main import serve as serve_weights
from outloop.engine.train.main import train as train_policy
from outloop.envs.runner.runner import run as run_episodes
from outloop.router.main import serve as serve_router

_JOIN_TIMEOUT_S = 30.0
_log = structlog.get_logger()

AsyncPart = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


class _PartThread:
    """An async part in a thread with a loop of its own."""

    def __init__(self, name: str, part: AsyncPart, on_failure: Callable[[Exception], None]) -> None:
        self._name = name
        self._part = part
        self._on_failure = on_failure
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        # A part may end by itself at the moment when it is asked to: a closed loop takes no calls.
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._part(self._stop))
        except Exception as error:  # noqa: BLE001 - as a process would: it is recorded and raised
            _log.exception("part_failed", name=self._name)
            self._on_failure(error)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            with self._closing:
                self._loop.close()

    def stop(self) -> None:
        """Ask the part to end and wait for it."""
        with self._closing:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                who="launcher", phase="stop", peer=self._name, after_s=_JOIN_TIMEOUT_S
            )


def train_in_one_process(settings: Settings, *, stop: threading.Event, console: Console) -> int:
    """Train like `outloop train`, with every part in this process; the trainer in this thread.

    Raises:
        Exception: what a part raised first.
    """
    refuse_frozen(settings, "--single-process")
    failures: list[Exception] = []

    def fail(error: Exception) -> None:
        failures.append(error)
        stop.set()

    with running(settings, stop) as launcher, ExitStack() as stack:
        run = launcher.run
        launcher.start_archiver()

        def start(name: str, part: AsyncPart) -> None:
            stack.callback(_PartThread(name, part, fail).stop)

        start("router", lambda ended: serve_router(run, stop=ended, on_ready=_ignore))
        if settings.trainer.mode == "rl":
            for index in range(settings.server.num_servers):
                start(f"server-{index}", _server_part(launcher, index))
        launcher.wait_for("router", lambda: router_url(launcher) is not None, 60.0)
        url = router_url(launcher)
        if url is not None:
            start(
                "runner",
                lambda ended: run_episodes(
                    settings,
                    router_url=url,
                    runner_key=run.keys.runner_key,
                    stop=ended,
                    in_process=True,
                    private=[run.dir],
                ),
            )
            train_policy(run, stop=stop)
    if failures:
        raise failures[0]
    if stop.is_set():
        return 130
    show_table(console, result_table(run.dir))
    draw_curve(run.dir)
    return 0


def _server_part(launcher: Launcher, index: int) -> AsyncPart:
    return lambda ended: serve_weights(launcher.run, index, stop=ended, on_ready=_ignore)


def _ignore(url: str) -> None:
    pass
