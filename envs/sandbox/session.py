"""Calls into one session of a sandbox, one at a time.

Whatever a program does is a result. A lost session is replaced; it is an EnvironmentFailure only if
a new session does not work either.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

import structlog

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.envs.sandbox.api import (
    Ended,
    Entry,
    Files,
    Interpreter,
    Limits,
    Options,
    Program,
    RunResult,
)
from outloop.envs.sandbox.cgroups import Cgroup
from outloop.envs.sandbox.guest import framing, python_interpreter
from outloop.envs.sandbox.supervisor_process import ENVIRON, SessionLost, SupervisorProcess

_log = structlog.get_logger()
_GRACE_S = 15.0
"""Time beyond the call's wall time for the supervisor to end the call and to answer."""
_OWN_PROCESSES = 5
"""The session's reaper, the supervisor, its fork for a call, and the programs' inits."""
_LARGE_BYTES = 2**20
_CONTROL = Program(command=("python", "control.py"), files={"control.py": "print('alive')"})

_INTERPRETERS = {
    # The shell reads its script from the line, so that no loop of ours is around the inputs.
    "bash": ("bash", "-c", "exec bash -s <&3"),
    "python": ("python3", "-u", "-c", Path(python_interpreter.__file__).read_text()),
}
_MAX_STATUS = 255

Value = TypeVar("Value")
Bounds = Literal["cgroup", "watched", "each"]
"""What limits memory: a control group; a limit for each process and a watch on their sum; the limit
for each process alone."""
StartSupervisor = Callable[[], Awaitable[tuple[SupervisorProcess, Cgroup | None]]]


