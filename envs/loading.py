"""The user's code, found and checked before anything is started.

Owns: importing `package.module:function`, where it is looked for, and the signature of a rollout
function. Does not own: calling it (runner), what tasks look like (tasks). Invariant: whatever is
wrong with a path or a signature is a SettingsError of one line that says what to change.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Task
from outloop.buffer.settings import Settings
from outloop.envs.episode import Episode

RolloutFunction = Callable[[Task, Episode], Awaitable[Any]]
_EXPECTED = "`async def play(task, episode) -> float`"


def import_folders(import_dir: Path | None) -> tuple[Path, ...]:
    """Where user code and task files are looked for: the working directory, then `import_dir`."""
    folders = [Path.cwd()]
    if import_dir is not None and import_dir.resolve() != folders[0]:
        folders.append(import_dir.resolve())
    return tuple(folders)


def import_object(path: str, *, setting: str, import_dir: Path | None) -> Any:
    """The object that `package.module:name` names.

    The folders of `import_folders` are put in front of `sys.path`, as Python does for a script.

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
                f"{part!r}; {_nearest(part, known)}write the function's name behind the colon"
            )
        target = getattr(target, part)
    return target


def load_rollout(settings: Settings) -> RolloutFunction:
    """The run's rollout function.

    Raises:
        SettingsError: not given, not importable, or not `async def play(task, episode)`.
    """
    path = settings.env.rollout_function_path
    setting = "env.rollout_function_path"
    if path is None:
        raise SettingsError(
            f"{setting} is missing; name {_EXPECTED} as package.module:function in the settings "
            "file or by --rollout-function-path"
        )
    function = import_object(path, setting=setting, import_dir=settings.env.import_dir)
    _check_signature(function, f"{setting}={path!r}")
    checked: RolloutFunction = function
    return checked


def _check_signature(function: Any, named: str) -> None:
    if not callable(function) or inspect.isclass(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise SettingsError(f"{named} is a {kind}; a function {_EXPECTED} is allowed")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{named} has no signature to check; write {_EXPECTED}") from error
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise SettingsError(
            f"{named} has the signature {signature}, which cannot be called with (task, episode): "
            f"{error}; {_EXPECTED} is allowed"
        ) from error
    inner = function.func if isinstance(function, functools.partial) else function
    call = inner if inspect.isroutine(inner) else type(inner).__call__
    if inspect.isasyncgenfunction(call):
        raise SettingsError(f"{named} is an async generator; return the reward, do not yield it")
    if not inspect.iscoroutinefunction(inspect.unwrap(call)):
        raise SettingsError(
            f"{named} is a blocking function; {_EXPECTED} is allowed: write `async def`, and run "
            "blocking work in it by `await asyncio.to_thread(...)`"
        )


def _import_raised(path: str, setting: str, error: BaseException) -> SettingsError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())
    return SettingsError(
        f"{setting}={path!r}: importing it raised {type(error).__name__}{place}: {text}; "
        "make the module importable by itself and try again"
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
