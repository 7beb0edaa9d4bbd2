"""What a router does beside answering requests.

Owns: running it in one task group, and saying what of it failed. Does not own: what it does.
Invariant: all of it runs, or none: the first that ends is the failure of the whole, which ends the
process (main).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import structlog

_STOP_AGAIN_S = 0.5
_log = structlog.get_logger()


class BackgroundWork:
    """Work that goes on until the router stops."""

    def __init__(self) -> None:
        self.failure = ""
        """A sentence: what ended, and how. Empty while all goes on."""
        self.has_failed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._group: asyncio.Task[None] | None = None

    def start(self, work: Mapping[str, Coroutine[Any, Any, None]]) -> None:
        """Begin all of it; its names are for the sentence."""
        self._group = asyncio.create_task(self._run(work))

    async def stop(self) -> None:
        """Cancel all of it until it has ended: a library's wait may swallow a cancellation."""
        while self._group is not None and not self._group.done():
            for task in self._tasks:
                task.cancel()
            await asyncio.wait([self._group], timeout=_STOP_AGAIN_S)

    async def _run(self, work: Mapping[str, Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for name, one in work.items():
                    self._tasks.append(group.create_task(self._watch(name, one)))
        except* Exception:  # noqa: BLE001 - a boundary: the sentence ends the process, we log all
            _log.exception("background_work_failed", failure=self.failure)

    async def _watch(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            self.failure = self.failure or f"the router no longer {name}: that ended by itself"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.failure = self.failure or f"the router no longer {name}: {reason}"
            raise
        finally:
            if self.failure:
                self.has_failed.set()
