"""Reads tool calls from an answer and compares them with those that a task allows.

No answer raises. Text that cannot be read is no call; beside calls, or between tags, it is a call
that no task allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outloop.buffer.records import Task
from outloop.envs.verifiers.blame import lowest_if_it_raises
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import end_of, field_of, strict_json

_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
Call = tuple[str, Mapping[str, object]]


@dataclass(frozen=True, kw_only=True)
class ToolCalls:
    """Scores an answer that must make the task's tool calls, and no others.

    The task's field is a list of {"name", "arguments"}, or of {NAME: {ARGUMENT: [allowed, ...]}},
    as in the possible answers of the Berkeley function calling leaderboard ("": the argument may
    be left out).
    """

    field: str = "tool_calls"
    is_ordered: bool = False
    gives_part: bool = False
    """True: the share of the expected calls, less the unexpected calls."""

    @lowest_if_it_raises
    def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0, or the share."""
        expected = field_of(task, self.field, list)
        made = _calls(result.answer)
        if self.is_ordered:
            num_right = sum(_allows(one, call) for one, call in zip(expected, made, strict=False))
        else:
            num_right = _num_matched(expected, made)
        most = max(len(expected), len(made), 1)
        share = num_right / most if expected or made else 1.0
        return share if self.gives_part else float(share == 1.0)


def read_calls(answer: str) -> list[Call]:
    """The calls in an answer: JSON (one or a list, plain or in OpenAI's form), or between tags."""
    return [call for call in _calls(answer) if call is not None]


def _calls(answer: str) -> list[Call | None]:
    """The calls in an answer; None for one that cannot be read, beside others or between tags."""
    text = end_of(answer)
    tagged = _TAGGED.findall(text)
    num_open = max(text.count("<tool_call>"), text.count("</tool_call>"))
    if num_open:
        unclosed: list[Call | None] = [None] * (num_open - len(tagged))
        return [call for part in tagged for call in _calls_of(_json(part))] + unclosed
    calls = _calls_of(_json(text))
    return calls if any(call is not None for call in calls) else []


def _calls_of(value: object) -> list[Call | None]:
    return [_call(item) for item in (value if isinstance(value, list) else [value])]


def _json(text: str) -> object:
    try:
        value: object = strict_json(text)
    except (ValueError, RecursionError):
        return None
    return value


def _call(item: object) -> Call | None:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return (item["name"], arguments) if isinstance(arguments, dict) else None


def _num_matched(expected: Sequence[object], made: Sequence[Call | None]) -> int:
    """The largest number of calls that can be paired; a call may fit several expected ones."""
    partner: dict[int, int] = {}

    def place(one: int, seen: set[int]) -> bool:
        for index, call in enumerate(made):
            if index in seen or not _allows(expected[one], call):
                continue
            seen.add(index)
            if index not in partner or place(partner[index], seen):
                partner[index] = one
                return True
        return False

    return sum(place(one, set()) for one in range(len(expected)))


def _allows(expected: object, call: Call | None) -> bool:
    if call is None:
        return False
    name, arguments = call
    if not isinstance(expected, dict):
        return False
    plain = _call(expected)
    if plain is not None:
        return plain[0] == name and _same(plain[1], arguments)
    allowed = expected.get(name)
    if not isinstance(allowed, dict) or not set(arguments) <= set(allowed):
        return False
    return all(
        any(_same(value, arguments[key]) for value in values) if key in arguments else "" in values
        for key, values in allowed.items()
    )


def _same(one: object, other: object) -> bool:
    """True if both are equal as JSON: 1 equals 1.0, and does not equal true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other
