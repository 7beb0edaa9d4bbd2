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

import asyncio
import json
import math
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import Task
from outloop.envs.adapters.conversation import field
from outloop.envs.rollout.episode import Episode
from outloop.envs.sandbox.api import Limits, RunResult, Session
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox

_LINKS = {"/app": "/work", "/tests": "/work/.harbor/tests", "/logs": "/work/.harbor/logs"}
_REWARDS = (".harbor/logs/verifier/reward.json", ".harbor/logs/verifier/reward.txt")
_HARMLESS = ("from", "workdir", "copy", "add", "env", "cmd", "entrypoint", "label", "#")
"""What a Dockerfile may hold where no image is built: the folder's files are copied to /app."""
_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command in /app and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
_MAX_SHOWN_CHARS = 4000
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
            await _run(session, _files(folder / "environment", ""), "mkdir -p .harbor", limits)
            await self._work(task, episode, session, limits, agent_s)
            return await _verify(session, folder, limits)

    async def _work(
        self, task: Task, episode: Episode, session: Session, limits: Limits, agent_s: float
    ) -> None:
        """Let the policy run commands until it stops or its time or turns are used up."""
        content = field(task, "instruction", str)
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        end = time.monotonic() + agent_s
        for _ in range(field(task, "max_turns", int, 32)):
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    answer = await episode.client.chat.completions.create(
                        model="policy",
                        messages=messages,  # type: ignore[arg-type]  # plain dictionaries
                        tools=[_BASH],  # type: ignore[list-item]
                    )
            except TimeoutError:
                return
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                left_s = end - time.monotonic()
                if call.type != "function" or left_s <= 0:
                    return
                bounds = replace(limits, wall_s=min(limits.wall_s, left_s))
                shown = await _bash(session, call.function.name, call.function.arguments, bounds)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": shown})


async def _bash(session: Session, name: str, arguments: str, limits: Limits) -> str:
    try:
        command = json.loads(arguments)["command"]
    except (ValueError, KeyError, TypeError):
        command = None
    if name != "bash" or not isinstance(command, str):
        return 'Error: the only tool is bash, with the arguments {"command": "..."}'
    result = await _run(session, {}, command, limits)
    text = (result.stdout + result.stderr).decode(errors="replace")
    if len(text) > _MAX_SHOWN_CHARS:
        text = f"{text[:_MAX_SHOWN_CHARS]}\n[{len(text) - _MAX_SHOWN_CHARS} more characters]"
    if result.ended != "exited":
        return f"{text}\n[ended by {result.ended}]"
    return text if result.is_ok else f"{text}\n[exit code {result.exit_code}]"


async def _verify(session: Session, folder: Path, limits: Limits) -> float:
    # Rewards and tests that the policy left there must not count.
    await _run(session, {}, "rm -rf .harbor && mkdir -p .harbor/logs/verifier", limits)
    tests = _files(folder / "tests", ".harbor/tests/")
    result = await _run(session, tests, "bash /tests/test.sh", limits, collect=_REWARDS)
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


async def _run(
    session: Session,
    files: Mapping[str, bytes | str],
    command: str,
    limits: Limits,
    collect: tuple[str, ...] = (),
) -> RunResult:
    return await session.run(
        files,
        ("bash", "-c", command),
        limits,
        keep_files=True,
        collect=collect,
        environ={"HOME": "/work", "PATH": "/usr/local/bin:/usr/bin:/bin"},
    )


def _files(folder: Path, prefix: str) -> dict[str, bytes]:
    """The regular files below `folder` by their paths; a Dockerfile is not among them."""
    paths = sorted(path for path in folder.glob("**/*") if path.is_file())
    return {
        prefix + str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if path.name != "Dockerfile"
    }
