"""The list of promises and rules is complete, and each is held by tests that exist."""

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = tomllib.loads((Path(__file__).parent / "rules.toml").read_text())
EXPECTED = [f"P{n}" for n in range(1, 9)] + [f"R{n}" for n in range(1, 21)]


@cache
def functions_in(path: str) -> frozenset[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_no_promise_and_no_rule_is_missing() -> None:
    """Promises and rules are listed, nothing else."""
    assert list(RULES) == EXPECTED


@pytest.mark.medium
@pytest.mark.parametrize("name", EXPECTED)
def test_each_is_held_by_tests_that_exist(name: str) -> None:
    """A rule names tests that exist, and for what is pending the part that it waits for."""
    rule = RULES[name]
    assert set(rule) <= {"text", "tests", "pending"}
    assert rule["tests"]
    for test in rule["tests"]:
        path, _, function = test.partition("::")
        assert function in functions_in(path), test
    assert set(rule.get("pending", {})) <= {"router", "buffer", "servers", "trainer", "envs"}
