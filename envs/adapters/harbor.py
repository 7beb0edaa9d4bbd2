"""Harbor task folders: instruction.md, task.toml, environment/, tests/test.sh.

    from outloop.envs.adapters import harbor

    def train_tasks():
        return harbor.tasks("terminal-tasks")

    # run.toml: rollout_function_path = "outloop.envs.adapters.harbor:Harbor"

The policy works by the tool `bash` in a bubblewrap session, whose folder /app holds the files of
environment/. When it has ended, its processes end, and what it left in /app is carried into a new
session. There tests/ is at /tests, which cannot be changed, and tests/test.sh writes the reward to
/logs/verifier/reward.txt or reward.json. Tests run the policy's code as their own user, so that
code can write there too: docs/environments.md says what that leaves open.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import Reward, Task
from outloop.envs.adapters.bash_tool import PATH, work
from outloop.envs.adapters.conversation import field
from outloop.envs.adapters.harbor_folder import file_at, files_below, read_task
from outloop.envs.rollout.episode import Episode
from outloop.envs.sandbox.api import Entry, Limits, RunResult, Session
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.carrying import MAX_BYTES, TooMuch, carry

_log = structlog.get_logger()
_LINKS = {"/app": "/work", "/tests": "/outloop/given/tests", "/logs": "/tmp/logs"}
_VERDICTS = "/tmp/logs/verifier"
_FILES = ("reward.txt", "reward.json")
_MAX_VERDICT_BYTES = 65536
_MIN_FREE = 16
"""Blocks and files that have to be left on the disk when the tests have ended."""
_MAX_FILES = 4096
_NEVER_STARTED = (126, 127)
_PREPARE = f"mkdir -p /tmp/home {_VERDICTS} && stat -c '%i %a' /tmp/logs {_VERDICTS}"
_TEST = "cd /app && exec bash /tests/test.sh"
_LOOK = (
    f"stat -c '%i %a' /tmp/logs {_VERDICTS} && stat -f -c '%a %d' /tmp && "
    f"find {_VERDICTS} -mindepth 1 -maxdepth 1 -iname 'reward*' -printf '%f %y %m %n\\n'"
)
_PYTHON_PATH = """
import os, sys

for word in sys.orig_argv[1:]:
    if word.endswith(".py") and os.path.isfile(word):
        sys.path.append(os.path.dirname(os.path.abspath(word)))
        break
