"""A tiny model folder and a task that a random policy can already score on."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import user_folder
from outloop.buffer.telemetry import read_metrics as read_rows

ROOT = Path(__file__).resolve().parents[2]

AGENT = ROOT / "examples/calculator/agent.py"
MORE_CODE = '''

import asyncio
import itertools
import os
import sys
from pathlib import Path

count = itertools.count()


async def held(task, episode):
    """Plays once the file `allowed` says that so many may, of all that every process started."""
    if episode.purpose == "train":
        number = start_number()
        while number >= int(Path("allowed").read_text()):
            await asyncio.sleep(0.05)
    return await play(task, episode)


async def graded(task, episode):
    """Every second attempt at a task is good, so that each group has signal."""
    await play(task, episode)
    return float(start_number(task.task_id) % 2)


def start_number(name="start"):
    """How many called this before with the same name, in any process of the run."""
    for number in itertools.count():
        try:
            Path(f"{name}-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number


async def crash(task, episode):
    """Fails one episode in two, after its calls."""
    reward = await play(task, episode)
    if next(count) % 2:
        raise RuntimeError("the agent broke")
    return reward


async def program(task, episode):
    """The calculator agent as a program of its own, scored by the digits that it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, AGENT, task.payload["question"],
        stdout=asyncio.subprocess.PIPE, env={**os.environ, **episode.environ()},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return float(sum(character.isdigit() for character in output.decode()))


async def nan(task, episode):
    return float("nan")


def wrong(task):
    return 1.0
'''
SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"name": "tiny", "dir": "runs"},
    "env": {
        "eval_tasks": "rollouts:eval_tasks",
        "max_concurrent_episodes": 32,
        "episode_deadline_s": 15,
        "max_replaced_share": 0.5,
    },
    "trainer": {"groups_per_step": 8, "checkpoint_every": 2, "take_timeout_s": 60},
    "eval": {"every": 2, "num_episodes": 8, "final_num_episodes": 8, "timeout_s": 60},
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.1M random parameters and a tokenizer trained on the calculator's conversations."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run(
        [
            *(sys.executable, "-m", "outloop.cli", "new-policy", "--out", str(folder)),
            *("--conversations", "tasks:conversations"),
        ],
        check=True,
        cwd=ROOT / "examples/calculator",
        timeout=120,
    )
    return folder


@pytest.fixture
def workspace(tmp_path: Path, model_folder: Path) -> Path:
    """A user's folder: their rollout functions and settings beside a link to the model."""
    more_code = f"{MORE_CODE}\n\nAGENT = {str(AGENT)!r}\n"
    user_folder.write(tmp_path, model_folder, SETTINGS, more_code)
    return tmp_path


@pytest.fixture
def write_config(workspace: Path) -> Callable[..., Path]:
    """Write run.toml with the given staleness, number of steps and settings of the buffer.

    `held_s`: its training episodes play when `allow` allows it, if not later than this.
    """

    def write(*, staleness: int = 1, steps: int = 4, held_s: float = 0.0, **buffer: Any) -> Path:
        path = workspace / "run.toml"
        held = {"rollout_function_path": "rollouts:held", "episode_deadline_s": held_s}
        changes = SETTINGS | {
            "buffer": {"max_staleness": staleness, **buffer},
            "trainer": SETTINGS["trainer"] | {"num_steps": steps},
            "env": SETTINGS["env"] | (held if held_s else {}),
        }
        path.write_text(user_folder.settings_text(changes))
        return path

    return write


@pytest.fixture
def allow(workspace: Path) -> Callable[..., None]:
    """Let as many training episodes of a run that is held play as so many steps have, in the order
    of their starts; the others wait, so that the run makes no more steps before more are allowed.
    Without an argument: all."""

    def write(num_steps: int = 1000) -> None:
        num_episodes = num_steps * SETTINGS["trainer"]["groups_per_step"] * 4
        (workspace / "allowed.new").write_text(str(num_episodes))
        (workspace / "allowed.new").rename(workspace / "allowed")

    return write


@pytest.fixture
def outloop(workspace: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in the user's folder."""

    def run(*arguments: str, timeout_s: float = 150.0) -> subprocess.CompletedProcess[str]:
        return user_folder.run(workspace, *arguments, timeout_s=timeout_s)

    return run


@pytest.fixture
def read_metrics() -> Callable[[Path], list[dict[str, float]]]:
    """Read the rows of a run's metrics.jsonl, also while it is written."""
    return read_rows
