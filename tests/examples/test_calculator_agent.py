"""The agent as its author wrote it: tool, loop, program, and the verifier beside it."""

import ast
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from agent import MAX_TURNS, call_calculator, evaluate, solve
from openai import AsyncOpenAI
from verifier import score

from outloop.buffer.records import Task
from outloop.buffer.user_code import import_object
from outloop.envs.rollout.clients import Clients
from outloop.envs.rollout.episode import Episode
from outloop.envs.rollout.episode_rewards import Scores

CALCULATOR = Path(__file__).resolve().parents[2] / "examples/calculator"


def episode_of(router: Any, question: str) -> tuple[Task, Episode]:
    """A task and an episode at the fake router, as the runner would make them."""
    task = Task(task_id="t", payload={"question": question})
    episode = Episode(
        episode_id="ep-0",
        task=task,
        purpose="train",
        base_url=f"{router.url}/episodes/ep-0/v1",
        api_key="ol-ep-ep-0-signature",
        deadline=0.0,
        scores=Scores(takes_turns=False, weights={}),
        clients=Clients(max_connections=4, timeout_s=10.0),
    )
    return task, episode


def test_the_agent_knows_nothing_of_outloop() -> None:
    """It imports the standard library and openai, nothing else."""
    tree = ast.parse((CALCULATOR / "agent.py").read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [])
        + [alias.name for alias in node.names if isinstance(node, ast.Import)]
    }
    assert imported <= {*sys.stdlib_module_names, "openai"}


@pytest.mark.parametrize(
    ("expression", "value"), [("12*7", 84), (" 12 - 70 ", -58), ("-3+(2*4)", 5)]
)
def test_arithmetic_is_evaluated(expression: str, value: int) -> None:
    """Sums, differences and products of integers."""
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "12*", "2**9999999", "__import__('os')", "1/2", "1.5+1", "True+1", "(" * 60, "9" * 65],
)
def test_anything_else_is_refused(expression: str) -> None:
    """What the policy writes can neither run code nor burn time."""
    with pytest.raises(ValueError, match="."):
        evaluate(expression)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculator", '{"expression": '),
        ("calculator", "[1]"),
        ("calculator", '{"expr": "1+1"}'),
        ("calculator", '{"expression": ["1"]}'),
        ("calculator", "3"),
        ("rm", "{}"),
    ],
)
def test_malformed_calls_are_answered(name: str, arguments: str) -> None:
    """The policy gets an error text instead of the agent crashing."""
    assert call_calculator(name, arguments).startswith("error: ")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("84", 1.0), ("12*7 is 84.", 1.0), ("-84", 0.0), ("84 7", 0.0), ("", 0.0), ("9" * 5000, 0.0)],
)
def test_the_last_number_is_what_counts(answer: str, reward: float) -> None:
    """The verifier reads the final number and nothing else."""
    assert score("12*7", answer) == reward


async def test_the_agent_calls_its_tool_and_answers(router: Any) -> None:
    """Two model calls; the tool's result goes back under the call's id."""
    seen: list[list[dict[str, Any]]] = []
    scripted = router.answer

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(messages)
        return dict(scripted(messages))

    router.answer = answer
    task, episode = episode_of(router, "12*7")
    play = import_object("rollout:play", setting="s", import_dir=CALCULATOR)
    assert await play(task, episode) == 1.0
    await episode.clients.close()
    assert [message["role"] for message in seen[1]] == ["system", "user", "assistant", "tool"]
    assert seen[1][3] == {"role": "tool", "tool_call_id": "call_1", "content": "84"}


async def test_an_agent_that_never_answers_gives_up(router: Any) -> None:
    """A policy that only calls tools is stopped after a few turns and scores nothing."""
    scripted = router.answer
    router.answer = lambda messages: scripted(messages[:2])
    task, episode = episode_of(router, "12*7")
    play = import_object("rollout:play", setting="s", import_dir=CALCULATOR)
    assert await play(task, episode) == 0.0
    assert router.num_chat_calls == MAX_TURNS
    await episode.clients.close()


async def test_solve_takes_any_client_and_model(router: Any) -> None:
    """The function form is what its author calls with a client of their own."""
    async with AsyncOpenAI(
        base_url=f"{router.url}/episodes/ep-0/v1", api_key="ol-ep-ep-0-signature"
    ) as client:
        assert await solve("50-60", client, model="gpt") == "-10"


@pytest.mark.medium
async def test_the_agent_is_a_program(router: Any) -> None:
    """`python agent.py QUESTION` reads address and key from the environment and prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(CALCULATOR / "agent.py"),
        "12*7",
        stdout=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "OPENAI_BASE_URL": f"{router.url}/episodes/ep-0/v1",
            "OPENAI_API_KEY": "ol-ep-ep-0-signature",
        },
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, output.decode()) == (0, "84\n")
