"""Reads the tasks of a run from JSONL files and functions.

A task_id names one content, and no task is both trained and evaluated; anything else is refused.
The buffer decides the order in which tasks are played.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import structlog

from outloop.buffer.errors import SettingsError
from outloop.buffer.foreign_text import storable
from outloop.buffer.records import Task
from outloop.buffer.settings import Settings
from outloop.buffer.tasks.mixture import TaskSource
from outloop.buffer.user_code import import_folders, import_object, text_of
from outloop.envs.tasks.splits import content_hash, refuse_no_choice, split_sources

_log = structlog.get_logger()
_ID_CHARS = 32
_MAX_DEPTH = 64
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
"""That MessagePack holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTasks:
    """The tasks of a run: the sources one after the other, and the evaluation tasks."""

    tasks: tuple[Task, ...]
    eval_tasks: tuple[Task, ...]
    sources: tuple[TaskSource, ...]
    suites: dict[str, int]
    """Of which `eval_tasks` consist, in order: name and number of tasks."""


def load_run_tasks(settings: Settings) -> RunTasks:
    """Load the training and evaluation tasks of a run.

    Raises:
        SettingsError: a source is missing, malformed (with its line), empty, or both overlap.
    """
    env = settings.env
    lists = _load_sources(settings)
    suites: dict[str, tuple[Task, ...]] = {}
    if env.eval_tasks is not None:
        if env.split is not None:
            raise SettingsError(
                f"env.split={env.split} and env.eval_tasks={env.eval_tasks!r} are both given; "
                "leave one out"
            )
        suites["validation"] = load_tasks(
            env.eval_tasks, setting="env.eval_tasks", import_dir=env.import_dir
        )
    elif env.split is not None:
        # Before mixing: a content is in the same split in every source.
        lists, held_out = split_sources(lists, env)
        suites["validation"] = held_out[env.eval_split]
        if settings.eval.chooses_checkpoint:
            refuse_no_choice(held_out, env)
            suites["test"] = held_out["test"]
    elif settings.eval.every > 0:
        raise SettingsError(
            f"eval.every={settings.eval.every} needs env.eval_tasks or env.split; give held-out "
            "tasks, or set eval.every to 0"
        )
    suites |= _load_suites(settings)
    eval_tasks = tuple(task for some in suites.values() for task in some)
    _refuse_repeats(lists)
    tasks = tuple(task for some in lists.values() for task in some)
    _refuse_overlap(tasks, eval_tasks)
    mixed = {} if isinstance(env.tasks, str) or env.tasks is None else env.tasks
    sources = tuple(
        TaskSource(name, len(some), mixed[name].weight, mixed[name].priority)
        if name in mixed
        else TaskSource(name, len(some))
        for name, some in lists.items()
    )
    return RunTasks(
        tasks=tasks,
        eval_tasks=eval_tasks,
        sources=sources,
        suites={name: len(some) for name, some in suites.items()},
    )


def _load_suites(settings: Settings) -> dict[str, tuple[Task, ...]]:
    """The tasks of the suites that have some of their own; one list for suites with equal ones."""
    plan, env = settings.eval, settings.env
    return {
        name: load_tasks(
            suite.tasks, setting=f"eval.suites.{name}.tasks", import_dir=env.import_dir
        )
        for name, suite in plan.suites.items()
        if suite.tasks is not None and plan.task_list(name) == name
    }


def _load_sources(settings: Settings) -> dict[str, tuple[Task, ...]]:
    env = settings.env
    if not env.tasks:
        raise SettingsError(
            "env.tasks is missing; give a JSONL file, or package.module:function that returns tasks"
        )
    if isinstance(env.tasks, str):
        loaded = load_tasks(env.tasks, setting="env.tasks", import_dir=env.import_dir)
        return {"tasks": loaded}
    weights = {name: source.weight for name, source in env.tasks.items()}
    if sum(weights.values()) <= 0:
        raise SettingsError(f"env.tasks: weights={weights}; at least one above 0 is needed")
    return {
        name: load_tasks(
            source.source, setting=f"env.tasks.{name}.source", import_dir=env.import_dir
        )
        for name, source in env.tasks.items()
    }


