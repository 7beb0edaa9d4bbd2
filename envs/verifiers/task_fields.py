"""Reads fields of tasks, and code from answers, for verifiers.

If a task lacks a field that its verifier needs, that is an EnvironmentFailure. No answer of a
policy raises here.
"""

from __future__ import annotations

import os
import re
from typing import TypeVar

from outloop.buffer.errors import EnvironmentFailure
from outloop.buffer.records import Task

T = TypeVar("T")
MAX_ANSWER_CHARS = 200_000
"""Longer answers are judged by their end."""
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)


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
    return field_of(task, name, str)


def end_of(answer: str) -> str:
    """The end of an answer, as long as it can be judged."""
    return answer[-MAX_ANSWER_CHARS:]


def code_of(answer: str) -> str:
    """The code of an answer: its last fenced block (of Python, if there is one), or all of it."""
    blocks: list[tuple[str, str]] = _FENCE.findall(end_of(answer))
    named = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    if named:
        return named[-1]
    return blocks[-1][1] if blocks else end_of(answer)
