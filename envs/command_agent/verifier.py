"""Scores what an agent program left, with `env.verifier`: the user's function, or a command.

A verifier gets the task and the result, never the episode's key. If it works longer than its
deadline on an answer, that is a failure of the agent. If it raises, or waits too long for other
verifications, that is a failure of the environment; a verifier that raises is called again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from outloop.buffer import untrusted_tree
from outloop.buffer.errors import EnvironmentFailure, RecordError, SettingsError
from outloop.buffer.owned_folder import OwnedFolder
from outloop.buffer.records import Reward, Task
from outloop.buffer.settings.env import EnvSettings
from outloop.buffer.user_code import import_object, text_of
from outloop.envs.command_agent import command
from outloop.envs.rollout.episode_result import as_reward
from outloop.envs.user_code import awaited, cause_of, contained, tear_down
from outloop.envs.verifiers.clock import VerifierClock
from outloop.envs.verifiers.result import Result

_SETTING = "env.verifier"
_EXPECTED = "`def verify(task, result) -> float`"
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NUM_TRIES = 3
_NUM_THREADS = 16
_MAX_LEFT_BEHIND = 64
"""Limit of threads whose call did not return in time; each costs a stack, and CPU if it spins."""
_OUTPUT_BYTES = 2**20
_MARGIN_S = 0.3
"""Verification ends this long before the episode's deadline, when the episode is cut off."""
_FILES = ("task_file", "result_file", "episode_dir")


class VerifierTimeout(Exception):
    """The verifier did not finish within env.verifier_timeout_s."""


class TurnTimeout(EnvironmentFailure):
    """The verifier had no turn to work on the answer before the time was over; no second try."""


class Verifier(Protocol):
    """Scores one result."""

    async def __call__(self, task: Task, result: Result, clock: VerifierClock) -> Reward: ...

    def check_tasks(self, tasks: tuple[Task, ...]) -> None: ...

    async def tear_down(self) -> None: ...


def load_verifier(env: EnvSettings) -> Verifier:
    """Load the run's verifier.

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


async def verify(
    verifier: Verifier, task: Task, result: Result, *, timeout_s: float, deadline: float
) -> Reward:
    """Have the verifier score a result; it is called again when it raises.

    Args:
        timeout_s: how long it may work on the answer.
        deadline: of the episode, in Unix seconds.

    Raises:
        VerifierTimeout: it did not finish in time.
        RecordError: it gave no usable number.
        EnvironmentFailure: it raised, every time, or its turn did not come.
    """
    end = time.monotonic() + deadline - time.time() - _MARGIN_S
    for attempt in range(1, _NUM_TRIES + 1):
        try:
            return await verifier(task, result, VerifierClock(timeout_s, end))
        except VerifierTimeout as error:
            if attempt == 1:
                raise
            raise EnvironmentFailure(f"the verifier raised, and then: {error}") from error
        except (TurnTimeout, RecordError):
            raise
        except Exception as error:
            if attempt == _NUM_TRIES:
                raised = cause_of(error)
                raise EnvironmentFailure(
                    f"the verifier raised {type(raised).__name__}: {text_of(raised)} ({attempt} "
                    f"times){_hint(raised)}"
                ) from error
    raise AssertionError


def _hint(error: BaseException) -> str:
    """What to change, for common mistakes with a task or a result."""
    text = text_of(error)
    if isinstance(error, TypeError | AttributeError) and "'Task' object" in text:
        return (
            "; a task's fields are in task.payload: write task.payload['answer'], not "
            "task['answer'] or task.answer"
        )
    if isinstance(error, TypeError | AttributeError) and "'Result' object" in text:
        return "; what the agent wrote is result.answer, and its files are in result.folder"
    return ""


class _FunctionVerifier:
    def __init__(self, function: Callable[..., Any], env: EnvSettings) -> None:
        self._function = function
        call = function if inspect.isroutine(function) else type(function).__call__
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(call))
        self._weights = env.reward_weights
        self._threads = _Threads(_NUM_THREADS)

    async def __call__(self, task: Task, result: Result, clock: VerifierClock) -> Reward:
        if self._is_async:
            with clock.running():
                working = asyncio.ensure_future(awaited(self._function(task, result)))
            try:
                is_done = await clock.watch(working)
            finally:
                working.cancel()
            if not is_done:
                raise _late(clock)
            if working.cancelled():
                raise RuntimeError("the verifier was cancelled from inside")
            returned = working.result()
        else:
            returned = await self._threads.call(self._function, task, result, clock)
        if returned is None:
            raise RecordError(f"no reward: the verifier returned None; {_EXPECTED} is allowed")
        return as_reward(returned, self._weights)

    def check_tasks(self, tasks: tuple[Task, ...]) -> None:
        """Let a verifier of ours look at each task, if it has `check_task`.

        Raises:
            SettingsError: it cannot judge one.
        """
        if not hasattr(type(self._function), "check_task"):
            return
        for task in tasks:
            try:
                self._function.check_task(task)  # type: ignore[attr-defined]
            except EnvironmentFailure as error:
                raise SettingsError(f"{_SETTING}: {error}") from error

    async def tear_down(self) -> None:
        """Call the verifier's `tear_down`, or for a function that of its module."""
        await tear_down(self._function)