def _refuse_repeats(lists: dict[str, tuple[Task, ...]]) -> None:
    """Refuse a task in two sources, since it would be played too often."""
    owners: dict[str, str] = {}
    for name, some in lists.items():
        for task in some:
            other = owners.setdefault(task.task_id, name)
            if other != name:
                raise SettingsError(
                    f"env.tasks: task_id={task.task_id!r} is in {other!r} and in {name!r}; "
                    "keep it in one, and give different tasks different ids"
                )


def load_tasks(source: str, *, setting: str, import_dir: Path | None) -> tuple[Task, ...]:
    """Load tasks from a JSONL file or `package.module:function`; equal contents are one task.

    A row is a JSON object: either {"task_id", "payload"}, or the payload itself. Without a
    task_id the id is the content's hash.

    Raises:
        SettingsError: the row is named by file and line, or by its index.
    """
    tasks: dict[str, Task] = {}
    num_repeated = 0
    for place, row in read_rows(source, setting=setting, import_dir=import_dir):
        task = _task(row, place)
        known = tasks.setdefault(task.task_id, task)
        if known is not task:
            num_repeated += 1
            if content_hash(known.payload) != content_hash(task.payload):
                raise SettingsError(
                    f"{place}: task_id={task.task_id!r} names another task already; "
                    "give each task its own id, or leave task_id out"
                )
    if not tasks:
        raise SettingsError(f"{setting}={source!r} gives no task; at least one is needed")
    if num_repeated:
        _log.warning("repeated_tasks", setting=setting, num_repeated=num_repeated)
    return tuple(tasks.values())