sys.path += [folder for folder in os.environ.get("OUTLOOP_LAST", "").split(":") if folder]
sys.path.append(os.getcwd())
"""
"""For Python in the tests. The folders that it would look into first come last, so that a file of
the policy's does not take the place of a module of Python's."""


def tasks(folder: str | Path, *, max_turns: int = 32) -> list[dict[str, Any]]:
    """The tasks below `folder`: each folder with a task.toml.

    Raises:
        SettingsError: there are none; one lacks a file, is malformed, or has a field that the
            sandbox does not do.
    """
    root = Path(folder).resolve()
    found = sorted(path.parent for path in root.glob("**/task.toml"))
    if not found:
        raise SettingsError(f"folder={str(folder)!r}: no task.toml below it")
    return [{**read_task(path), "max_turns": max_turns} for path in found]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    """What the tests said, and how they ended."""

    ran: RunResult
    reward: float | dict[str, float] | None
    """None: nothing that counts."""
    why: str = ""
    """The reason for None."""
    is_written: bool = False
    """A file is there that was meant to be the reward."""

    def is_broken(self, tests: Mapping[str, tuple[int, bytes]]) -> bool:
        """Whether tests that said this of an untouched folder cannot judge any other.

        Tests that end by themselves without a reward may mean "wrong" by it (`set -e`), if they
        are able to write one.
        """
        if self.reward is not None:
            return False
        is_able = any(name.encode() in data for _, data in tests.values() for name in _FILES)
        has_ended = self.ran.exit_code is not None and self.ran.exit_code not in _NEVER_STARTED
        return self.is_written or not (is_able and has_ended)


class Harbor:
    """A rollout function with one sandbox, and two sessions of it for each episode."""

    async def set_up(self) -> None:
        """Open the sandbox.

        Raises:
            SettingsError: bubblewrap is not there.
        """
        self._sandbox = BubblewrapSandbox(links=_LINKS)
        self._controls: dict[str, asyncio.Task[_Verdict]] = {}

    async def tear_down(self) -> None:
        """Close the sandbox."""
        for control in self._controls.values():
            control.cancel()
        await asyncio.gather(*self._controls.values(), return_exceptions=True)
        await self._sandbox.close()

    async def play(self, task: Task, episode: Episode) -> float | dict[str, float] | Reward:
        """Let the policy work on the task, and return what its tests write.

        The reward is 0 where they write none that is a number from 0 to 1, or more than one, or do
        not end in time.

        Raises:
            EnvironmentFailure: they give no reward for the untouched folder either.
        """
        agent_s = field(task, "agent_timeout_s", float)
        limits = _limits(task, agent_s, MAX_BYTES, _MAX_FILES)
        async with self._sandbox.session(limits) as session:
            await _put_environment(task, session)
            await work(
                episode,
                session,
                field(task, "instruction", str),
                limits,
                max_turns=field(task, "max_turns", int, 32),
                timeout_s=agent_s,
                environ=field(task, "variables", dict, {}),
            )
            verdict = await self._judge(task, session)
        if verdict is None:
            return 0.0
        if verdict.reward is not None:
            return _as_reward(verdict.reward)
        control = await self._control(task)
        tests = await asyncio.to_thread(files_below, Path(field(task, "folder", str)) / "tests")
        if control.is_broken(tests):
            raise EnvironmentFailure(
                f"Harbor task {field(task, 'folder', str)!r}: of the untouched folder too, "
                f"tests/test.sh {control.why}"
            )
        _log.info("harbor_tests", task_id=task.task_id, scored=0, because=verdict.why)
        return 0.0

    async def _judge(self, task: Task, session: Session) -> _Verdict | None:
        """Test what is left in a session; None: it cannot be carried to the tests."""
        async with self._tests(task) as fresh:
            try:
                await carry(session, fresh)
            except TooMuch as error:
                _log.info("harbor_tests", task_id=task.task_id, scored=0, because=str(error))
                return None
            return await _test(task, fresh)

    def _tests(self, task: Task) -> Any:
        # Room for the tests beside all that can be carried.
        limits = _limits(
            task, field(task, "verifier_timeout_s", float), 2 * MAX_BYTES, 2 * _MAX_FILES
        )
        return self._sandbox.session(limits)

    async def _control(self, task: Task) -> _Verdict:
        """What the tests say of the untouched folder; asked once for each task."""
        folder = field(task, "folder", str)
        if folder not in self._controls:
            self._controls[folder] = asyncio.create_task(self._test_untouched(task))
        control = self._controls[folder]
        try:
            return await asyncio.shield(control)
        except EnvironmentFailure:
            self._controls.pop(folder, None)
            raise

    async def _test_untouched(self, task: Task) -> _Verdict:
        async with self._tests(task) as fresh:
            await _put_environment(task, fresh)
            return await _test(task, fresh)


def _limits(task: Task, wall_s: float, disk_bytes: int, max_files: int) -> Limits:
    return Limits(
        wall_s=wall_s,
        cpu_s=math.ceil(wall_s),
        memory_bytes=int(field(task, "memory_mb", float) * 2**20),
        max_processes=256,
        disk_bytes=disk_bytes,
        max_files=max_files,
    )


async def _put_environment(task: Task, session: Session) -> None:
    folder = Path(field(task, "folder", str)) / "environment"
    names: dict[str, str] = field(task, "files", dict)
    held = await asyncio.to_thread(
        lambda: {put: file_at(folder / taken) for put, taken in names.items()}
    )
    modes = [Entry("file", path, mode) for path, (mode, _) in held.items()]
    files = {path: data for path, (_, data) in held.items()}
    done = await session.run(files, ("true",), keep_files=True, arrange=modes)
    if not done.is_ok:
        raise EnvironmentFailure(
            f"Harbor task {field(task, 'folder', str)!r}: the files of environment/ cannot be put "
            f"into a session: {done.ended}: {done.stderr[-300:]!r}"
        )


async def _test(task: Task, session: Session) -> _Verdict:
    """Run the tests in a session that holds what they are to judge."""
    folder = Path(field(task, "folder", str))
    tests = await asyncio.to_thread(files_below, folder / "tests")
    variables = {**field(task, "variables", dict, {}), **field(task, "test_variables", dict, {})}
    environ = {
        "PATH": PATH,
        **variables,
        "HOME": "/tmp/home",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": "/outloop/given/python",
        "OUTLOOP_LAST": variables.get("PYTHONPATH", ""),
    }
    given = {f"tests/{name}": file for name, file in tests.items()}
    given["python/sitecustomize.py"] = (0o644, _PYTHON_PATH.encode())
    before = await session.run({}, ("bash", "-c", _PREPARE), keep_files=True)
    ran = await session.run(
        {},
        ("bash", "-c", _TEST),
        keep_files=True,
        given=given,
        environ=environ,
        collect=[f"{_VERDICTS}/{name}" for name in _FILES],
    )
    if ran.ended != "exited":
        return _Verdict(ran=ran, reward=None, why=_ending(ran))
    after = await session.run({}, ("bash", "-c", _LOOK), keep_files=True)
    made, found = before.stdout.splitlines(), after.stdout.splitlines()
    if len(made) != 2 or found[:2] != made or len(found) < 3:
        return _Verdict(ran=ran, reward=None, why="replaced or closed the folder /logs/verifier")
    if min(map(int, found[2].split())) < _MIN_FREE:
        # With a verdict of the code's own in place, that of the tests would not fit any more.
        return _Verdict(ran=ran, reward=None, why="left no room on the disk")
    named = [name for name in _FILES if any(name.encode() in data for _, data in tests.values())]
    lines = [line.decode(errors="replace").split(" ") for line in found[3:]]
    return _read(ran, lines, named or _FILES)


def _read(ran: RunResult, found: Sequence[Sequence[str]], expected: Sequence[str]) -> _Verdict:
    if not found:
        return _Verdict(ran=ran, reward=None, why=_ending(ran))
    name, kind, mode, num_names = found[0] if len(found[0]) == 4 else ("", "", "0", "0")
    is_plain = kind == "f" and num_names == "1" and int(mode, 8) & 0o200
    content = ran.files.get(f"{_VERDICTS}/{name}")
    if len(found) > 1 or name not in expected or not is_plain or content is None:
        names = ", ".join(line[0] for line in found)
        why = f"left {names} in /logs/verifier; one file, {' or '.join(expected)}, is allowed"
        return _Verdict(ran=ran, reward=None, why=why, is_written=True)
    reward = _reward(content, name.endswith(".json"))
    why = (
        ""
        if reward is not None
        else (f"wrote {content[:100]!r} to /logs/verifier/{name}; a number from 0 to 1 is allowed")
    )
    return _Verdict(ran=ran, reward=reward, why=why, is_written=True)


def _ending(ran: RunResult) -> str:
    output = (ran.stdout + ran.stderr).decode(errors="replace")
    return (
        f"({ran.ended}, exit_code={ran.exit_code}) wrote no reward to /logs/verifier: "
        f"{output[-500:]}"
    )


def _reward(content: bytes, is_json: bool) -> float | dict[str, float] | None:
    """The reward in a file; None if it is not made of numbers from 0 to 1."""
    if len(content) > _MAX_VERDICT_BYTES:
        return None
    if not is_json:
        text = content.decode(errors="replace").strip()
        is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII)
        return _checked(float(text)) if is_number else None
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return _checked(found)
    parts = {str(key): _checked(value) for key, value in found.items()}
    numbers = {key: value for key, value in parts.items() if value is not None}
    return numbers if numbers and len(numbers) == len(parts) else None


def _checked(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1 else None


def _as_reward(found: float | dict[str, float]) -> float | dict[str, float] | Reward:
    """With a part named "reward" that is the value; otherwise `env.reward_weights` says it."""
    if not isinstance(found, dict) or "reward" not in found:
        return found
    parts = {name: number for name, number in found.items() if name != "reward"}
    return Reward(value=found["reward"], components=parts)
