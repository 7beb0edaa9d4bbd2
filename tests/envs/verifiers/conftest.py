"""Tasks and results for verifiers."""

from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.records import Task
from outloop.envs.verifiers.result import Result


@pytest.fixture
def judge() -> Callable[..., Any]:
    """`judge(verifier, "the answer", answer="42")`: the verdict on an answer to that payload."""

    def call(verifier: Callable[[Task, Result], Any], given: str, **payload: object) -> Any:
        return verifier(Task(task_id="t", payload=payload), Result(answer=given))

    return call
