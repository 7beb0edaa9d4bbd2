"""Memory that a worker shares with its runner: which episodes run now, and the loop's heartbeat.

While a step of an episode's coroutine or thread runs, the episode's number is in a cell. The memory
survives the worker, so the runner knows which episode crashed it, or blocks its event loop.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any

from outloop.envs.user_code import contained

_BEAT = 0
_LOOP_CELL = 1
_FIRST_THREAD_CELL = 2
_NUM_CELLS = 512
_SIZE = 8 * _NUM_CELLS

episode_number: ContextVar[int] = ContextVar("episode_number", default=0)
"""The episode of the task or thread that runs; 0: none."""


class Marker:
    """The cells, in memory that the runner and one worker share."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._cells = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls) -> Marker:
        """Make new cells, all zero; the worker inherits `descriptor`."""
        with tempfile.TemporaryFile(prefix="outloop-marker-") as file:
            file.truncate(_SIZE)
            return cls(os.dup(file.fileno()))

    def close(self) -> None:
        """Free the memory in this process."""
        self._cells.release()
        self._memory.close()
        os.close(self.descriptor)

    @property
    def beats(self) -> int:
        """A counter that rises while the worker's event loop runs."""
        return self._cells[_BEAT]

    def beat(self) -> None:
        """Count one more turn of the event loop."""
        self._cells[_BEAT] += 1

    def running(self) -> frozenset[int]:
        """Numbers of the episodes that run code now."""
        return frozenset(self._cells[_LOOP_CELL:].tolist()) - {0}

    def running_in_loop(self) -> int:
        """Number of the episode that runs a coroutine now; 0: none."""
        return self._cells[_LOOP_CELL]

    def in_thread(self, index: int, number: int) -> None:
        """Note that thread `index` runs the episode `number`; 0: none."""
        self._cells[_FIRST_THREAD_CELL + index] = number

    def task_factory(self) -> Callable[..., asyncio.Task[Any]]:
        """For `loop.set_task_factory`: tasks of an episode mark each of their steps, and no task
        ends the loop by SystemExit or KeyboardInterrupt."""

        def create(
            loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
        ) -> asyncio.Task[Any]:
            context = options.get("context")
            number = episode_number.get() if context is None else context.get(episode_number, 0)
            if not number or not asyncio.iscoroutine(coroutine):
                return contained_task(loop, coroutine, **options)
            return asyncio.Task(_Marked(coroutine, self._cells, number), loop=loop, **options)

        return create


def contained_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    """For `loop.set_task_factory`: SystemExit and KeyboardInterrupt fail the task that raises them,
    and do not end the event loop."""
    if asyncio.iscoroutine(coroutine):
        coroutine = _Contained(coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine that raises a UserExit in place of what would end the event loop."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.__name__ = getattr(inner, "__name__", "")
        self.__qualname__ = getattr(inner, "__qualname__", "")

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise contained(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except (SystemExit, KeyboardInterrupt) as raised:
            raise contained(raised) from raised

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        # Libraries look at cr_frame, cr_running and their like.
        return getattr(self._inner, name)


class _Marked(_Contained):
    """A coroutine that writes its episode's number into the loop's cell while it runs."""

    def __init__(self, inner: Any, cells: memoryview, number: int) -> None:
        super().__init__(inner)
        self._cells = cells
        self._number = number

    def send(self, value: Any) -> Any:
        self._cells[_LOOP_CELL] = self._number
        try:
            return super().send(value)
        finally:
            self._cells[_LOOP_CELL] = 0

    def throw(self, *error: Any) -> Any:
        self._cells[_LOOP_CELL] = self._number
        try:
            return super().throw(*error)
        finally:
            self._cells[_LOOP_CELL] = 0