class SupervisedSession:
    """A session that a supervisor serves; started by `open`."""

    def __init__(self, limits: Limits, start: StartSupervisor, bounds: Bounds) -> None:
        self._limits = limits
        self._start = start
        self._bounds = bounds
        self._process: SupervisorProcess | None = None
        self._cgroup: Cgroup | None = None
        self._placing: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()
        self._has_interpreter = False

    @property
    def pid(self) -> int:
        """Process id of bubblewrap, the engine or the supervisor; 0 when none runs now."""
        return self._process.pid if self._process is not None else 0

    @property
    def cgroup(self) -> Cgroup | None:
        """The control group that limits the session; None without one."""
        return self._cgroup

    async def open(self) -> None:
        """Start the session; one that fails, or hangs, is tried a second time.

        Raises:
            EnvironmentFailure: the second time too.
        """
        try:
            self._process, self._cgroup = await self._start()
        except EnvironmentFailure as error:
            _log.warning("sandbox_start_again", error=str(error))
            self._process, self._cgroup = await self._start()
        if self._cgroup is not None:
            # Moving a process takes the kernel some milliseconds; the first call waits for it.
            add = asyncio.to_thread(self._cgroup.add, self._process.pid)
            self._placing = asyncio.ensure_future(add)

    async def close(self) -> None:
        """End the session and everything in it."""
        process, self._process = self._process, None
        cgroup, self._cgroup = self._cgroup, None
        placing, self._placing = self._placing, None
        if placing is not None:
            with suppress(OSError):
                await placing
        if process is not None:
            await process.close()
        if cgroup is not None:
            await asyncio.to_thread(cgroup.remove)

    async def run(
        self,
        files: Files,
        command: Sequence[str],
        limits: Limits | None = None,
        **options: Unpack[Options],
    ) -> RunResult:
        """See `Session.run`."""
        program = Program(command=command, files=files, **options)
        return (await self._call([program], limits or self._limits))[0]

    async def run_pair(
        self, first: Program, second: Program, limits: Limits | None = None
    ) -> tuple[RunResult, RunResult]:
        """See `Session.run_pair`."""
        results = await self._call([first, second], limits or self._limits)
        return results[0], results[1]

    @asynccontextmanager
    async def interpreter(
        self,
        kind: Literal["bash", "python"],
        limits: Limits | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Interpreter]:
        """See `Session.interpreter`."""
        if kind not in _INTERPRETERS:
            raise SettingsError(f"kind={kind!r}; bash and python are allowed")
        program = Program(command=_INTERPRETERS[kind], keep_files=True, environ=environ or {})
        limits = limits or self._limits
        self._check([program], limits)
        async with self._turn:
            self._refuse_interpreter()
            self._has_interpreter = True
        opened = _Interpreter(self, kind, program, limits)
        try:
            yield opened
        finally:
            await opened.close()
            self._has_interpreter = False

    def _refuse_interpreter(self) -> None:
        if self._has_interpreter:
            raise SettingsError(
                "an interpreter of this session is open, which takes every call until its context "
                "ends; end it first, or open another session"
            )

    async def exchange(
        self,
        program: Program,
        start: Callable[[], bytes],
        message: bytes,
        timeout_s: float,
        begun: SupervisorProcess | None,
    ) -> tuple[SupervisorProcess | None, list[bytes] | RunResult]:
        """For an interpreter: send a message to it and receive its answer.

        Args:
            start: the message that begins it, if it was not begun in this very process.
            begun: the process in which it was begun.

        Returns:
            (the process in which it is now, its answer); or, if the session was lost, how.
        """
        async with self._turn:
            await self._ready()
            assert self._process is not None
            process = self._process
            try:
                await process.send(message if process is begun else start() + message)
                (answer,) = await process.receive(timeout_s)
            except SessionLost as error:
                (result,) = await self._blame([program], error)
                return None, replace(result, lost_state=True)
            except BaseException:
                await self.close()
                raise
            return process, framing.unpack(answer[8:])

    async def _ready(self) -> None:
        if self._process is None:
            await self.open()
        await self._place()

    async def _call(self, programs: list[Program], limits: Limits) -> list[RunResult]:
        self._check(programs, limits)
        async with self._turn:
            self._refuse_interpreter()
            await self._ready()
            try:
                return await self._ask(programs, limits)
            except SessionLost as error:
                return await self._blame(programs, error)
            except BaseException:
                # Cancelled, or the answer cannot be read: the next one would not be the call's.
                await self.close()
                raise

    async def _ask(self, programs: list[Program], limits: Limits) -> list[RunResult]:
        assert self._process is not None
        sizes = (len(data) for program in programs for data in program.files.values())
        message = await _beside(sum(sizes), self.message, programs, limits)
        await self._process.send(message)
        answers = await self._process.receive(limits.wall_s + _GRACE_S)
        results = []
        for answer, program in zip(answers, programs, strict=True):
            fields = await _beside(len(answer), framing.unpack, answer[8:])
            results.append(_result(fields, program, limits.cpu_s))
        return results

    async def _place(self) -> None:
        """Wait until the session's processes are in their cgroup.

        Raises:
            EnvironmentFailure: the kernel refuses; nothing runs unbounded.
        """
        if self._placing is None:
            return
        try:
            await asyncio.shield(self._placing)
        except OSError as error:
            await self.close()
            raise EnvironmentFailure(
                f"the session's processes cannot be moved into their cgroup: {error}; see "
                "docs/sandbox.md, cgroups"
            ) from error
        self._placing = None

    async def _blame(self, programs: list[Program], error: SessionLost) -> list[RunResult]:
        """Decide why a session died in a call: if a new one works, the program did it.

        Raises:
            EnvironmentFailure: a control program does not run either.
        """
        num_oom_kills = self._cgroup.oom_kills() if self._cgroup else 0
        await self.close()
        await self.open()
        await self._place()
        try:
            control = (await self._ask([_CONTROL], self._limits))[0]
        except SessionLost:
            await self.close()
            raise
        if not control.is_ok:
            raise error
        ended: Ended = "memory" if num_oom_kills else "killed"
        words = f"the session was lost: {error}".encode()
        return [RunResult(ended=ended, exit_code=None, stderr=words) for _ in programs]

    def _check(self, programs: list[Program], limits: Limits) -> None:
        for name in Limits.__slots__:
            if getattr(limits, name) > getattr(self._limits, name):
                raise SettingsError(
                    f"limits.{name}={getattr(limits, name)} is above the session's own "
                    f"{getattr(self._limits, name)}; open it with as much as any call needs"
                )
        for program in programs:
            if not program.command or isinstance(program.command, str):
                raise SettingsError(
                    f"command={program.command!r}; a sequence is allowed, "
                    "for example ('python', 'main.py')"
                )
            if program.keep_files and program.copies_kept:
                raise SettingsError(
                    "keep_files=True, copies_kept=True: one of them is allowed; changes of a copy "
                    "are not kept"
                )
            collected = (path.removeprefix("/tmp/") for path in program.collect)
            arranged = (entry.path for entry in program.arrange)
            for path in (*program.files, *program.given, *arranged, *collected):
                if path.startswith("/") or ".." in path.split("/") or not path.strip("./"):
                    raise SettingsError(
                        f"path={path!r}; a path below the working directory is allowed"
                    )

    def message(
        self, programs: list[Program], limits: Limits, *, is_interpreter: bool = False
    ) -> bytes:
        """What begins a call."""
        watched_bytes = limits.memory_bytes if self._bounds == "watched" else 0
        each_bytes = 0 if self._bounds == "cgroup" else limits.memory_bytes
        is_kept = any(program.keep_files or program.copies_kept for program in programs)
        head = [
            int(is_kept),
            0 if is_interpreter else len(programs),
            int(1000 * limits.wall_s),
            limits.output_bytes,
            watched_bytes,
        ]
        # A pair runs under one user, whose processes are counted together.
        num_processes = limits.max_processes * len(programs) + _OWN_PROCESSES
        orders = [_order(program, limits, each_bytes, num_processes) for program in programs]
        return framing.pack([b"%d" % number for number in head]) + b"".join(orders)


