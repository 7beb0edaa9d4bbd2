"""Compares text: exactly, as numbers, and in worker processes by patterns and JSON schemas.

The score is 1 or 0 for any answer. Patterns never run in this process, since an answer can be
written so that they never end.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from outloop.buffer.errors import EnvironmentFailure
from outloop.buffer.records import Task
from outloop.envs.verifiers.blame import lowest_if_it_raises
from outloop.envs.verifiers.judgement_pool import JudgementPool
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import end_of, field_of, text_of

_NUMBER = re.compile(
    r"(?<![\w)\]])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?"
    r"|(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?",
    re.IGNORECASE | re.ASCII,
)
"""A minus after a letter, a digit or a bracket is an operator, or joins a range."""
_MAX_NUMBER_CHARS = 400
_MINUS = "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d"
_GROUPING = "\u00a0\u2007\u2009\u202f'\u2019\uff0c\u066c"
_POINTS = "\uff0e\u066b"
_RELATIVE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The answer is equal to the task's, except for white space at its ends."""

    field: str = "answer"
    ignores_case: bool = False

    @lowest_if_it_raises
    def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0."""
        expected, answer = text_of(task, self.field).strip(), result.answer.strip()
        if self.ignores_case:
            expected, answer = expected.casefold(), answer.casefold()
        return float(expected == answer)


@dataclass(frozen=True, kw_only=True)
class Number:
    """The last number of the answer equals the task's: whole numbers exactly, others closely."""

    field: str = "answer"
    relative: float | None = None
    """Relative tolerance. None: 1e-6, and none if the task's number is whole."""
    absolute: float = 1e-9
    marker: str = ""
    """Only the text after its last occurrence counts; "####" for example."""

    @lowest_if_it_raises
    def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0.

        Raises:
            EnvironmentFailure: the task holds no number.
        """
        expected = _last(text_of(task, self.field))
        if expected is None:
            raise EnvironmentFailure(f"task_id={task.task_id!r}: {self.field!r} holds no number")
        answer = end_of(result.answer)
        if self.marker:
            _, found, answer = answer.rpartition(self.marker)
            if not found:
                return 0.0
        given = _last(answer)
        if given is None:
            return 0.0
        if self.relative is None and expected == expected.to_integral_value():
            return float(abs(given - expected) <= Decimal(self.absolute))
        relative = _RELATIVE if self.relative is None else self.relative
        return float(
            math.isclose(float(given), float(expected), rel_tol=relative, abs_tol=self.absolute)
        )


def last_number(text: str) -> float | None:
    """The last number written in decimal digits of any script, as people write numbers.

    A minus may be any character that looks like one. Commas, apostrophes and narrow spaces between
    thousands are skipped.
    """
    number = _last(text)
    return None if number is None else float(number)


def _last(text: str) -> Decimal | None:
    last = ""
    for match in _NUMBER.finditer(_plain(text)):
        last = match[0]
    if not last or len(last) > _MAX_NUMBER_CHARS:
        return None
    digits = last.replace(",", "")
    return Decimal(digits) if math.isfinite(float(digits)) else None


def _plain(text: str) -> str:
    """The text with ASCII digits, minuses, points and commas between thousands."""
    if text.isascii():
        return re.sub(r"(?<=\d)(?:\{,\}|,\\!|\\,|['_])(?=\d{3})", ",", text)
    plain = []
    for character in text:
        if character in _MINUS:
            plain.append("-")
        elif character in _GROUPING:
            plain.append(",")
        elif character in _POINTS:
            plain.append(".")
        elif character.isdecimal():
            plain.append(str(unicodedata.decimal(character)))
        else:
            # No other character is a letter or a digit of ASCII.
            plain.append(character)
    return _plain("".join(plain).encode("ascii", "replace").decode())


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

    @lowest_if_it_raises
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

    @lowest_if_it_raises
    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0."""
        schema = self._schema if self._schema is not None else field_of(task, self._field, dict)
        job = ("json_schema", json.dumps(schema), end_of(result.answer))
        return float(await self._workers.call(job, timeout_s=self._timeout_s) == "valid")

    async def tear_down(self) -> None:
        """Stop the workers."""
        await self._workers.close()
