"""Software tasks: a repository at a revision, an issue, and tests that the policy does not see.

    from outloop.envs.adapters import software

    def train_tasks():
        return [software.task("project", "v1.2~1", "Dates before 1970 are wrong.",
                              editable=["src"], tests=[{"command": ["python3", "check.py"],
                                                        "stdin": "1969-07-20", "stdout": "-165"}],
                              hidden_files={"check.py": "..."})]

    # run.toml: rollout_function_path = "outloop.envs.adapters.software:Software"

The policy works by the tool `bash` in a session over the revision (outloop.envs.sandbox). What it
left in the files that it may change is then tested in another session
(outloop.envs.verifiers.repository_tests).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from math import ceil
from pathlib import Path
from typing import Any

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.records import Task
from outloop.envs.adapters.bash_tool import open_shell, shown, work
from outloop.envs.adapters.conversation import field
from outloop.envs.rollout.episode import Episode
from outloop.envs.sandbox.api import Interpreter, Limits, Session
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.carrying import TooMuch, contents, left_in
from outloop.envs.sandbox.repositories import Repository
from outloop.envs.verifiers.repository_tests import (
    MAX_BYTES,
    MAX_FILE_BYTES,
    RepositoryTests,
    refusal_of,
    says_so,
)


def task(
    repository: str | Path,
    revision: str,
    issue: str,
    *,
    editable: Sequence[str],
    tests: Sequence[Mapping[str, Any]],
    hidden_files: Mapping[str, str] | None = None,
    build: Sequence[str] = (),
    max_turns: int = 32,
    timeout_s: float = 300.0,
    memory_mb: int = 1024,
) -> dict[str, Any]:
    """A task's row; fields as in `RepositoryTests`.

    Args:
        timeout_s: of the policy's work and of each of its commands.
        memory_mb: of a session, changes of files included.

    Raises:
        SettingsError: git does not know the revision; nothing is editable; a hidden file is
            editable, or in the revision; a test lacks its command or output.
    """
    with closing(Repository(repository)) as made:
        names = made.names(revision)
    for name in editable:
        if name.rstrip("/") not in names:
            raise SettingsError(f"editable={name!r}: revision={revision!r} has no such path")
    for name in hidden_files or {}:
        if name in names:
            raise SettingsError(
                f"hidden_files={name!r}: revision={revision!r} has it; another path is allowed"
            )
    if not editable:
        raise SettingsError("editable=[]; name the files or folders that the policy may change")
    for name in hidden_files or {}:
        if any(Path(name).is_relative_to(path) for path in editable):
            raise SettingsError(f"hidden_files={name!r} is editable; a path elsewhere is allowed")
    for test in tests:
        command = test.get("command")
        if not command or isinstance(command, str):
            raise SettingsError(f"command={command!r} of a test; a list of words is allowed")
        if says_so(test.get("stdout")):
            raise SettingsError(refusal_of(test))
    return {
        "repository": str(Path(repository).resolve()),
        "revision": revision,
        "issue": issue,
        "editable": list(editable),
        "tests": [dict(test) for test in tests],
        "hidden_files": dict(hidden_files or {}),
        "build": list(build),
        "max_turns": max_turns,
        "timeout_s": timeout_s,
        "memory_mb": memory_mb,
    }


class TooManyFiles(Exception):
    """The policy left more files than can be carried to the tests."""


class Attempt:
    """A session over a task's revision, and the score of what is left in it."""

    def __init__(
        self, task: Task, session: Session, limits: Limits, verifier: RepositoryTests
    ) -> None:
        self._task = task
        self._verifier = verifier
        self.session = session
        self.limits = limits
        self._shell: Interpreter | None = None
        self._open = AsyncExitStack()

    async def bash(self, command: str) -> str:
        """Run a command of the policy, in the shell of the commands before; its output, as the
        policy is shown it. While the shell is there, `session` takes no calls: `end_shell` first.
        """
        if self._shell is None:
            self._shell = await self._open.enter_async_context(
                open_shell(self.session, self.limits)
            )
        return shown(await self._shell.run(command))

    async def end_shell(self) -> None:
        """End the shell of `bash` and what runs in it; the next command begins another."""
        self._shell = None
        await self._open.aclose()

    async def score(self) -> float:
        """What the tests say of the editable files as they are now; the shell ends before.

        Raises:
            TooManyFiles: they have more than 64 MiB. Single files over 8 MiB are left out.
        """
        await self.end_shell()
        return await self._verifier.score(self._task, await self._files())

    async def _files(self) -> dict[str, bytes]:
        names: list[str] = field(self._task, "editable", list)
        try:
            left = await left_in(self.session, names)
            taken = [entry for entry in left if entry.size <= MAX_FILE_BYTES]
            files: dict[str, bytes] = {}
            async for piece in contents(self.session, taken, max_bytes=MAX_BYTES):
                files |= piece
        except TooMuch as error:
            raise TooManyFiles(str(error)) from error
        return files


class Software:
    """A rollout function with one sandbox and one verifier for all its episodes; arguments as those
    of `RepositoryTests`."""

    def __init__(self, *, gives_part: bool = False, store: Path | None = None) -> None:
        self._gives_part = gives_part
        self._store = store
        self._opened: tuple[BubblewrapSandbox, RepositoryTests] | None = None

    async def set_up(self) -> None:
        """Open the sandbox, which the first attempt would otherwise do.

        Raises:
            SettingsError: bubblewrap is not there.
        """
        self._open()

    def _open(self) -> tuple[BubblewrapSandbox, RepositoryTests]:
        if self._opened is None:
            sandbox = BubblewrapSandbox()
            verifier = RepositoryTests(
                gives_part=self._gives_part, sandbox=sandbox, store=self._store
            )
            self._opened = sandbox, verifier
        return self._opened

    async def tear_down(self) -> None:
        """Close the sandbox, and remove the folders of revisions."""
        if self._opened is not None:
            sandbox, verifier = self._opened
            self._opened = None
            await verifier.tear_down()
            await sandbox.close()

    @asynccontextmanager
    async def attempt(self, task: Task) -> AsyncIterator[Attempt]:
        """A session over the task's revision, for an agent of your own.

        Raises:
            EnvironmentFailure: it cannot be opened, or the tests do not tell a solution from none
                (`RepositoryTests.try_tests`).
        """
        timeout_s = field(task, "timeout_s", float, 300.0)
        limits = Limits(
            wall_s=timeout_s,
            cpu_s=ceil(timeout_s),
            memory_bytes=field(task, "memory_mb", int, 1024) * 2**20,
            max_processes=256,
            disk_bytes=256 * 2**20,
        )
        sandbox, verifier = self._open()
        try:
            base = await verifier.base(task)
            await verifier.try_tests(task)
        except SettingsError as error:
            raise EnvironmentFailure(f"task_id={task.task_id!r}: {error}") from error
        async with sandbox.session(limits, base=base) as session:
            attempt = Attempt(task, session, limits, verifier)
            try:
                yield attempt
            finally:
                await attempt.end_shell()

    async def play(self, task: Task, episode: Episode) -> float:
        """Let the policy work on the issue, and return what the tests say."""
        async with self.attempt(task) as attempt:
            await work(
                episode,
                attempt.session,
                field(task, "issue", str),
                attempt.limits,
                max_turns=field(task, "max_turns", int, 32),
                timeout_s=attempt.limits.wall_s,
            )
            return await attempt.score()
