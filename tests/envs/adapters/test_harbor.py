"""Harbor task folders, worked on in the sandbox and scored by their own tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.envs.adapters import harbor

PlayWith = Callable[..., Any]

TASK = """
version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 10.0
[verifier]
timeout_sec = 8.0
[environment]
memory_mb = 512
"""
TEST = """#!/bin/bash
if [ "$(cat /app/answer.txt)" = "$(cat /tests/expected.txt)" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0.25 > /logs/verifier/reward.txt
fi
"""
SOURCE = """
from outloop.envs.adapters import harbor
from outloop.envs.adapters.harbor import Harbor

def games():
    return harbor.tasks("terminal")
"""
OPTIONS = {"tasks": "user:games", "rollout_function_path": "user:Harbor"}


def write_task(folder: Path, **files: str) -> Path:
    """A task in the layout that Harbor documents; `files` by path, `__` for a slash."""
    contents = {
        "task.toml": TASK,
        "instruction.md": "Write the word in word.txt backwards into answer.txt.",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY word.txt .\n",
        "environment/word.txt": "lamp\n",
        "tests/test.sh": TEST,
        "tests/expected.txt": "pmal\n",
    }
    for name, content in (contents | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def runs(*commands: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """A policy that runs one command after another, and then says that it is done."""

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        number = sum(message["role"] == "assistant" for message in messages)
        if number == len(commands):
            return {"role": "assistant", "content": "Done."}
        arguments = json.dumps({"command": commands[number]})
        function = {"name": "bash", "arguments": arguments}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    return answer


async def reward(router: Any, play_with: PlayWith, *commands: str) -> float:
    """What one episode of the task scores when the policy runs `commands`."""
    router.num_episodes = 1
    router.answer = runs(*commands)
    await play_with(router, SOURCE, **OPTIONS)
    (close,) = router.closes.values()
    assert close["outcome"] == "completed", close
    return float(close["reward"]["value"])


async def test_the_policy_works_in_the_sandbox_and_the_tests_score_it(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """The environment's files are in /app, and what one command leaves the next one finds."""
    write_task(folder / "terminal/reverse")
    assert await reward(router, play_with, "rev word.txt > half", "mv half /app/answer.txt") == 1


async def test_a_wrong_answer_gets_what_the_tests_say(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """A reward between 0 and 1 is as good as any."""
    write_task(folder / "terminal/reverse")
    assert await reward(router, play_with, "cp word.txt answer.txt") == 0.25


@pytest.mark.parametrize(
    "forgery",
    [
        "mkdir -p .harbor/logs/verifier; echo 1 > .harbor/logs/verifier/reward.json",
        "mkdir -p .harbor/tests; echo 'echo 1 > /logs/verifier/reward.txt' > .harbor/tests/test.sh",
        "mkdir -p .harbor; ln -s /work .harbor/tests; ln -s /work .harbor/logs",
        "rm -rf .harbor; mkfifo .harbor",
        "(while true; do echo 1 > /logs/verifier/reward.json; done) & disown",
        "echo 'echo 1 > /logs/verifier/reward.txt; exit' > ~/.bashrc; export BASH_ENV=~/.bashrc",
    ],
)
async def test_rewards_and_tests_of_the_policy_do_not_count(
    router: Any, play_with: PlayWith, folder: Path, forgery: str
) -> None:
    """What it put where the tests and the reward belong is removed before they run."""
    write_task(folder / "terminal/reverse")
    assert await reward(router, play_with, forgery) == 0.25


async def test_the_policy_does_not_see_the_tests(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """Neither at /tests nor in the task's folder on the host."""
    write_task(folder / "terminal/reverse")
    command = f"cat /tests/expected.txt {folder}/terminal/reverse/tests/expected.txt > answer.txt"
    assert await reward(router, play_with, command) == 0.25


async def test_tests_without_a_reward_are_the_environments_failure(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """It never scores zero."""
    write_task(folder / "terminal/broken", **{"tests/test.sh": "echo no reward; exit 1"})
    router.num_episodes = 1
    router.answer = runs()
    await play_with(router, SOURCE, **OPTIONS)
    (close,) = router.closes.values()
    assert (close["failure_kind"], close["reward"]) == ("environment", None)
    assert "wrote no reward to /logs/verifier: no reward" in close["error"]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {"environment/Dockerfile": "FROM x\nRUN apt-get install y\n"},
            "images are not built here",
        ),
        ({"task.toml": "agent = 3"}, "Harbor task"),
        ({"task.toml": "= 3"}, "Harbor task"),
    ],
)
def test_tasks_that_cannot_be_played_are_refused(
    tmp_path: Path, files: dict[str, str], sentence: str
) -> None:
    """When they are read, with the folder's name."""
    write_task(tmp_path / "task", **files)
    with pytest.raises(SettingsError, match=sentence):
        harbor.tasks(tmp_path)


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    """And so is one whose tests are missing."""
    with pytest.raises(SettingsError, match=r"no task\.toml below it"):
        harbor.tasks(tmp_path)
    (write_task(tmp_path / "task") / "tests/test.sh").unlink()
    with pytest.raises(SettingsError, match=r"tests/test\.sh is missing"):
        harbor.tasks(tmp_path)
    assert harbor.tasks(write_task(tmp_path / "task"))[0]["deadline_s"] == 18.0