class _Interpreter:
    """See `Interpreter`."""

    def __init__(
        self, session: SupervisedSession, kind: str, program: Program, limits: Limits
    ) -> None:
        self._session = session
        self._kind = kind
        self._program = program
        self._limits = limits
        self._process: SupervisorProcess | None = None
        """In which it runs; None: it is to be begun."""

    async def run(self, text: str, *, wall_s: float | None = None) -> RunResult:
        """See `Interpreter.run`."""
        wall_s = self._limits.wall_s if wall_s is None else wall_s
        if not 0 < wall_s <= self._limits.wall_s:
            raise SettingsError(
                f"wall_s={wall_s}; above 0 and at most limits.wall_s={self._limits.wall_s} is "
                "allowed"
            )
        token = secrets.token_hex(8)
        text = self._input(token, text)
        parts = [b"%d" % math.ceil(1000 * wall_s), token.encode(), text.encode(errors="replace")]
        message = framing.pack(parts)
        process, self._process = self._process, None
        process, answer = await self._session.exchange(
            self._program, self._start, message, wall_s + _GRACE_S, process
        )
        if isinstance(answer, RunResult):
            return answer
        if answer[0] != b"answered":
            return replace(_result(answer, self._program, self._limits.cpu_s), lost_state=True)
        self._process = process
        _, wall_ms, is_cut, stdout, stderr, status = answer
        return RunResult(
            ended="exited",
            # What the interpreter says of itself: its code may have written there too.
            exit_code=min(int(status), _MAX_STATUS) if status.isdigit() else _MAX_STATUS,
            stdout=stdout,
            stderr=stderr,
            is_output_cut=bool(int(is_cut)),
            wall_s=int(wall_ms) / 1000,
        )

    async def close(self) -> None:
        """End it, and every process that it left."""
        process, self._process = self._process, None
        if process is not None:
            message = framing.pack([b"0", b"", b"", b"end"])
            await self._session.exchange(self._program, self._start, message, _GRACE_S, process)

    def _start(self) -> bytes:
        return self._session.message([self._program], self._limits, is_interpreter=True)

    def _input(self, token: str, text: str) -> str:
        if self._kind == "python":
            return ascii((token, text)) + "\n"
        words = shlex.quote(text.replace("\0", ""))
        return f"eval {words} </dev/null 3>&-\nprintf '{token} %d\\n' \"$?\" >&3\n"


