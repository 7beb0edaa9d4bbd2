"""Scores what a policy left in a repository, by tests that it cannot see, change or answer for.

A test is a command with an input, and the output and exit code that are expected. Commands run in a
new session over the revision, into which only the files that the policy may change are carried. The
expected outputs stay in this process, so that code under test has nothing to forge: whatever it
does with its own process, or with a program of the test that imports it, the right output has to
come out of it. So expect what only a solution computes: a test that expects "ok" can be answered by
printing it. Any language will do whose programs the sandbox has.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outloop.buffer.errors import EnvironmentFailure
from outloop.buffer.records import Task
from outloop.envs.sandbox.api import Limits, RunResult, Sandbox, Session
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.repositories import Repository
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import field_of, text_of

Content = Mapping[str, bytes]
_MAX_FILE_BYTES = 8 * 2**20


class RepositoryTests:
    """Scores a repository by the task's tests.

    Fields of the task: `repository`, `revision`; `editable`, files and folders that the policy may
    change; `tests`, a list of {"command": [...], "stdin", "stdout", "exit_code"}, of which input
    and exit code may be left out; `hidden_files`, path -> text, which the tests run and the policy
    does not get; `build`, a command before the tests. White space at the ends of lines is ignored.

    Called with a `Result`, it reads the repository that an agent program left in the folder
    `repository` of its episode. `store` keeps folders of revisions (`Repository`) for all processes
    that name it; each has a temporary one of its own when it is left out.
    """

    def __init__(
        self,
        *,
        gives_part: bool = False,
        sandbox: Sandbox | None = None,
        limits: Limits | None = None,
        store: Path | None = None,
    ) -> None:
        self._gives_part = gives_part
        self._store = store
        self._limits = limits or Limits(
            wall_s=20.0, cpu_s=20, memory_bytes=2**30, max_processes=128, disk_bytes=2**28
        )
        self._sandbox = sandbox
        self._is_ours = sandbox is None
        self._repositories: dict[str, Repository] = {}

    async def check_sandbox(self) -> None:
        """Open an empty session, and end it.

        Raises:
            SettingsError: this machine does not support the sandbox.
            EnvironmentFailure: it supports it and cannot open a session.
        """
        sandbox = self._sandbox or BubblewrapSandbox()
        try:
            async with sandbox.session(self._limits):
                pass
        finally:
            if sandbox is not self._sandbox:
                await sandbox.close()

    async def tear_down(self) -> None:
        """Close the sandbox that it opened, and remove the folders of revisions."""
        if self._sandbox is not None and self._is_ours:
            await self._sandbox.close()
            self._sandbox = None
        for repository in self._repositories.values():
            repository.close()
        self._repositories.clear()

    async def base(self, task: Task) -> Path:
        """The folder of the task's revision."""
        path, revision = text_of(task, "repository"), text_of(task, "revision")
        if path not in self._repositories:
            # Once for each repository, and not beside other calls: each would make its own store.
            self._repositories[path] = Repository(path, self._store)
        return await asyncio.to_thread(self._repositories[path].folder, revision)

    async def __call__(self, task: Task, result: Result) -> float:
        """1.0 or 0.0, or with `gives_part` the share of the tests that passed."""
        if result.folder is None:
            raise EnvironmentFailure(
                f"task_id={task.task_id!r}: the verifier reads the repository from the episode's "
                "folder, which only an agent program has"
            )
        editable = field_of(task, "editable", list)
        folder = result.folder / "repository"
        return await self.score(task, await asyncio.to_thread(read_files, folder, editable))

    async def score(self, task: Task, files: Content) -> float:
        """Score the editable files as a policy left them: path -> content.

        Raises:
            EnvironmentFailure: a field is missing, or no session can be opened.
        """
        base = await self.base(task)
        editable = field_of(task, "editable", list)
        tests = field_of(task, "tests", list)
        original = await asyncio.to_thread(read_files, base, editable)
        changed = {path: files[path] for path in files if files[path] != original.get(path)}
        gone = sorted(original.keys() - files.keys())
        if self._sandbox is None:
            self._sandbox = BubblewrapSandbox()
        async with self._sandbox.session(self._limits, base=base) as session:
            remove = ("rm", "-f", "--", *gone) if gone else ("true",)
            put = await self._run(session, task, remove, changed)
            if not put.is_ok:
                return 0.0
            build = field_of(task, "build", list) if "build" in task.payload else []
            if build and not (await self._run(session, task, build)).is_ok:
                return 0.0
            num_passed = 0
            for test in tests:
                is_passed = await self._passes(session, task, test)
                num_passed += is_passed
                if not is_passed and not self._gives_part:
                    break
        share = num_passed / max(1, len(tests))
        return share if self._gives_part else float(share == 1.0)

    async def _passes(self, session: Session, task: Task, test: Mapping[str, Any]) -> bool:
        ran = await self._run(session, task, test["command"], stdin=test.get("stdin", ""))
        is_right = ran.exit_code == test.get("exit_code", 0)
        expected = str(test.get("stdout", ""))
        return is_right and (
            "stdout" not in test or _lines(ran.stdout) == _lines(expected.encode())
        )

    async def _run(
        self,
        session: Session,
        task: Task,
        command: Sequence[str],
        files: Content | None = None,
        stdin: str = "",
    ) -> RunResult:
        # In each call: an earlier one may have changed them.
        hidden = field_of(task, "hidden_files", dict) if "hidden_files" in task.payload else {}
        given: dict[str, bytes | str] = {**(files or {}), **hidden}
        return await session.run(
            given,
            command,
            self._limits,
            keep_files=True,
            stdin=stdin.encode(),
            environ={"HOME": "/tmp"},
        )


def read_files(root: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The regular files among and below `names` in a folder that a policy may have filled.

    Links are not followed, and what is larger than 8 MiB is left out.
    """
    return {
        str(path.relative_to(root)): content
        for name in names
        for path in _regular(root, root / name)
        if (content := _read(path)) is not None
    }


def _regular(root: Path, path: Path) -> Iterator[Path]:
    if any(parent.is_symlink() for parent in (path, *path.parents) if parent.is_relative_to(root)):
        return
    if not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (Path(folder) / name for name in names)


def _read(path: Path) -> bytes | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
            return None
        return opened.read()


def _lines(data: bytes) -> list[bytes]:
    return [line.rstrip() for line in data.rstrip().splitlines()]
