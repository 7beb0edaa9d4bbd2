"""Loads the user's rollout function or class, and checks its signature.

Nothing but the constructor of a class is called here.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings.env import EnvSettings
from outloop.buffer.user_code import import_object, text_of
from outloop.envs.user_code import awaited, cause_of, tear_down

Kind = Literal["async", "blocking", "batch"]
_SETTING = "env.rollout_function_path"
_PLAY = "`async def play(task, episode) -> float`"
_BATCH = "`async def rollout(tasks, context) -> None`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The user's way of playing episodes.

    `async`: `await call(task, episode)`. `blocking`: `call(task, episode)`, in a thread. `batch`:
    `await call(tasks, context)` plays many episodes.
    """

    kind: Kind
    call: Callable[..., Any]
    name: str
    """How messages name it."""
    owner: Any = None
    """The instance of the user's class, which may have set_up and tear_down; None: a function."""

    async def set_up(self, timeout_s: float) -> None:
        """Call the owner's `set_up`, if it has one.

        Raises:
            SettingsError: it raised, or took longer than `timeout_s`.
        """
        method = getattr(self.owner, "set_up", None)
        if method is None:
            return
        try:
            if inspect.isawaitable(answer := method()):
                await asyncio.wait_for(awaited(answer), timeout_s)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raised = cause_of(error)
            raise SettingsError(
                f"set_up raised {type(raised).__name__}: {text_of(raised)}"
            ) from error

    async def tear_down(self) -> None:
        """Call the owner's `tear_down`, or that of a function's module."""
        await tear_down(self.owner if hasattr(self.owner, "tear_down") else self.call)


def load_rollout(env: EnvSettings) -> Rollout:
    """Load the rollout function of a run.

    Raises:
        SettingsError: not given, not importable, or of a form that is not allowed.
    """
    path = env.rollout_function_path
    if path is None:
        raise SettingsError(
            f"{_SETTING} is missing; name {_PLAY} as package.module:function in the settings "
            "file or by --rollout-function-path, or give a program by --agent-command"
        )
    named = f"{_SETTING}={path!r}"
    target = import_object(path, setting=_SETTING, import_dir=env.import_dir)
    if inspect.isclass(target):
        return _from_class(target, named)
    return Rollout(kind=_kind_of(target, named), call=target, name=named)


def _from_class(target: type, named: str) -> Rollout:
    methods = [name for name in ("play", "rollout") if callable(getattr(target, name, None))]
    if len(methods) != 1:
        raise SettingsError(
            f"{named} is a class with {' and '.join(methods) or 'neither play nor rollout'}; one "
            "method `async def play(self, task, episode)` or `async def rollout(self, tasks, "
            "context)` is allowed, and set_up(self) and tear_down(self) if there is state"
        )
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise SettingsError(
            f"{named} is a class whose constructor cannot be called without arguments: {error}; "
            "give them defaults, or read them in set_up(self)"
        ) from error
    except ValueError:  # a class without a Python constructor has no signature to read
        pass
    owner = _make(target, named)
    call = getattr(owner, methods[0])
    return Rollout(
        kind=_kind_of(call, f"{named}, method {methods[0]}"), call=call, name=named, owner=owner
    )


def _make(target: type, named: str) -> Any:
    try:
        return target()
    except (Exception, SystemExit) as error:  # the user's constructor may raise anything
        raise SettingsError(
            f"{named}: its constructor raised {type(error).__name__}: {text_of(error)}; move what "
            "may fail into set_up(self)"
        ) from error


def _kind_of(function: Any, named: str) -> Kind:
    if not callable(function):
        raise SettingsError(
            f"{named} is a {type(function).__name__}; a function {_PLAY} is allowed"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{named} has no signature to check; write {_PLAY}") from error
    names = [*signature.parameters]
    if "rollout_id" in names and "args" in names:
        raise SettingsError(
            f"{named} has slime's signature {signature}; {_BATCH} is allowed, and "
            "docs/coming-from-slime.md shows how to change it"
        )
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise SettingsError(
            f"{named} has the signature {signature}, which cannot be called with (task, episode): "
            f"{error}; {_PLAY} is allowed, or {_BATCH}"
        ) from error
    is_batch = _is_batch(names, f"{named} has the signature {signature}")
    inner = function.func if isinstance(function, functools.partial) else function
    call = inspect.unwrap(inner if inspect.isroutine(inner) else type(inner).__call__)
    if inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
        raise SettingsError(f"{named} is a generator; return the reward, do not yield it")
    if is_batch and not inspect.iscoroutinefunction(call):
        raise SettingsError(f"{named} is a blocking function; {_BATCH} is allowed")
    if is_batch:
        return "batch"
    return "async" if inspect.iscoroutinefunction(call) else "blocking"


def _is_batch(names: list[str], named: str) -> bool:
    """True if the first two parameters are called (tasks, context)."""
    says_batch = [names[0] == "tasks", len(names) > 1 and names[1] == "context"]
    if any(says_batch) and not all(says_batch):
        raise SettingsError(
            f"{named}, which is neither (task, episode) nor (tasks, context); name the parameters "
            f"of {_PLAY} or of {_BATCH}"
        )
    return all(says_batch)
