"""Scores code by two components: it passes its tests in a sandbox, and it is Python at all."""

import ast

from outloop.envs.verifiers.code import UnitTests
from outloop.envs.verifiers.task_fields import code_of

_unit_tests = UnitTests()
tear_down = _unit_tests.tear_down


def parses(prompt: str, answer: str) -> bool:
    """Whether the prompt and what was added to it are Python."""
    try:
        ast.parse(f"{prompt}\n{code_of(answer)}")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


async def verify(task, result):
    """`parses` is for policies that pass no test yet."""
    return {
        "passed": await _unit_tests(task, result),
        "parses": float(parses(task.payload["prompt"], result.answer)),
    }