class _Threads:
    """Runs each call of a blocking verifier in a thread of its own.

    A call that does not return in time is given up; its thread ends with the process.
    """

    def __init__(self, num_threads: int) -> None:
        self._places = asyncio.Semaphore(num_threads)
        self._num_left_behind = 0

    async def call(
        self, function: Callable[..., Any], task: Task, result: Result, clock: VerifierClock
    ) -> Any:
        """Call the function, and return what it returns.

        Raises:
            VerifierTimeout: not in time.
            TurnTimeout: other calls were not over in time.
        """
        try:
            with clock.waiting():
                async with asyncio.timeout(clock.until_end_s):
                    await self._places.acquire()
        except TimeoutError:
            raise _late(clock) from None
        try:
            if self._num_left_behind >= _MAX_LEFT_BEHIND:
                raise TurnTimeout(
                    f"{self._num_left_behind} calls of the verifier have not returned long after "
                    "env.verifier_timeout_s; give what it waits for a timeout of its own, write it "
                    "as `async def`, or make it a command"
                )
            working = self._start(function, task, result)
            if not await clock.watch(working):
                self._num_left_behind += 1
                working.add_done_callback(self._came_back)
                raise _late(clock)
            return working.result()
        finally:
            self._places.release()

    def _start(self, function: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        working: asyncio.Future[Any] = loop.create_future()

        def end(returned: Any, error: BaseException | None) -> None:
            if working.done():  # the call was given up
                return
            if error is None:
                working.set_result(returned)
            else:
                working.set_exception(error)

        def work() -> None:
            returned, error = None, None
            try:
                returned = function(*arguments)
            except BaseException as raised:  # noqa: BLE001 - the verifier may raise anything
                error = contained(raised)
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(end, returned, error)

        threading.Thread(target=work, name="verify", daemon=True).start()
        return working

    def _came_back(self, working: asyncio.Future[Any]) -> None:
        self._num_left_behind -= 1
        if not working.cancelled():
            working.exception()


def _late(clock: VerifierClock) -> Exception:
    """The error of a verification that took too long: its own work, or waiting for others."""
    if clock.left_s <= 0:
        return VerifierTimeout(f"the verifier took longer than {clock.limit_s:g} s")
    if clock.had_turn:
        return VerifierTimeout(
            "the answer used up a short turn of the verifier, and the episode's time was over "
            "before it had a long one"
        )
    return TurnTimeout(
        f"the verifier was waiting for other verifications for {clock.waited_s:.1f} s, until the "
        "episode's time was over; give it more cores, raise env.episode_deadline_s, or play "
        "fewer episodes at once"
    )


class _CommandVerifier:
    def __init__(self, env: EnvSettings) -> None:
        assert env.verifier is not None
        self._line = command.CommandLine(env.verifier, setting=_SETTING, import_dir=env.import_dir)
        self._line.check(_FILES)
        self._env = env
        self._folder: OwnedFolder | None = None

    async def __call__(self, task: Task, result: Result, clock: VerifierClock) -> Reward:
        if self._folder is None:
            self._folder = OwnedFolder("outloop-verdicts")
        folder = Path(tempfile.mkdtemp(dir=self._folder.path))
        try:
            ran = await self._run(task, result, folder, clock.limit_s)
        finally:
            await asyncio.to_thread(untrusted_tree.remove, folder)
        if ran.reason == "time":
            raise VerifierTimeout(f"{_SETTING} took longer than {clock.limit_s:g} s")
        if ran.exit_code != 0:
            raise RuntimeError(
                f"{_SETTING} ended with exit_code={ran.exit_code} {ran.reason}: {ran.stderr[-400:]}"
            )
        return as_reward(_last_line(ran.stdout), self._env.reward_weights)

    def check_tasks(self, tasks: tuple[Task, ...]) -> None:
        """Do nothing: a command is not asked before its first result."""

    async def tear_down(self) -> None:
        """Remove the folder of its commands, which have ended with their verdicts."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    async def _run(
        self, task: Task, result: Result, folder: Path, limit_s: float
    ) -> command.CompletedProgram:
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
        limits = command.Limits(limit_s, self._env.agent_memory_mb, _OUTPUT_BYTES, 2**16)
        return await command.run(
            words, limits, env=command.verifier_environment(), folder=self._line.folder
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
    """Seconds that an agent may take, so that its verifier can finish before `deadline`."""
    left_s = max(0.0, deadline - time.time())
    return max(0.0, left_s - min(env.verifier_timeout_s, 0.2 * left_s))
