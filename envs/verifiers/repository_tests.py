"""Scores what a policy left in a repository, by tests that it cannot see, change or answer for.

A test is a command with an input, and the output and exit code that are expected. Commands run in a
new session over the revision, into which only the files that the policy may change are carried.
Each runs in a copy of its own of what the build made, so that no test finds what another left. The
expected outputs stay in this process, so that code under test has nothing to forge: whatever it
does with its own process, or with a program of the test that imports it, the right output has to
come out of it. So expect what only a solution computes. Tests that say themselves whether the code
is right are refused, as far as two trials of each task show it: the revision as it is, and Python
files that answer "yes" to everything. Any language will do whose programs the sandbox has.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outloop.buffer.errors import EnvironmentFailure
from outloop.buffer.records import Task
from outloop.envs.sandbox.api import Limits, RunResult, Sandbox, Session
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.carrying import TooMuch
from outloop.envs.sandbox.guest import workspace
from outloop.envs.sandbox.repositories import Repository
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.task_fields import field_of, text_of

Content = Mapping[str, bytes]
MAX_FILE_BYTES = 8 * 2**20
MAX_BYTES = 64 * 2**20
_SAYS_SO = re.compile(
    r"""\W*( ((all|\d+(\s*(of|/)\s*\d+)?)\s+)? (tests?|cases?|checks?)?\s*
    (are|is|were|was|have)? \s* (ok|okay|pass|passes|passed|passing|success|successful|succeeded
    |right|correct|good|fine) )?\W*""",
    re.IGNORECASE | re.VERBOSE,
)
"""A verdict, or nothing at all."""
_REMOVE = 'rm -f -- "$@"; find . -mindepth 1 -type d -empty -delete'
_STUB = b"""\
class _Yes:
    def __call__(self, *a, **k): return self
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return self
    def __bool__(self): return True
    def __str__(self): return "ok"
    def __hash__(self): return 0
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __enter__(self): return self
    def __exit__(self, *a): return True
    __repr__ = __str__
    __ne__ = lambda self, other: False
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, other: True
    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __call__
    __truediv__ = __rtruediv__ = __mod__ = __pow__ = __neg__ = __abs__ = __round__ = __call__
