"""What the user's code raises is that attempt's failure; its neighbours and the runner go on."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import Task
from outloop.buffer.settings import Settings
from outloop.envs.command_agent.verifier import load_verifier, verify
from outloop.envs.verifiers.result import Result

PlayWith = Callable[..., Any]

ERRORS = {
    "sys.exit('gives up')": "SystemExit: gives up",
    "exit_in_a_task": "SystemExit: in a task",
    "raise KeyboardInterrupt('stop')": "KeyboardInterrupt: stop",
    "raise GeneratorExit('over')": "GeneratorExit: over",
    "raise asyncio.CancelledError('mine')": "ancelled",
    "raise asyncio.TimeoutError('late')": "TimeoutError: late",
    "raise BaseException('base')": "BaseException: base",
    "raise BaseExceptionGroup('all', [SystemExit('one')])": "BaseExceptionGroup: all",
    "raise ExceptionGroup('some', [ValueError('one')])": "ExceptionGroup: some",
    "next(iter(''))": "StopIteration",
    "raise StopAsyncIteration('end')": "StopAsyncIteration: end",
    "next_in_a_thread": "StopIteration",
    "raise ValueError('file ' + os.fsdecode(b'caf\\xe9'))": r"ValueError: file caf\udce9",
    "raise Speechless": "Speechless: (its __str__ raised RuntimeError)",
    "one_line(None)": "AttributeError",
    "raise UnicodeEncodeError('ascii', 'é', 0, 1, '\\ud800')": "UnicodeEncodeError",
}
SOURCE = """
import asyncio
import os
import sys
from pathlib import Path
from outloop.buffer.foreign_text import one_line


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


async def leave():
    sys.exit("in a task")


{define}:
    if episode.episode_id == "ep-0":
        {body}
    return 1.0
"""
STYLES = {
    "async": "async def play(task, episode)",
    "plain": "def play(task, episode)",
    "batch": "async def rollout(tasks, context):\n    await context.play_all(play)\n\n\n"
    "async def play(task, episode)",
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("style", STYLES)
async def test_what_play_raises_is_its_own_episodes_failure(
    style: str, num_workers: int, router: Any, play_with: PlayWith, folder: Path
) -> None:
    """Each error is the agent's, at once, with its text and place; the other attempts complete."""
    bodies = list(ERRORS)
    plain = style == "plain"
    chosen = [body for body in bodies if not plain or " " in body or "(" in body]
    lines = [
        f"if episode.episode_id == 'ep-{number}':\n        {code(body)}"
        for number, body in enumerate(chosen)
    ]
    once = 'if episode.episode_id == "ep-0":\n        {body}'
    source = SOURCE.replace("{define}", STYLES[style]).replace(once, "\n    ".join(lines))
    router.num_episodes = len(chosen) + 4
    await play_with(
        router,
        source,
        timeout_s=60,
        rollout_function_path="user:rollout" if style == "batch" else "user:play",
        num_workers=num_workers,
        max_failed_share=1.0,
        failure_reward=-1.0,
    )
    for number, body in enumerate(chosen):
        close = router.closes[f"ep-{number}"]
        assert (close["failure_kind"], close["outcome"]) == ("agent", "failed"), (body, close)
        assert close["reward"]["value"] == -1.0
        assert ERRORS[body] in close["error"], (body, close["error"])
        if "ancelled" not in ERRORS[body]:
            assert "user.py:" in close["error"]
    rest = [router.closes[f"ep-{number}"] for number in range(len(chosen), len(chosen) + 4)]
    assert [close["outcome"] for close in rest] == ["completed"] * 4


UNREADABLE = """
class Meta:
    shape = ()

    def item(self):
        raise RuntimeError("a meta tensor has no data")


class Lazy(dict):
    def items(self):
        raise RuntimeError("its file is gone")


class Name:
    def __str__(self):
        raise RuntimeError("no name")


class Lost(float):
    def item(self):
        raise RuntimeError("the device is lost")

    shape = ()


RETURNED = [Meta(), Lazy(right=1.0), {Name(): 1.0}, Lost(1.0), 1.0, 1.0]


{define}:
    return RETURNED[int(episode.episode_id.removeprefix("ep-"))]
"""


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("style", STYLES)
async def test_a_reward_that_cannot_be_read_fails_its_own_attempt(
    style: str, num_workers: int, router: Any, play_with: PlayWith
) -> None:
    """At once, for the environment, with what it raised; the other attempts complete."""
    router.num_episodes = 6
    await play_with(
        router,
        UNREADABLE.replace("{define}", STYLES[style]),
        timeout_s=60,
        rollout_function_path="user:rollout" if style == "batch" else "user:play",
        num_workers=num_workers,
        max_failed_share=1.0,
    )
    closes = [router.closes[f"ep-{number}"] for number in range(6)]
    assert [close["failure_kind"] for close in closes] == ["environment"] * 4 + [None] * 2
    assert all("cannot be read as a reward: " in close["error"] for close in closes[:4])