def read_rows(source: str, *, setting: str, import_dir: Path | None) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of a JSONL file or an imported iterable; errors name `place`.

    Raises:
        SettingsError: no such file or function, a line that is not JSON, not an iterable.
    """
    path = _find_file(source, import_dir)
    if path is not None:
        yield from _read_jsonl(path)
        return
    if ":" not in source or source.endswith((".jsonl", ".json")):
        where = " or ".join(str(folder) for folder in import_folders(import_dir))
        raise SettingsError(
            f"{setting}={source!r}: there is no such file in {where}; "
            "give a JSONL file, or package.module:function"
        )
    found = import_object(source, setting=setting, import_dir=import_dir)
    try:
        rows = found() if callable(found) else found
        if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
            raise SettingsError(
                f"{setting}={source!r} gives a {type(rows).__name__}; "
                "an iterable of dicts is allowed"
            )
        for index, row in enumerate(rows):
            yield f"{setting}={source!r}, item {index}", row
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise SettingsError(
            f"{setting}={source!r} raised {type(error).__name__}: {text_of(error)}; "
            "run it on its own and correct it"
        ) from error


def _find_file(source: str, import_dir: Path | None) -> Path | None:
    for folder in import_folders(import_dir):
        path = folder / source
        if path.is_file():
            return path
    return None


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        lines = enumerate(file, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise SettingsError(f"{path}: not UTF-8 text: {error}; save it as UTF-8") from error
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line, object_pairs_hook=_object, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                why = str(error)
                if isinstance(error, json.JSONDecodeError):
                    why = f"{error.msg} at column {error.colno}"
                elif isinstance(error, RecursionError):
                    why = f"lists and objects are nested deeper than {_MAX_DEPTH}"
                raise SettingsError(
                    f"{place}: not JSON ({why}): "
                    f"{line.strip()[:80]!r}; write one JSON object per line"
                ) from error
            yield place, row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} is given twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def refuse_unstorable(content: object, place: str) -> None:
    """Refuse what JSON and MessagePack do not hold alike, because the run would lose or change it.

    Raises:
        SettingsError: names the field and what is allowed.
    """
    waiting: list[tuple[str, object, int]] = [("", content, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        why = _why_unstorable(value, depth)
        if why:
            raise SettingsError(f"{place}: {storable(name)[:200] or 'the task'} {why}")
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{key}".lstrip("."), one, depth + 1) for key, one in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(f"{name}[{index}]", one, depth + 1) for index, one in enumerate(value)]


def _why_unstorable(value: object, depth: int) -> str:
    """What is wrong with a value, apart from what it holds; empty: nothing."""
    match value:
        case bool() | None:
            return ""
        case str() if not _has_utf8(value):
            return "holds half of a surrogate pair; text that UTF-8 can hold is allowed"
        case int() if not _MIN_INT <= value <= _MAX_INT:
            return "is a whole number of more than 64 bits; write it as a string"
        case float() if not math.isfinite(value):
            return f"is {value}; a finite number is allowed, or null"
        case str() | int() | float():
            return ""
        case dict() | list() | tuple() if depth >= _MAX_DEPTH:
            return f"is nested deeper than {_MAX_DEPTH} lists and objects; write it as a string"
        case dict():
            wrong = [key for key in value if not isinstance(key, str) or not _has_utf8(key)]
            return f"has the name {wrong[0]!r}; names are text that UTF-8 can hold" if wrong else ""
        case list() | tuple():
            return ""
    return (
        f"is a {type(value).__name__}, which cannot be written as JSON; use strings, numbers, "
        "lists and objects"
    )


def _has_utf8(text: str) -> bool:
    return storable(text) is text


def _task(row: object, place: str) -> Task:
    if isinstance(row, Task):
        row = {"task_id": row.task_id, "payload": row.payload, "priority": row.priority}
    if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
        raise SettingsError(
            f"{place}: {str(row)[:80]!r} is a {type(row).__name__}; "
            'an object is allowed, for example {"question": "12*7"}'
        )
    fields = dict(row)
    task_id = fields.pop("task_id", None)
    priority = 0
    if set(fields) in ({"payload"}, {"payload", "priority"}):
        priority, fields = fields.get("priority", 0), fields["payload"]
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise SettingsError(f"{place}: priority={priority!r}; a whole number is allowed")
    if not isinstance(fields, dict) or not fields:
        raise SettingsError(f"{place}: payload={fields!r}; a non-empty object is allowed")
    refuse_unstorable(fields, place)
    digest = content_hash(fields)
    deadline_s = fields.get("deadline_s", 1.0)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or deadline_s <= 0:
        raise SettingsError(
            f"{place}: deadline_s={deadline_s!r}; the seconds that an episode of this task may "
            "take, above 0, are allowed"
        )
    if task_id is None:
        task_id = digest[:_ID_CHARS]
    if not isinstance(task_id, str) or not 0 < len(task_id) <= 200 or not task_id.isprintable():
        raise SettingsError(
            f"{place}: task_id={task_id!r}; a string of 1 to 200 printable characters is allowed"
        )
    return Task(task_id=task_id, payload=fields, priority=priority)


def _refuse_overlap(tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> None:
    trained = {content_hash(task.payload): task for task in tasks}
    shared = [task for task in eval_tasks if content_hash(task.payload) in trained]
    if shared:
        raise SettingsError(
            f"{len(shared)} of {len(eval_tasks)} tasks of env.eval_tasks and eval.suites are in "
            f"env.tasks too, for example payload={str(shared[0].payload)[:120]}; evaluation tasks "
            "must be held out: "
            "leave env.eval_tasks out and set env.split, or remove them from env.tasks"
        )
    ids = {task.task_id for task in tasks}
    for task in eval_tasks:
        if task.task_id in ids:
            raise SettingsError(
                f"task_id={task.task_id!r} is in env.tasks and env.eval_tasks with different "
                "contents; give each task its own id, or leave task_id out"
            )
