"""Asking a Redis that is away again.

Owns: for how long, and how often. Does not own: what is asked. Invariant: what is asked is safe to
ask twice; every wait ends with the answer or the last error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

import structlog

from outloop.buffer.errors import BufferLost, BufferUnavailable

P = ParamSpec("P")
T = TypeVar("T")
_AGAIN_S = 0.2
_log = structlog.get_logger()


class BufferRetry:
    """Lets agents' turns outlive a Redis that comes back within `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._is_over = asyncio.Event()

    def end(self) -> None:
        """Have nobody wait any more."""
        self._is_over.set()

    async def call(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What `function` returns, once Redis does; it may be called many times.

        Raises:
            BufferUnavailable: not within `wait_s`, or not before the end.
            BufferLost: it is back without the run.
        """
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while True:
            try:
                return await function(*args, **kwargs)
            except BufferLost:
                raise
            except BufferUnavailable as error:
                if deadline is None:
                    deadline = loop.time() + self._wait_s
                    _log.warning("buffer_awaited", wait_s=self._wait_s, error=str(error))
                remaining = deadline - loop.time()
                if remaining <= 0 or self._is_over.is_set():
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_AGAIN_S, remaining)):
                    await self._is_over.wait()