def code(body: str) -> str:
    """The statement of an entry of ERRORS."""
    named = {
        "exit_in_a_task": "await asyncio.gather(leave())",
        "next_in_a_thread": "await asyncio.to_thread(next, iter(''))",
    }
    return named.get(body, body)


@pytest.mark.parametrize("body", [body for body in ERRORS if "next_in" not in body])
async def test_what_a_batch_function_raises_ends_its_batch(
    body: str, router: Any, play_with: PlayWith
) -> None:
    """Every attempt that the function left open is the agent's failure, at once."""
    router.num_episodes = 2
    source = SOURCE.replace("{define}", "async def rollout(tasks, context)").replace(
        'if episode.episode_id == "ep-0"', "if True"
    )
    await play_with(
        router,
        source.replace("{body}", code(body)),
        rollout_function_path="user:rollout",
        max_concurrent_episodes=2,
        max_failed_share=1.0,
    )
    assert router.closed("failure_kind") == ["agent", "agent"]
    assert all(ERRORS[body] in error for error in router.closed("error"))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", ["sys.exit('no')", "raise KeyboardInterrupt", "next(iter(''))"])
async def test_a_set_up_that_leaves_stops_the_runner_with_a_sentence(
    error: str, num_workers: int, router: Any, play_with: PlayWith
) -> None:
    """It names what was raised."""
    source = (
        f"import sys\n\n\nclass Player:\n    def set_up(self):\n        {error}\n\n"
        "    async def play(self, task, episode):\n        return 1.0\n"
    )
    with pytest.raises(SettingsError, match=r"set_up raised (SystemExit|Keyboard|StopIteration)"):
        await play_with(
            router, source, rollout_function_path="user:Player", num_workers=num_workers
        )


VERIFIER = """
import asyncio
import os
import sys
from outloop.buffer.foreign_text import one_line


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


async def leave():
    sys.exit("in a task")


{define}:
    {body}
"""


@pytest.mark.parametrize("style", ["async def", "def"])
@pytest.mark.parametrize("body", [body for body in ERRORS if "_in_a_" not in body])
async def test_what_a_verifier_raises_is_the_environments_failure(
    body: str, style: str, folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """It is called three times, without a wait, and the failure names what it raised."""
    source = VERIFIER.replace("{define}", f"{style} check(task, result)")
    (folder / "checks.py").write_text(source.replace("{body}", body))
    verifier = load_verifier(make_settings(verifier="checks:check").env)
    task = Task(task_id="t", payload={"question": "1+1"})
    words = ERRORS[body].encode("utf-8", "backslashreplace").decode().split(": ")[-1]
    with pytest.raises(EnvironmentFailure, match=rf"the verifier raised .*{re.escape(words)}"):
        await verify(
            verifier, task, Result(answer="2"), timeout_s=60.0, deadline=time.time() + 300.0
        )


async def test_a_worker_whose_loop_ends_does_not_end_the_runner(
    router: Any, play_with: PlayWith
) -> None:
    """The episodes that it played are repeated elsewhere; a new worker plays the others."""
    source = """
import asyncio
import sys


async def play(task, episode):
    if episode.episode_id == "ep-0":
        asyncio.get_running_loop().call_soon(sys.exit, 1)
    await asyncio.sleep(0.01)
    return 1.0
"""
    router.num_episodes = 30
    await play_with(router, source, timeout_s=60, num_workers=1, max_concurrent_episodes=4)
    outcomes = router.closed("outcome")
    assert len(outcomes) == 30
    assert outcomes.count("completed") >= 26
    assert set(router.closed("failure_kind")) <= {None, "infrastructure"}
