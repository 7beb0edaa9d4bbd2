"""Decides whose fault an error in a verifier of ours is: the answer's, or the task's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import structlog

from outloop.buffer.errors import EnvironmentFailure, OutloopError
from outloop.buffer.records import Task
from outloop.envs.verifiers.result import Result

_CONTROL = Result(answer="control")
_log = structlog.get_logger()


def lowest_if_it_raises(score: Callable[..., Any]) -> Callable[..., Any]:
    """Make `__call__` of a verifier give its lowest score if an answer makes it raise.

    Such an error is a bug of the verifier. It is logged as `verifier_bug`, and it must not make an
    answer free. If a control answer to the same task raises too, the task is at fault.
    The lowest score is the attribute `lowest`, or 0.

    Raises:
        EnvironmentFailure: the task is at fault, or the verifier raised one itself.
    """
    if inspect.iscoroutinefunction(score):

        @functools.wraps(score)
        async def call(self: object, task: Task, result: Result) -> Any:
            try:
                return await score(self, task, result)
            except OutloopError:
                raise
            except Exception as error:  # noqa: BLE001 - recorded; a bug must not free an answer
                try:
                    await score(self, task, _CONTROL)
                except Exception as other:  # noqa: BLE001 - it decides whose fault it is
                    raise _tasks(task, other) from error
                return _lowest(self, task, error)

        return call

    @functools.wraps(score)
    def call_now(self: object, task: Task, result: Result) -> Any:
        try:
            return score(self, task, result)
        except OutloopError:
            raise
        except Exception as error:  # noqa: BLE001 - recorded; a bug must not free an answer
            try:
                score(self, task, _CONTROL)
            except Exception as other:  # noqa: BLE001 - it decides whose fault it is
                raise _tasks(task, other) from error
            return _lowest(self, task, error)

    return call_now


def _tasks(task: Task, error: Exception) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"task_id={task.task_id!r} cannot be judged: {type(error).__name__}: {error}"
    )


def _lowest(verifier: object, task: Task, error: Exception) -> float:
    _log.error(
        "verifier_bug",
        verifier=type(verifier).__name__,
        task_id=task.task_id,
        error=f"{type(error).__name__}: {error}"[:400],
        note="the answer got the lowest score; please report it",
        exc_info=error,
    )
    return float(getattr(verifier, "lowest", 0.0))