async def _beside(num_bytes: int, work: Callable[..., Value], *arguments: Any) -> Value:
    """Do work of so many bytes: in a thread if the event loop would be blocked by it."""
    if num_bytes < _LARGE_BYTES:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def _order(program: Program, limits: Limits, address_space_bytes: int, num_processes: int) -> bytes:
    numbers = (
        int(program.keep_files),
        math.ceil(limits.cpu_s),
        address_space_bytes,
        limits.disk_bytes,
        limits.max_files,
        num_processes,
    )
    fields = [b"%d" % number for number in numbers]
    environ = {**ENVIRON, **program.environ}
    fields += [program.stdin, b"%d" % len(program.command)]
    fields += [os.fsencode(word) for word in program.command]
    fields.append(b"%d" % len(environ))
    for name, value in environ.items():
        fields += [os.fsencode(name), os.fsencode(value)]
    fields.append(b"%d" % len(program.files))
    for path, content in program.files.items():
        data = content.encode() if isinstance(content, str) else content
        fields += [os.fsencode(path), b"%d" % 0o644, data]
    fields.append(b"%d" % len(program.given))
    for path, (mode, data) in program.given.items():
        fields += [os.fsencode(path), b"%d" % mode, data]
    fields.append(b"%d" % len(program.arrange))
    for entry in program.arrange:
        fields += [entry.kind.encode(), os.fsencode(entry.path), b"%d" % entry.mode]
        fields.append(os.fsencode(entry.target))
    fields.append(b"%d" % program.copies_kept)
    for names in (program.collect, program.listed):
        fields.append(b"%d" % len(names))
        fields += [os.fsencode(path) for path in names]
    return framing.pack(fields)


def _result(fields: list[bytes], program: Program, cpu_s: float) -> RunResult:
    ended, wall_ms, is_cut, stdout, stderr, *report = fields
    exit_code = signal_number = None
    cpu_ms = 0
    how: str = ended.decode()
    collected: dict[str, bytes] = {}
    listed: list[Entry] = []
    if report:
        wait_status, cpu_ms = int(report[0]), int(report[1])
        found = report[2 : 2 + 2 * len(program.collect)]
        for path, is_there, data in zip(program.collect, found[::2], found[1::2], strict=True):
            if int(is_there):
                collected[path] = data
        below = report[2 + 2 * len(program.collect) :]
        for kind, name, mode, size, target in zip(*(below[i::5] for i in range(5)), strict=True):
            entry = Entry(
                kind.decode(),
                os.fsdecode(name),
                int(mode),
                int(size),
                os.fsdecode(target),
            )
            listed.append(entry)
        code = os.waitstatus_to_exitcode(wait_status)
        if how == "exited" and code < 0:
            signal_number = -code
            is_spent = signal_number == 24 or (signal_number == 9 and cpu_ms >= 1000 * cpu_s)
            how = "cpu_time" if is_spent else "signaled"
        elif how == "exited":
            exit_code = code
    checked: Ended = how  # type: ignore[assignment]
    return RunResult(
        ended=checked,
        exit_code=exit_code,
        signal=signal_number,
        stdout=stdout,
        stderr=stderr,
        is_output_cut=bool(int(is_cut)),
        files=collected,
        entries=listed,
        wall_s=int(wall_ms) / 1000,
        cpu_s=cpu_ms / 1000,
    )
