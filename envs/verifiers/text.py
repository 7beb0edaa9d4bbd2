"""Compares text: exactly, as numbers, and in worker processes by patterns and JSON schemas.

The score is 1 or 0 for any answer. Patterns never run in this process, since an answer can be
written so that they never end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from outloop.buffer.records import Task
from outloop.envs.verifiers.judgement_pool import JudgementPool
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import end_of, field_of, text_of

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")
_MAX_NUMBER_CHARS = 400


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The answer is equal to the task's, except for white space at its ends."""

    field: str = "answer"
    ignores_case: bool = False

    def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0."""
        expected, answer = text_of(task, self.field).strip(), result.answer.strip()
        if self.ignores_case:
            expected, answer = expected.casefold(), answer.casefold()
        return float(expected == answer)


@dataclass(frozen=True, kw_only=True)
class Number:
    """The last number of the answer equals the task's, within a tolerance."""

    field: str = "answer"
    relative: float = 1e-6
    absolute: float = 1e-9
    marker: str = ""
    """Only the text after its last occurrence counts; "####" for example."""

    def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0."""
        expected = last_number(text_of(task, self.field))
        if expected is None:
            raise ValueError(f"task_id={task.task_id!r}: {self.field!r} holds no number")
        answer = end_of(result.answer)
        if self.marker:
            _, found, answer = answer.rpartition(self.marker)
            if not found:
                return 0.0
        given = last_number(answer)
        if given is None:
            return 0.0
        return float(math.isclose(given, expected, rel_tol=self.relative, abs_tol=self.absolute))


def last_number(text: str) -> float | None:
    """The last number written in decimal digits; commas between thousands are skipped."""
    last = None
    for match in _NUMBER.finditer(text):
        if any(character.isdigit() for character in match[0][:_MAX_NUMBER_CHARS]):
            last = match[0]
    if last is None or len(last) > _MAX_NUMBER_CHARS:
        return None
    number = float(last.replace(",", ""))
    return number if math.isfinite(number) else None


class Regex:
    """The answer matches the pattern; its first group, if any, must equal the task's answer."""

    def __init__(
        self,
        pattern: str,
        *,
        field: str = "answer",
        timeout_s: float = 2.0,
        workers: JudgementPool | None = None,
    ) -> None:
        self._pattern = re.compile(pattern)
        self._field = field
        self._timeout_s = timeout_s
        self._workers = workers or JudgementPool()

    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0; an answer that cannot be matched in time is wrong."""
        expected = text_of(task, self._field) if self._pattern.groups else ""
        job = ("regex", self._pattern.pattern, end_of(result.answer))
        found = await self._workers.call(job, timeout_s=self._timeout_s)
        if found is None or not self._pattern.groups:
            return float(found is not None)
        return float(found.strip() == expected.strip())

    async def tear_down(self) -> None:
        """Stop the workers."""
        await self._workers.close()


class JsonSchema:
    """The answer is JSON that fits the schema."""

    def __init__(
        self,
        schema: Mapping[str, object] | None = None,
        *,
        field: str = "schema",
        timeout_s: float = 2.0,
        workers: JudgementPool | None = None,
    ) -> None:
        self._schema = schema
        self._field = field
        self._timeout_s = timeout_s
        self._workers = workers or JudgementPool(preload=("jsonschema",))

    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0."""
        schema = self._schema if self._schema is not None else field_of(task, self._field, dict)
        job = ("json_schema", json.dumps(schema), end_of(result.answer))
        return float(await self._workers.call(job, timeout_s=self._timeout_s) == "valid")

    async def tear_down(self) -> None:
        """Stop the workers."""
        await self._workers.close()
