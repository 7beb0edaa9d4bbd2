"""Turns of answers at the machine: who runs into a limit delays nobody else for long."""

import asyncio
import time
from typing import Any

import pytest

from outloop.buffer.records import Task
from outloop.buffer.settings.env import EnvSettings
from outloop.envs.command_agent.verifier import VerifierTimeout, load_verifier, verify
from outloop.envs.sandbox.api import Limits
from outloop.envs.verifiers.code import InputOutput, UnitTests
from outloop.envs.verifiers.math_equivalence import Math
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.text import Regex
from outloop.envs.verifiers.turns import Turns

LIMITS = Limits(wall_s=2, cpu_s=2, memory_bytes=256 * 2**20)


async def test_short_turns_pass_long_ones() -> None:
    """Long turns leave a place free, and come after all short ones that wait."""
    turns, order = Turns[int](1), []

    async def take(name: str, *, is_long: bool = False) -> None:
        async with turns.turn(is_long=is_long):
            order.append(name)
            await asyncio.sleep(0.02)

    names = [take("long 1", is_long=True), take("long 2", is_long=True)]
    await asyncio.gather(*names, *(take(f"short {n}") for n in range(3)))
    assert order == ["long 1", "short 0", "short 1", "short 2", "long 2"]


async def test_who_leaves_the_queue_takes_no_place_along() -> None:
    """A cancelled wait, and a place that came in the moment of the cancellation, are given on."""
    turns = Turns[int](1)
    async with turns.turn(is_long=True), turns.turn(is_long=False):
        left = [asyncio.ensure_future(turns.turn(is_long=n > 0).__aenter__()) for n in range(2)]
        await asyncio.sleep(0)
        for one in left:
            one.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    async with asyncio.timeout(5), turns.turn(is_long=True), turns.turn(is_long=False):
        pass


HOSTILE: dict[str, tuple[Any, dict[str, object], str, str]] = {
    "a loop for unit tests": (
        lambda: UnitTests(limits=LIMITS),
        {"test": ["assert f(1) == 1"]},
        "def f(x):\n    while True: pass",
        "def f(x): return x",
    ),
    "a program that sleeps": (
        lambda: InputOutput(limits=LIMITS),
        {"cases": [{"input": "1", "output": "1"}]},
        "import time\ntime.sleep(1.9)",
        "print(input())",
    ),
    "a sum without end": (
        lambda: Math(timeout_s=1.2),
        {"answer": "5"},
        r"\boxed{\int_0^{9^{9^9}} \frac{\sin k}{k^k} dk + 9^{9^{9^9}}}",
        r"\boxed{5}",
    ),
    "a pattern without end": (lambda: Regex(r"^(?:a+)+$", timeout_s=1.2), {}, "a" * 40 + "b", "a"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_right_answer_behind_sixteen_hostile_ones_is_scored(name: str) -> None:
    """All are scored: the right ones soon, and those that used their limits up as wrong."""
    make, payload, hostile, right = HOSTILE[name]
    verifier, task = make(), Task(task_id="t", payload=payload)
    done: list[str] = []

    async def score(answer: str) -> float:
        value: float = await verifier(task, Result(answer=answer))
        done.append(answer)
        return value

    given = [hostile] * 16 + [right] * 2
    assert await asyncio.gather(*map(score, given)) == [0.0] * 16 + [1.0] * 2
    assert set(done[-4:]) == {hostile}
    await verifier.tear_down()


@pytest.mark.slow
async def test_the_episodes_end_is_the_failure_of_who_used_its_turn_up() -> None:
    """Loops that wait for their long turn are late by their own fault; right ones are scored."""
    env = EnvSettings(verifier="outloop.envs.verifiers.presets:unit_tests")
    verifier = load_verifier(env)
    task = Task(task_id="t", payload={"test": ["assert f(1) == 1"]})
    deadline = time.time() + 20

    async def score(answer: str) -> float | str:
        try:
            result = Result(answer=answer)
            reward = await verify(verifier, task, result, timeout_s=30, deadline=deadline)
        except VerifierTimeout:
            return "late"
        return reward.value

    loop, right = "def f(x):\n    while True: pass", "def f(x): return x"
    scores = await asyncio.gather(*map(score, [loop] * 16 + [right] * 2))
    assert set(scores[:16]) <= {0.0, "late"}
    assert "late" in scores[:16]
    assert scores[16:] == [1.0, 1.0]
    await verifier.tear_down()
