"""Checks of a run's tasks, and their digest.

The same tasks in the same order have the same digest in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import msgspec
import numpy as np

from outloop.buffer.codec import records_codec
from outloop.buffer.errors import RecordError
from outloop.buffer.records import Task
from outloop.buffer.settings import Settings
from outloop.buffer.tasks.mixture import TaskSource, check_weights

MAX_ID_CHARS = 256
_MAX_PRIORITY = 10**9


def check_id(value: str, name: str) -> str:
    """`value`, if it can be an id or key.

    Raises:
        RecordError: it is empty, too long or unprintable; names the field.
    """
    if not 1 <= len(value) <= MAX_ID_CHARS:
        raise RecordError(f"{name} has {len(value)} characters; 1 to {MAX_ID_CHARS} are allowed")
    if not value.isprintable():
        raise RecordError(f"{name}={value!r}; only printable characters are allowed")
    return value


@dataclass(frozen=True, slots=True)
class CheckedTasks:
    """What is known of a run's tasks once they were looked at."""

    digest: str
    priorities: bytes
    """int32 by index; empty: all are equal."""
    held_out: tuple[bytes, ...]
    """Each evaluation task, suite after suite."""


def check_tasks(
    tasks: Sequence[Task],
    eval_tasks: Sequence[Task],
    sources: Sequence[TaskSource],
    suites: Mapping[str, int],
    settings: Settings,
) -> CheckedTasks:
    """Check a run's tasks; of the training tasks nothing but their ids is kept meanwhile.

    Raises:
        RecordError: names what is wrong.
    """
    held_out = encode_suites(eval_tasks, suites)
    refuse_overlap(tasks, eval_tasks)
    refuse_cut(tasks, settings)
    check_sources(sources, len(tasks))
    priorities = encode_priorities(tasks, sources)
    trained = (len(tasks), encode_tasks(tasks, "tasks"))
    digest = tasks_digest([trained, *((len(some), some) for some in held_out)], priorities)
    return CheckedTasks(digest, priorities, tuple(chain.from_iterable(held_out)))


def encode_tasks(tasks: Iterable[Task], name: str) -> Iterator[bytes]:
    """Bytes of each task, one after the other.

    Raises:
        RecordError: an id is unusable or used twice, or a payload is not JSON-able.
    """
    seen: set[str] = set()
    for task in tasks:
        if check_id(task.task_id, f"{name}: task_id") in seen:
            raise RecordError(f"{name}: task_id={task.task_id!r} is used twice; ids must differ")
        seen.add(task.task_id)
        yield records_codec.encode_task(task)


def encode_suites(tasks: Sequence[Task], suites: Mapping[str, int]) -> list[list[bytes]]:
    """Bytes of the evaluation tasks of each suite; a task may be in several.

    Args:
        suites: name and number of tasks of each, in the order of `tasks`.

    Raises:
        RecordError: as `encode_tasks`, or the suites have more or fewer tasks than there are.
    """
    for name in suites:
        check_id(name, "suites: name")
    numbers = list(suites.values())
    if min(numbers, default=0) < 0 or sum(numbers) != len(tasks):
        raise RecordError(
            f"suites={dict(suites)} with {len(tasks)} eval_tasks; they consist of their suites, "
            "one after the other"
        )
    found, first = [], 0
    for name, number in suites.items():
        own = tasks[first : first + number]
        found.append(list(encode_tasks(own, f"eval_tasks of {name!r}")))
        first += number
    return found


def refuse_overlap(tasks: Iterable[Task], eval_tasks: Iterable[Task]) -> None:
    """Check that no evaluation task has the payload of a training task.

    Raises:
        RecordError: names both.
    """
    held_out = {msgspec.json.encode(t.payload, order="deterministic"): t for t in eval_tasks}
    # Of millions of training tasks nothing is kept.
    for task in tasks if held_out else ():
        twin = held_out.get(msgspec.json.encode(task.payload, order="deterministic"))
        if twin is not None:
            raise RecordError(
                f"eval_tasks: task_id={twin.task_id!r} has the payload of the training task "
                f"task_id={task.task_id!r}; evaluation must not be trained on. Remove it from one"
            )


def check_sources(sources: Sequence[TaskSource], num_tasks: int) -> None:
    """Check that the sources make up the tasks, and that their weights can choose one.

    Raises:
        RecordError: names what is wrong.
    """
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise RecordError(f"sources={names}; each name once is allowed")
    sizes = {source.name: source.num_tasks for source in sources}
    # A run may have evaluation tasks only.
    if sum(sizes.values()) != num_tasks or (num_tasks and min(sizes.values()) < 1):
        raise RecordError(
            f"sources={sizes}, num_tasks={num_tasks}; sizes above 0 that add up are allowed"
        )
    check_weights([source.weight for source in sources], names)


def encode_priorities(tasks: Sequence[Task], sources: Sequence[TaskSource]) -> bytes:
    """Bytes of the priorities: each task's own plus its source's; empty if all are equal.

    Raises:
        RecordError: one is no whole number within bounds; names the field.
    """
    values = np.zeros(len(tasks), dtype="<i4")
    places = enumerate(tasks)
    for source in sources:
        base = _check_priority(source.priority, f"sources: {source.name!r}: priority")
        for place, task in islice(places, source.num_tasks):
            own = _check_priority(task.priority, f"tasks: {task.task_id!r}: priority")
            values[place] = base + own
    return values.tobytes() if (values != values[:1]).any() else b""


def deadline_of(task: Task, default_s: float) -> float:
    """Seconds that an episode of the task may take: the task's `deadline_s`, or the run's."""
    own = task.payload.get("deadline_s")
    if isinstance(own, int | float) and not isinstance(own, bool) and own > 0:
        return float(own)
    return default_s


def refuse_cut(tasks: Iterable[Task], settings: Settings) -> None:
    """Check that no task's own deadline is later than its group's; see Settings.refuse_cut.

    Raises:
        RecordError: names the task.
    """
    for task in tasks:
        deadline_s = deadline_of(task, 0.0)
        try:
            settings.refuse_cut(deadline_s, f"task_id={task.task_id!r}: deadline_s")
        except ValueError as error:
            raise RecordError(str(error)) from error


def tasks_digest(lists: Iterable[tuple[int, Iterable[bytes]]], priorities: bytes = b"") -> str:
    """SHA-256 over all encoded tasks, the lengths of their lists, and their priorities.

    Args:
        lists: the number of tasks of each, and the tasks.
    """
    digest = hashlib.sha256(priorities)
    for number, records in lists:
        digest.update(f"{number}:".encode())
        for record in records:
            digest.update(hashlib.sha256(record).digest())
    return digest.hexdigest()


def _check_priority(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MAX_PRIORITY:
        raise RecordError(
            f"{name}={value!r}; a whole number from -{_MAX_PRIORITY} to {_MAX_PRIORITY} is allowed"
        )
    return value
