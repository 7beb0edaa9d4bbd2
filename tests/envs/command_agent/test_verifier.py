"""Scoring by a function of the user's: whose failure it is that a score does not come."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import EnvironmentFailure
from outloop.buffer.records import Task
from outloop.buffer.settings import Settings
from outloop.envs.command_agent.verifier import VerifierTimeout, load_verifier, verify
from outloop.envs.verifiers.result import Result

CHECKS = """
import asyncio, threading, time
from outloop.envs.verifiers.clock import waiting_for_turn

def hangs(task, result):
    if result.answer == "hang":
        threading.Event().wait()
    return 1.0

def sleeps(task, result):
    time.sleep(0.3)
    return 1.0

async def queues(task, result):
    with waiting_for_turn():
        await asyncio.sleep(2.2 if result.answer == "long" else 0.6)
    await asyncio.sleep(2.0 if result.answer == "slow" else 0.05)
    return 1.0

def subscript(task, result):
    return float(result.answer == task["answer"])

def attribute(task, result):
    return float(result.answer == task.answer)

def text(task, result):
    return float(result.text == "1")

def exits(task, result):
    raise SystemExit(3)
"""
TASK = Task(task_id="t", payload={"answer": "1"})


@pytest.fixture
def score(folder: Path, make_settings: Callable[..., Settings]) -> Callable[..., Any]:
    """`score("hangs")` gives a function that scores an answer by that verifier."""
    (folder / "checks.py").write_text(CHECKS)

    def make(name: str, timeout_s: float = 10.0, within_s: float = 20.0) -> Callable[..., Any]:
        verifier = load_verifier(make_settings(verifier=f"checks:{name}").env)

        async def call(answer: str = "1", timeout_s: float = timeout_s) -> float:
            result = Result(answer=answer)
            reward = await verify(
                verifier, TASK, result, timeout_s=timeout_s, deadline=time.time() + within_s
            )
            return reward.value

        return call

    return make


@pytest.mark.medium
async def test_calls_that_hang_hold_up_no_others(score: Callable[..., Any]) -> None:
    """Twenty answers on which a verifier blocks for ever are late; the next ones are scored."""
    one = score("hangs")
    hung = await asyncio.gather(*(one("hang", 0.3) for _ in range(20)), return_exceptions=True)
    assert {type(error) for error in hung} == {VerifierTimeout}
    assert await asyncio.gather(*(one() for _ in range(5))) == [1.0] * 5


@pytest.mark.medium
async def test_the_clock_starts_when_the_call_does(score: Callable[..., Any]) -> None:
    """Many calls at once take longer together than any may alone, and all are scored."""
    one = score("sleeps", timeout_s=1.5)
    assert await asyncio.gather(*(one() for _ in range(128))) == [1.0] * 128


@pytest.mark.medium
async def test_waiting_for_a_turn_does_not_count(score: Callable[..., Any]) -> None:
    """A verifier that queues for a sandbox is timed when it works, not while it waits."""
    assert await score("queues", timeout_s=2.0)("long") == 1.0
    with pytest.raises(VerifierTimeout, match="longer than 0.3 s"):
        await score("queues", timeout_s=0.3)("slow")


@pytest.mark.medium
async def test_a_turn_that_never_comes_is_the_environments(score: Callable[..., Any]) -> None:
    """At the episode's deadline an answer that waited is not scored as a failure of the agent."""
    with pytest.raises(EnvironmentFailure, match="waiting for other verifications"):
        await score("queues", timeout_s=5.0, within_s=0.7)()
    one = score("sleeps", timeout_s=5.0, within_s=0.7)
    ended = await asyncio.gather(*(one() for _ in range(64)), return_exceptions=True)
    assert not any(isinstance(end, VerifierTimeout) for end in ended)
    assert any(isinstance(end, EnvironmentFailure) for end in ended)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("subscript", r"task.payload\['answer'\], not task\['answer'\]"),
        ("attribute", "a task's fields are in task.payload"),
        ("text", "result.answer"),
        ("exits", "SystemExit: 3"),
    ],
)
async def test_mistakes_are_answered(score: Callable[..., Any], name: str, words: str) -> None:
    """What people write in their first verifier is told with what to write instead."""
    with pytest.raises(EnvironmentFailure, match=words):
        await score(name)()
