"""The base of all sandboxes: sessions with a supervisor in them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Unpack
from weakref import WeakKeyDictionary

from outloop.envs.sandbox.api import Files, Limits, Options, RunResult, Session
from outloop.envs.sandbox.cgroups import Cgroup
from outloop.envs.sandbox.guest_bundle import Bundle
from outloop.envs.sandbox.session import Bounds, SupervisedSession
from outloop.envs.sandbox.supervisor_process import Launch, SupervisorProcess


class _Turns:
    """Lets a few begin at a time, so that the first of many are done soon."""

    def __init__(self, num_at_once: int) -> None:
        self._num_at_once = num_at_once
        # A semaphore belongs to an event loop; a sandbox may be used by several.
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    def turn(self) -> asyncio.Semaphore:
        """What to enter for a turn; waiting has no limit of its own."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            self._by_loop[loop] = asyncio.Semaphore(self._num_at_once)
        return self._by_loop[loop]


class SupervisedSandbox:
    """Opens sessions; a backend says how their supervisor is started."""

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits or Limits()
        self.bundle = Bundle()
        self._starting = _Turns(2 * (os.cpu_count() or 1))
        self._bounds: Bounds = "cgroup"

    async def run(
        self,
        files: Files,
        command: Sequence[str],
        limits: Limits | None = None,
        **options: Unpack[Options],
    ) -> RunResult:
        """See `Sandbox.run`."""
        async with self.session(limits) as session:
            return await session.run(files, command, **options)

    def session(
        self, limits: Limits | None = None, *, base: Path | None = None
    ) -> AbstractAsyncContextManager[Session]:
        """See `Sandbox.session`."""
        return self._session(limits or self._limits, base)

    @asynccontextmanager
    async def _session(self, limits: Limits, base: Path | None) -> AsyncIterator[Session]:
        async def start() -> tuple[SupervisorProcess, Cgroup | None]:
            async with self._starting.turn():
                return await self._start(limits, base)

        session = SupervisedSession(limits, start, self._bounds)
        await session.open()
        try:
            yield session
        finally:
            await session.close()

    async def _start(
        self, limits: Limits, base: Path | None
    ) -> tuple[SupervisorProcess, Cgroup | None]:
        return await SupervisorProcess.start(self._launch(limits, base)), None

    def _launch(self, limits: Limits, base: Path | None, events: int = -1) -> Launch:
        """The command that starts a session; `events`: see `boot_argv`."""
        raise NotImplementedError

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self.bundle.close()
