"""No hostile answer is free: it scores 0, and right answers behind it score 1.

Every hostile answer meets every verifier that judges its kind, alone and beside fifteen others or
more. A failure of the environment would be played again instead of scored. Loops that use their
limits up are in verifiers/test_turns.py, adapters in their own tests.
"""

import asyncio
import json
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.records import Reward, Task
from outloop.buffer.settings.env import EnvSettings
from outloop.envs.command_agent.verifier import load_verifier, verify
from outloop.envs.sandbox.api import Limits
from outloop.envs.verifiers.code import InputOutput, UnitTests
from outloop.envs.verifiers.math_equivalence import Math
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.text import Exact, JsonSchema, Number, Regex
from outloop.envs.verifiers.tool_calls import ToolCalls
from outloop.envs.verifiers.weighted_sum import Weighted

FORGERY = runpy.run_path(str(Path(__file__).parent / "verifiers/test_forgery.py"))
LIMITS = Limits(wall_s=6, cpu_s=1, memory_bytes=256 * 2**20, max_processes=8)
CODE = [FORGERY["ATTACKS"][name] for name in sorted(FORGERY["ATTACKS"].keys() - FORGERY["GREEDY"])]
PRINT = "\nprint(f(eval(input())))\n"
CALL = json.dumps({"name": "f", "arguments": {"x": 1}})
TEXT = [
    *("move e4", "see table2", "1e999", "9" * 5000, "-", "\u2212", "\ud800", "\x00", "", "NaN"),
    *("[" * 10_000, '{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": "x"}', "x" * 2**20, "```" * 9999),
    *("<tool_call>{", CALL.replace("1", "NaN"), f"<tool_call>{CALL}</tool_call></tool_call>"),
    *(
        r"\boxed{40+2}",
        r"\boxed{6 \cdot 7}",
        r"\boxed{\sum_{k=1}^{6} 2k}",
        r"\boxed{\binom{7}{2}2}",
    ),
    *(r"\boxed{" * 999, r"\boxed{\frac{1}{0}}", r"\boxed{42, 43}", r"\boxed{9^{9^{9^{9}}}}"),
    *("a" * 40 + "b", "def f(x):\n    while True: pass", "<|im_end|>", "import os\nos._exit(0)"),
]
PAYLOAD: dict[str, object] = {
    "answer": "42",
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "tool_calls": [{"name": "f", "arguments": {"x": 1}}],
    "test": FORGERY["ASSERTIONS"],
    "cases": [{"input": "[3, 1]", "output": "[1, 3]"}, {"input": "[2]", "output": "[2]"}],
}
VERIFIERS: dict[str, tuple[Callable[[], Any], list[str], str]] = {
    "exact": (Exact, TEXT, "42"),
    "number": (Number, TEXT, "It is 42"),
    "math": (lambda: Math(timeout_s=1), TEXT, r"\boxed{42}"),
    "regex": (lambda: Regex(r"^(?:(?:a+)+|It is (\d+))$", timeout_s=1), TEXT, "It is 42"),
    "schema": (lambda: JsonSchema(timeout_s=1), TEXT, '{"a": 42}'),
    "calls": (ToolCalls, TEXT, CALL),
    "weighted": (lambda: Weighted({"e": (Exact(), 0.5), "n": (Number(), 0.5)}), TEXT, "42"),
    "unit tests": (lambda: UnitTests(limits=LIMITS), [*CODE, *TEXT], FORGERY["RIGHT"]),
    "unit test shares": (
        lambda: UnitTests(limits=LIMITS, gives_part=True),
        CODE,
        FORGERY["RIGHT"],
    ),
    "programs": (
        lambda: InputOutput(limits=LIMITS),
        [*(one + PRINT for one in CODE), *TEXT],
        FORGERY["RIGHT"] + PRINT,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIERS)
async def test_hostile_answers_score_0_and_right_ones_behind_them_1(name: str) -> None:
    """All at once, with two right answers last; then each text alone."""
    make, hostile, right = VERIFIERS[name]
    verifier, task = make(), Task(task_id="t", payload=PAYLOAD)

    async def score(answer: str) -> float:
        scored = verifier(task, Result(answer=answer))
        scored = await scored if asyncio.iscoroutine(scored) else scored
        return scored.value if isinstance(scored, Reward) else float(scored)

    given = [*hostile, right, right]
    scores = dict(zip(given, await asyncio.gather(*map(score, given)), strict=True))
    assert {answer[:80]: value for answer, value in scores.items() if value} == {right[:80]: 1.0}
    if hostile is TEXT:
        assert [await score(answer) for answer in (*TEXT[:8], right)] == [0.0] * 8 + [1.0]
    if hasattr(verifier, "tear_down"):
        await verifier.tear_down()


@pytest.mark.parametrize(
    ("preset", "right"),
    [
        ("exact", "42"),
        ("number", "42"),
        ("math", r"\boxed{42}"),
        ("json_schema", '{"a": 42}'),
        ("tool_calls", CALL),
        ("unit_tests", FORGERY["RIGHT"]),
        ("input_output", FORGERY["RIGHT"] + PRINT),
    ],
)
async def test_no_preset_of_the_runner_is_free(preset: str, right: str) -> None:
    """The same through the runner's own call, which tries a verifier that raises again."""
    verifier = load_verifier(EnvSettings(verifier=f"outloop.envs.verifiers.presets:{preset}"))
    task, deadline = Task(task_id="t", payload=PAYLOAD), time.time() + 120
    hostile = [one for one in TEXT if "while True" not in one and "9^{9" not in one]

    async def score(answer: str) -> float:
        result = Result(answer=answer)
        reward = await verify(verifier, task, result, timeout_s=60, deadline=deadline)
        return reward.value

    scores = await asyncio.gather(*map(score, [*hostile, right, right]))
    assert scores == [0.0] * len(hostile) + [1.0, 1.0]
    await verifier.tear_down()
