"""Finds and imports the user's code, contains what it raises, and calls its `tear_down` at the end.

A wrong path raises a SettingsError with one line that says what to change. An exception that ends
an event loop, or that a future cannot hold, becomes a `UserExit`.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from outloop.buffer.errors import SettingsError
from outloop.buffer.foreign_text import storable

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


def text_of(error: BaseException) -> str:
    """The text of an exception, which its own class may fail to give; it can be encoded."""
    try:
        text = str(error)
    except Exception as raised:  # noqa: BLE001 - the user's class may raise anything
        text = f"(its __str__ raised {type(raised).__name__})"
    return storable(text)


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


def import_folders(import_dir: Path | None) -> tuple[Path, ...]:
    """The folders of user code and task files: the working directory, then `import_dir`."""
    folders = [Path.cwd()]
    if import_dir is not None and import_dir.resolve() != folders[0]:
        folders.append(import_dir.resolve())
    return tuple(folders)


def import_object(path: str, *, setting: str, import_dir: Path | None) -> Any:
    """Import the object `package.module:name`.

    The folders of `import_folders` are put at the start of `sys.path`, as Python does for a script.

    Raises:
        SettingsError: no such module or name (the nearest is named), or the import raised.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise SettingsError(
            f"{setting}={path!r} is not package.module:function; "
            f"for example {setting}='rollout:play'"
        )
    folders = import_folders(import_dir)
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        target = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _import_raised(path, setting, error) from error
        where = ", ".join(str(folder) for folder in folders)
        near = _nearest(module_name, [p.stem for folder in folders for p in folder.glob("*.py")])
        raise SettingsError(
            f"{setting}={path!r}: there is no module {error.name!r} in {where} or among the "
            f"installed packages; {near}give package.module:function as you would import it there"
        ) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise _import_raised(path, setting, error) from error
    for part in name.split("."):
        if not hasattr(target, part):
            known = [key for key, value in vars(target).items() if callable(value)]
            raise SettingsError(
                f"{setting}={path!r}: {getattr(target, '__name__', module_name)!r} has no "
                f"{part!r}; {_nearest(part, known)}put the function's name after the colon"
            )
        target = getattr(target, part)
    return target


async def tear_down(target: Any) -> None:
    """Call the object's `tear_down`, or for a function that of its module, if there is one."""
    method = getattr(target, "tear_down", None)
    if method is None and inspect.isroutine(target):
        method = getattr(sys.modules.get(inspect.unwrap(target).__module__), "tear_down", None)
    if callable(method) and inspect.isawaitable(ending := method()):
        await ending


def _import_raised(path: str, setting: str, error: BaseException) -> SettingsError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = " ".join(text_of(error).split())
    return SettingsError(
        f"{setting}={path!r}: importing it raised {type(error).__name__}{place}: {text}; "
        "make `import` of the module work on its own, and try again"
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
