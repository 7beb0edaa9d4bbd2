"""Harbor task folders: instruction.md, task.toml, environment/, tests/test.sh.

    from outloop.envs.adapters import harbor

    def train_tasks():
        return harbor.tasks("terminal-tasks")

    # run.toml: rollout_function_path = "outloop.envs.adapters.harbor:Harbor"

The policy works by the tool `bash` in a bubblewrap sandbox, whose folder /app holds the files of
environment/. Then tests/ is put at /tests, tests/test.sh runs in the same sandbox, and what it
writes to /logs/verifier/reward.txt or reward.json is the reward. An environment that has to be
built (a Dockerfile that does more than name a base and copy files) is refused: the sandbox has the
programs of this machine, and no network. Fields and paths as of Harbor's task format 1.x.
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import Task
from outloop.envs.adapters.bash_tool import run_bash, work
from outloop.envs.adapters.conversation import field
from outloop.envs.rollout.episode import Episode
from outloop.envs.sandbox.api import Limits, Session
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox

_LINKS = {"/app": "/work", "/tests": "/work/.harbor/tests", "/logs": "/work/.harbor/logs"}
_REWARDS = (".harbor/logs/verifier/reward.json", ".harbor/logs/verifier/reward.txt")
_HARMLESS = ("from", "workdir", "copy", "add", "env", "cmd", "entrypoint", "label", "#")
"""What a Dockerfile may hold where no image is built: the folder's files are copied to /app."""
_DEFAULT_TIMEOUT_S = 600.0


def tasks(folder: str | Path, *, max_turns: int = 32) -> list[dict[str, Any]]:
    """The tasks below `folder`: each folder with a task.toml.

    Raises:
        SettingsError: there are none; one lacks a file or is malformed; one needs an image built.
    """
    root = Path(folder).resolve()
    found = sorted(path.parent for path in root.glob("**/task.toml"))
    if not found:
        raise SettingsError(f"folder={str(folder)!r}: no task.toml below it")
    return [{**_read(path), "max_turns": max_turns} for path in found]


def _read(folder: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
        instruction = (folder / "instruction.md").read_text()
        agent = settings.get("agent", {}).get("timeout_sec", _DEFAULT_TIMEOUT_S)
        verifier = settings.get("verifier", {}).get("timeout_sec", _DEFAULT_TIMEOUT_S)
        memory_mb = settings.get("environment", {}).get("memory_mb", 2048)
        numbers = {
            "agent_timeout_s": float(agent),
            "verifier_timeout_s": float(verifier),
            "memory_mb": float(memory_mb),
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise SettingsError(f"Harbor task {str(folder)!r}: {error}") from error
    if not (folder / "tests/test.sh").is_file():
        raise SettingsError(f"Harbor task {str(folder)!r}: tests/test.sh is missing")
    dockerfile = folder / "environment/Dockerfile"
    lines = dockerfile.read_text().splitlines() if dockerfile.is_file() else []
    for line in lines:
        if line.strip() and not line.strip().lower().startswith(_HARMLESS):
            raise SettingsError(
                f"Harbor task {str(folder)!r}: environment/Dockerfile has {line.strip()!r}, and "
                "images are not built here; play it by Harbor's own runner against the episode's "
                "endpoint (outloop.envs.adapters.remote_episodes)"
            )
    return {
        "folder": str(folder),
        "instruction": instruction,
        "deadline_s": numbers["agent_timeout_s"] + numbers["verifier_timeout_s"],
        **numbers,
    }


class Harbor:
    """A rollout function with one sandbox, and a session of it for each episode."""

    async def set_up(self) -> None:
        """Open the sandbox.

        Raises:
            SettingsError: bubblewrap is not there.
        """
        self._sandbox = BubblewrapSandbox(links=_LINKS)

    async def tear_down(self) -> None:
        """Close the sandbox."""
        await self._sandbox.close()

    async def play(self, task: Task, episode: Episode) -> float:
        """Let the policy work on the task, and return what its tests write.

        Raises:
            EnvironmentFailure: the tests wrote no finite reward.
        """
        folder = Path(field(task, "folder", str))
        agent_s = field(task, "agent_timeout_s", float)
        verifier_s = field(task, "verifier_timeout_s", float)
        limits = Limits(
            wall_s=max(agent_s, verifier_s),
            cpu_s=math.ceil(max(agent_s, verifier_s)),
            memory_bytes=int(field(task, "memory_mb", float) * 2**20),
            max_processes=256,
            disk_bytes=256 * 2**20,
        )
        async with self._sandbox.session(limits) as session:
            # The folder's own files are there before the policy's first command.
            files = _files(folder / "environment", "")
            await run_bash(session, "mkdir -p .harbor", limits, files)
            await work(
                episode,
                session,
                field(task, "instruction", str),
                limits,
                max_turns=field(task, "max_turns", int, 32),
                timeout_s=agent_s,
            )
            return await _verify(session, folder, limits)


async def _verify(session: Session, folder: Path, limits: Limits) -> float:
    # Rewards and tests that the policy left there must not count.
    await run_bash(session, "rm -rf .harbor && mkdir -p .harbor/logs/verifier", limits)
    tests = _files(folder / "tests", ".harbor/tests/")
    result = await run_bash(session, "bash /tests/test.sh", limits, tests, _REWARDS)
    for path in _REWARDS:
        if path in result.files:
            return _reward(result.files[path], path.endswith(".json"), folder)
    output = (result.stdout + result.stderr).decode(errors="replace")
    raise EnvironmentFailure(
        f"Harbor task {str(folder)!r}: tests/test.sh ({result.ended}, exit_code="
        f"{result.exit_code}) wrote no reward to /logs/verifier: {output[-500:]}"
    )


def _reward(content: bytes, is_json: bool, folder: Path) -> float:
    try:
        found: Any = json.loads(content) if is_json else content.decode()
        if isinstance(found, dict):
            found = found.get("reward")
        reward = float(found)
    except (ValueError, TypeError) as error:
        raise EnvironmentFailure(
            f"Harbor task {str(folder)!r}: the reward is {content[:200]!r}: {error}"
        ) from error
    if not math.isfinite(reward):
        raise EnvironmentFailure(f"Harbor task {str(folder)!r}: the reward is {reward}")
    return reward


def _files(folder: Path, prefix: str) -> dict[str, bytes]:
    """The regular files below `folder` by their paths; a Dockerfile is not among them."""
    paths = sorted(path for path in folder.glob("**/*") if path.is_file())
    return {
        prefix + str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if path.name != "Dockerfile"
    }