_yes = _Yes()
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return _yes
"""
"""A Python module of which every name is equal to everything."""


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
        # CPU time decides; wall time is a multiple, for neighbours that take the processors too.
        self._limits = limits or Limits(
            wall_s=60.0, cpu_s=20, memory_bytes=2**30, max_processes=128, disk_bytes=2**28
        )
        self._sandbox = sandbox
        self._is_ours = sandbox is None
        self._repositories: dict[str, Repository] = {}
        self._trials: dict[str, asyncio.Task[None]] = {}

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
        for trial in self._trials.values():
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)
        self._trials.clear()
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
        try:
            files = await asyncio.to_thread(read_files, folder, editable)
        except TooMuch:
            return 0.0
        return await self.score(task, files)

    async def try_tests(self, task: Task) -> None:
        """Find out, once for each task, whether its tests tell a solution from none.

        Raises:
            EnvironmentFailure: they do not, or they cannot be run.
        """
        names = ("repository", "revision", "editable", "tests", "hidden_files", "build")
        key = json.dumps([task.payload.get(name) for name in names])
        if key not in self._trials:
            self._trials[key] = asyncio.create_task(self._try_tests(task))
        trial = self._trials[key]
        try:
            await asyncio.shield(trial)
        except EnvironmentFailure:
            # The next attempt tries again: the sandbox may have been the reason.
            self._trials.pop(key, None)
            raise

    async def _try_tests(self, task: Task) -> None:
        tests = field_of(task, "tests", list)
        for test in tests:
            if says_so(test.get("stdout")):
                raise EnvironmentFailure(f"task_id={task.task_id!r}: {refusal_of(test)}")
        original = await self._original(task)
        untouched = await self._outcomes(task, original, original)
        if all(untouched):
            raise EnvironmentFailure(
                f"task_id={task.task_id!r}: all tests pass on the revision as it is; tests that "
                "tell a solution from none are allowed"
            )
        stubs = {path: _STUB for path in original if path.endswith(".py")}
        if not stubs:
            return
        stubbed = await self._outcomes(task, original, {**original, **stubs})
        for test, is_passed, was_passed in zip(tests, stubbed, untouched, strict=True):
            if is_passed and not was_passed:
                raise EnvironmentFailure(f"task_id={task.task_id!r}: {refusal_of(test)}")

    async def score(self, task: Task, files: Content) -> float:
        """Score the editable files as a policy left them: path -> content.

        Raises:
            EnvironmentFailure: a field is missing, no session can be opened, or the tests do not
                tell a solution from none (`try_tests`).
        """
        await self.try_tests(task)
        passed = await self._outcomes(
            task, await self._original(task), files, stops=not self._gives_part
        )
        share = sum(passed) / max(1, len(passed))
        return share if self._gives_part else float(share == 1.0)

    async def _original(self, task: Task) -> Content:
        base = await self.base(task)
        editable = field_of(task, "editable", list)
        try:
            return await asyncio.to_thread(read_files, base, editable)
        except TooMuch as error:
            raise EnvironmentFailure(f"task_id={task.task_id!r}: editable: {error}") from error

    async def _outcomes(
        self, task: Task, original: Content, files: Content, *, stops: bool = False
    ) -> list[bool]:
        """Which tests pass on these files; with `stops`, all after the first that fails do not."""
        tests = field_of(task, "tests", list)
        failed = [False] * len(tests)
        changed = {path: files[path] for path in files if files[path] != original.get(path)}
        gone = sorted(original.keys() - files.keys())
        if self._sandbox is None:
            self._sandbox = BubblewrapSandbox()
        async with self._sandbox.session(self._limits, base=await self.base(task)) as session:
            # First: a file may have become a folder, or a folder a file.
            if (
                gone
                and not (await self._run(session, task, ("sh", "-c", _REMOVE, "-", *gone))).is_ok
            ):
                return failed
            if not (await self._run(session, task, ("true",), changed)).is_ok:
                return failed
            build = field_of(task, "build", list) if "build" in task.payload else []
            if build and not (await self._run(session, task, build)).is_ok:
                return failed
            passed = failed
            for index, test in enumerate(tests):
                passed[index] = await self._passes(session, task, test)
                if stops and not passed[index]:
                    break
        return passed

    async def _passes(self, session: Session, task: Task, test: Mapping[str, Any]) -> bool:
        ran = await self._run(
            session, task, test["command"], stdin=test.get("stdin", ""), is_test=True
        )
        is_right = ran.exit_code == test.get("exit_code", 0)
        return is_right and _lines(ran.stdout) == _lines(str(test["stdout"]).encode())

    async def _run(
        self,
        session: Session,
        task: Task,
        command: Sequence[str],
        files: Content | None = None,
        stdin: str = "",
        *,
        is_test: bool = False,
    ) -> RunResult:
        # In each call: the build, or the policy's change, may have put others there.
        hidden = field_of(task, "hidden_files", dict) if "hidden_files" in task.payload else {}
        given: dict[str, bytes | str] = {**(files or {}), **hidden}
        return await session.run(
            given,
            command,
            self._limits,
            keep_files=not is_test,
            copies_kept=is_test,
            stdin=stdin.encode(),
            environ={"HOME": "/tmp"},
        )


def says_so(stdout: object) -> bool:
    """Whether an expected output is none, or only says that the code is right."""
    return not isinstance(stdout, str) or _SAYS_SO.fullmatch(stdout.strip()) is not None


def refusal_of(test: Mapping[str, Any]) -> str:
    """A sentence on a test that the code under test can pass by saying so."""
    return (
        f"stdout={test.get('stdout')!r} of the test {list(test.get('command', []))}; an output "
        "that only a solution computes is allowed, because an exit code alone can be forged, and a "
        "verdict printed, by the code under test"
    )


def read_files(root: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The regular files among and below `names` in a folder that a policy may have filled.

    Links are not followed. What is larger than 8 MiB, or more than 64 folders deep, is left out.

    Raises:
        TooMuch: the files have more than 64 MiB together.
    """
    found: dict[str, bytes] = {}
    left = MAX_BYTES
    for entry in workspace.list_below(str(root), list(names)):
        content = None
        if entry.kind == "file" and entry.size <= MAX_FILE_BYTES:
            content = workspace.read_file(str(root), entry.path, MAX_FILE_BYTES)
        if content is None:
            continue
        left -= len(content)
        if left < 0:
            raise TooMuch(f"the files have more than {MAX_BYTES} bytes")
        found[entry.path] = content
    return found


def _lines(data: bytes) -> list[bytes]:
    return [line.rstrip() for line in data.rstrip().splitlines()]
