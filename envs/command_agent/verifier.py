"""Scoring what an episode left behind: by a function, or by a command.

Owns: the allowed forms of `env.verifier`, its deadline, repeating it when it fails on its own
account. Does not own: what is right (the verifier), what the reward leads to (buffer).
Invariant: a verifier sees the task and the result, never the episode's key; what it cannot finish
within its deadline is the agent's failure, what it raises is the environment's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from outloop.buffer.errors import EnvironmentFailure, RecordError, SettingsError
from outloop.buffer.records import Reward, Task
from outloop.buffer.settings.env import EnvSettings
from outloop.envs.command_agent import command
from outloop.envs.rollout.artifacts import Result
from outloop.envs.rollout.episode_result import as_reward
from outloop.envs.runner.imports import import_object, tear_down

_SETTING = "env.verifier"
_EXPECTED = "`def verify(task, result) -> float`"
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NUM_TRIES = 3
_NUM_THREADS = 16
_OUTPUT_BYTES = 2**20
_FILES = ("task_file", "result_file", "episode_dir")


class VerifierTimeout(Exception):
    """The verifier did not finish within env.verifier_timeout_s."""


class Verifier(Protocol):
    """Scores one result."""

    async def __call__(self, task: Task, result: Result) -> Reward: ...

    async def tear_down(self) -> None: ...


def load_verifier(env: EnvSettings) -> Verifier:
    """The run's verifier.

    Raises:
        SettingsError: not given, not importable, or not callable with (task, result).
    """
    if env.verifier is None:
        raise SettingsError(
            f"{_SETTING} is missing: an agent program's episodes need a score; name {_EXPECTED} as "
            'package.module:function, or give a command such as "python verify.py --task '
            '{task_file} --result {result_file}" that prints a number'
        )
    if not _IMPORT_PATH.fullmatch(env.verifier):
        return _CommandVerifier(env)
    function = import_object(env.verifier, setting=_SETTING, import_dir=env.import_dir)
    named = f"{_SETTING}={env.verifier!r}"
    if inspect.isclass(function) or not callable(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise SettingsError(f"{named} is a {kind}; a function {_EXPECTED} is allowed")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise SettingsError(
            f"{named} has the signature {inspect.signature(function)}, which cannot be called with "
            f"(task, result): {error}; {_EXPECTED} is allowed"
        ) from error
    except ValueError:  # a callable without a readable signature
        pass
    return _FunctionVerifier(function, env)


async def verify(verifier: Verifier, task: Task, result: Result) -> Reward:
    """The verifier's reward; one that fails on its own account is asked again.

    Raises:
        VerifierTimeout: it did not finish in time.
        RecordError: it gave no usable number.
        EnvironmentFailure: it raised, every time.
    """
    for attempt in range(1, _NUM_TRIES + 1):
        try:
            return await verifier(task, result)
        except (VerifierTimeout, RecordError):
            raise
        except Exception as error:
            if attempt == _NUM_TRIES:
                raise EnvironmentFailure(
                    f"the verifier raised {type(error).__name__}: {error} ({attempt} times)"
                ) from error
    raise AssertionError


class _FunctionVerifier:
    def __init__(self, function: Callable[..., Any], env: EnvSettings) -> None:
        self._function = function
        call = function if inspect.isroutine(function) else type(function).__call__
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(call))
        self._timeout_s = env.verifier_timeout_s
        self._weights = env.reward_weights
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="verify")

    async def __call__(self, task: Task, result: Result) -> Reward:
        if self._is_async:
            working = asyncio.ensure_future(self._function(task, result))
        else:
            working = asyncio.wrap_future(self._threads.submit(self._function, task, result))
        done, _ = await asyncio.wait({working}, timeout=self._timeout_s)
        if not done:
            working.cancel()
            raise VerifierTimeout(f"the verifier took longer than {self._timeout_s:g} s")
        returned = working.result()
        if returned is None:
            raise RecordError(f"no reward: the verifier returned None; {_EXPECTED} is allowed")
        return as_reward(returned, self._weights)

    async def tear_down(self) -> None:
        """Call the verifier's own; of a function, those of the verifiers that it names."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await tear_down(self._function)


class _CommandVerifier:
    def __init__(self, env: EnvSettings) -> None:
        assert env.verifier is not None
        self._line = command.CommandLine(env.verifier, setting=_SETTING, import_dir=env.import_dir)
        self._line.check(_FILES)
        self._env = env

    async def __call__(self, task: Task, result: Result) -> Reward:
        folder = Path(tempfile.mkdtemp(prefix="outloop-verdict-"))
        try:
            ran = await self._run(task, result, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if ran.reason == "time":
            raise VerifierTimeout(f"{_SETTING} took longer than {self._env.verifier_timeout_s:g} s")
        if ran.exit_code != 0:
            raise RuntimeError(
                f"{_SETTING} ended with exit_code={ran.exit_code} {ran.reason}: {ran.stderr[-400:]}"
            )
        return as_reward(_last_line(ran.stdout), self._env.reward_weights)

    async def tear_down(self) -> None:
        """Nothing outlives a verdict."""

    async def _run(self, task: Task, result: Result, folder: Path) -> command.Ran:
        task_file, result_file = folder / "task.json", folder / "result.json"
        task_file.write_text(json.dumps({"task_id": task.task_id, **task.payload}))
        fields = msgspec.to_builtins(result, enc_hook=str)
        result_file.write_text(json.dumps(fields))
        words = self._line.words(
            {
                "task_file": str(task_file),
                "result_file": str(result_file),
                "episode_dir": str(result.folder or folder),
            }
        )
        limits = command.Limits(
            self._env.verifier_timeout_s, self._env.agent_memory_mb, _OUTPUT_BYTES, 2**16
        )
        return await command.run(
            words, limits, env=command.environment({}), folder=self._line.folder
        )


def _last_line(text: str) -> Any:
    lines = text.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        shown = lines[-1][:120] if lines else ""
        raise RecordError(
            f"{_SETTING}: its last line of output is {shown!r}; a number, or a JSON object of "
            "names to numbers, is allowed"
        ) from None


def deadline_share(env: EnvSettings, deadline: float) -> float:
    """Seconds that an agent may take, so that its verifier can still finish before `deadline`."""
    left_s = max(0.0, deadline - time.time())
    return max(0.0, left_s - min(env.verifier_timeout_s, 0.2 * left_s))
