"""Judgements in worker processes: verdicts, deadlines, hostile answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
import pytest_asyncio

from outloop.buffer.errors import EnvironmentFailure
from outloop.envs.verifiers.judgement_pool import JudgementPool
from outloop.envs.verifiers.math_equivalence import Math
from outloop.envs.verifiers.text import JsonSchema, Regex

Judge = Callable[..., Any]
pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOW = "a" * 40 + "b"
"""For (a+)+$: doubles the work with every letter."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def math() -> AsyncIterator[Math]:
    """One math verifier for all tests: math-verify takes seconds to import."""
    verifier = Math(timeout_s=20.0, num_workers=2)
    yield verifier
    await verifier.tear_down()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def workers() -> AsyncIterator[JudgementPool]:
    """Two workers without anything preloaded."""
    made = JudgementPool(2)
    yield made
    await made.close()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("expected", "given", "is_right"),
    [
        ("1/2", "0.5", 1.0),
        ("72", r"so the answer is \boxed{72}", 1.0),
        ("72", r"\boxed{73}, not 71", 0.0),
        ("x^2-1", "$(x-1)(x+1)$", 1.0),
        (r"\{1,2\}", r"$\{2, 1\}$", 1.0),
        (r"\sqrt{8}", r"$2\sqrt{2}$", 1.0),
        (1234, "1,234", 1.0),
        ("5", "I do not know", 0.0),
        ("5", "", 0.0),
    ],
)
async def test_math_is_compared_as_mathematics(
    judge: Judge, math: Math, expected: object, given: str, is_right: float
) -> None:
    """Equal in value is right, however it is written."""
    assert await judge(math, given, answer=expected) == is_right


@pytest.mark.medium
async def test_an_expected_answer_that_is_no_mathematics_is_no_reward(
    judge: Judge, math: Math
) -> None:
    """The task is wrong then, not the agent."""
    with pytest.raises(EnvironmentFailure, match="math-verify can read"):
        await judge(math, "5", answer=r"\text{}")


@pytest.mark.medium
async def test_no_answer_holds_up_another(judge: Judge, math: Math) -> None:
    """Answers that never end are wrong at their deadline; others beside them are judged."""
    before = math.workers.num_replaced
    hasty = Math(timeout_s=1.0)
    hasty.workers = math.workers
    given = [r"\boxed{9^{9^{9^{9}}}}", *["7"] * 6, "9**9**9**9**9", *["7"] * 6]
    verdicts = await asyncio.gather(*(judge(hasty, one, answer="7") for one in given))
    assert verdicts[0] == verdicts[7] == 0.0
    assert math.workers.num_replaced >= before + 2
    assert await judge(math, "7", answer="7") == 1.0


@pytest.mark.medium
async def test_a_pattern_that_never_ends_is_wrong(judge: Judge, workers: JudgementPool) -> None:
    """An answer made to blow a pattern up costs its own deadline and nothing else."""
    blown = Regex(r"(a+)+$", timeout_s=0.5, workers=workers)
    assert await judge(blown, SLOW, answer="a") == 0.0
    patient = Regex(r"Answer: (\w+)", timeout_s=20, workers=workers)
    assert await judge(patient, "Answer: 3, no, Answer: 4", answer="4") == 1.0
    assert await judge(patient, "Answer: 4, no, Answer: 3", answer="4") == 0.0
    shape = Regex(r"^\d+$", timeout_s=20, workers=workers)
    assert [await judge(shape, given) for given in ("12", "a12")] == [1.0, 0.0]


@pytest.mark.medium
async def test_json_is_checked_against_its_schema(judge: Judge, workers: JudgementPool) -> None:
    """JSON that the schema allows is right; rubbish is wrong; a broken schema is the task's."""
    verifier = JsonSchema(timeout_s=20, workers=workers)
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    given = ['{"a": 1}', '{"a": "1"}', "{}", "{", "[" * 100_000]
    assert [await judge(verifier, one, schema=schema) for one in given] == [1.0, 0, 0, 0, 0]
    with pytest.raises(EnvironmentFailure, match="schema"):
        await judge(verifier, "{}", schema={"type": "wrong"})


@pytest.mark.medium
async def test_a_killed_template_is_no_reward(judge: Judge) -> None:
    """When the worker processes are lost, nothing is scored, and the next answer is."""
    before = {*psutil.Process().children()}
    own = JudgementPool(1)
    verifier = Regex("a+$", timeout_s=20, workers=own)
    assert await judge(verifier, "aaa") == 1.0
    (template,) = {*psutil.Process().children()} - before
    template.kill()
    async with asyncio.timeout(10):
        while template.is_running() and template.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)
    assert await judge(verifier, "aaa") == 1.0
    await own.close()


@pytest.mark.medium
async def test_a_missing_library_is_reported_before_anything_is_judged(judge: Judge) -> None:
    """What cannot be imported is named."""
    verifier = Regex("a", workers=JudgementPool(1, preload=("no_such_module",)))
    with pytest.raises(EnvironmentFailure, match="no_such_module"):
        await judge(verifier, "a")
    await verifier.tear_down()
