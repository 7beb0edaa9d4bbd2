"""Reads fields of tasks, and text and JSON of answers, for verifiers.

If a task lacks a field that its verifier needs, that is an EnvironmentFailure.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

from outloop.buffer.errors import EnvironmentFailure
from outloop.buffer.records import Task
from outloop.envs.verifiers.code_blocks import find_code

T = TypeVar("T")
MAX_ANSWER_CHARS = 200_000
"""Longer answers are judged by their end."""

NUM_CORES_VARIABLE = "OUTLOOP_WORKER_CORES"
"""Environment variable with a worker process's share of the machine's cores."""


def num_cores() -> int:
    """How many judgements this process may run at once."""
    return int(os.environ.get(NUM_CORES_VARIABLE, 0)) or len(os.sched_getaffinity(0))


def field_of(task: Task, name: str, kind: type[T]) -> T:
    """Read `task.payload[name]`, which must be a `kind`.

    Raises:
        EnvironmentFailure: the task has no such field, or it is something else.
    """
    value = task.payload.get(name)
    if not isinstance(value, kind):
        known = ", ".join(map(str, task.payload))
        raise EnvironmentFailure(
            f"task_id={task.task_id!r}: the verifier needs the field {name!r} as "
            f"{kind.__name__}, and found {type(value).__name__}; the task has: {known}"
        )
    return value


def text_of(task: Task, name: str) -> str:
    """A field that is a string, or a number written as one."""
    value = task.payload.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return _encodable(field_of(task, name, str))


def end_of(answer: str) -> str:
    """The end of an answer, as long as it can be judged, and as text that can be encoded."""
    return _encodable(answer[-MAX_ANSWER_CHARS:])


def code_of(answer: str, is_wanted: Callable[[str], bool] = lambda code: True) -> str:
    """The code of an answer; of several blocks the last that is wanted (see `code_blocks`)."""
    return find_code(end_of(answer), is_wanted)


def _encodable(text: str) -> str:
    """Join the halves of surrogate pairs; a half alone becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def strict_json(text: str) -> Any:
    """Read JSON as RFC 8259 has it, without the liberties of Python's reader.

    Raises:
        ValueError: it is none, or has NaN, an infinity, a number beyond a float, or a name twice.
        RecursionError: it is too deep.
    """
    return json.loads(
        text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_named_once
    )


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _named_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found
