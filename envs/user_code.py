"""Contains what the user's code raises, and calls its `tear_down` at the end.

An exception that ends an event loop, or that a future cannot hold, becomes a `UserExit`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from outloop.buffer.user_code import text_of

P = ParamSpec("P")
T = TypeVar("T")


class UserExit(Exception):
    """The user's code raised what asyncio cannot carry: its cause, for example SystemExit."""


def contained(error: BaseException) -> Exception:
    """Return an exception that a task or a future can carry: `error`, or a UserExit with its text.

    A future refuses StopIteration, and asyncio lets SystemExit and KeyboardInterrupt end the loop.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    exit_ = UserExit(f"{type(error).__name__}: {text_of(error)}")
    exit_.__cause__ = error
    return exit_.with_traceback(error.__traceback__)


def cause_of(error: BaseException) -> BaseException:
    """The exception that the user's code raised: `error`, or what a UserExit stands for."""
    return error.__cause__ or error if isinstance(error, UserExit) else error


async def awaited(call: Awaitable[T]) -> T:
    """Await a call of the user's code; what it raises does not end the event loop."""
    try:
        return await call
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if (carried := contained(error)) is error:
            raise
        raise carried from error


class UserThreads(ThreadPoolExecutor):
    """Threads for the user's code; what it raises there can be awaited."""

    def submit(
        self, function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs
    ) -> Future[T]:
        def call() -> T:
            try:
                return function(*arguments, **options)
            except BaseException as error:
                if (carried := contained(error)) is error:
                    raise
                raise carried from error

        return super().submit(call)


async def tear_down(target: Any) -> None:
    """Call the object's `tear_down`, or for a function that of its module, if there is one."""
    method = getattr(target, "tear_down", None)
    if method is None and inspect.isroutine(target):
        method = getattr(sys.modules.get(inspect.unwrap(target).__module__), "tear_down", None)
    if callable(method) and inspect.isawaitable(ending := method()):
        await ending
