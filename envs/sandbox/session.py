"""Calls into one session of a sandbox, one at a time.

Whatever a program does is a result. A lost session is replaced; it is an EnvironmentFailure only if
a new session does not work either.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Literal, Unpack

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.envs.sandbox.api import Ended, Files, Limits, Options, Program, RunResult
from outloop.envs.sandbox.cgroups import Cgroup
from outloop.envs.sandbox.guest import framing
from outloop.envs.sandbox.supervisor_process import ENVIRON, SessionLost, SupervisorProcess

_GRACE_S = 15.0
"""Time beyond the call's wall time for the supervisor to end the call and to answer."""
_OWN_PROCESSES = 5
"""The session's reaper, the supervisor, its fork for a call, and the programs' inits."""
_CONTROL = Program(command=("python", "control.py"), files={"control.py": "print('alive')"})

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

    @property
    def pid(self) -> int:
        """Process id of bubblewrap, the engine or the supervisor; 0 when none runs now."""
        return self._process.pid if self._process is not None else 0

    @property
    def cgroup(self) -> Cgroup | None:
        """The control group that limits the session; None without one."""
        return self._cgroup

    async def open(self) -> None:
        """Start the session."""
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

    async def _call(self, programs: list[Program], limits: Limits) -> list[RunResult]:
        self._check(programs, limits)
        async with self._turn:
            if self._process is None:
                await self.open()
            assert self._process is not None
            await self._place()
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
        await self._process.send(self._message(programs, limits))
        answers = await self._process.receive(limits.wall_s + _GRACE_S)
        return [
            _result(framing.unpack(answer[8:]), program, limits.cpu_s)
            for answer, program in zip(answers, programs, strict=True)
        ]

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
            for path in (*program.files, *program.collect):
                if path.startswith("/") or ".." in path.split("/") or not path.strip("./"):
                    raise SettingsError(
                        f"path={path!r}; a path below the working directory is allowed"
                    )

    def _message(self, programs: list[Program], limits: Limits) -> bytes:
        watched_bytes = limits.memory_bytes if self._bounds == "watched" else 0
        each_bytes = 0 if self._bounds == "cgroup" else limits.memory_bytes
        is_kept = any(program.keep_files for program in programs)
        head = [
            int(is_kept),
            len(programs),
            int(1000 * limits.wall_s),
            limits.output_bytes,
            watched_bytes,
        ]
        # A pair runs under one user, whose processes are counted together.
        num_processes = limits.max_processes * len(programs) + _OWN_PROCESSES
        orders = [_order(program, limits, each_bytes, num_processes) for program in programs]
        return framing.pack([b"%d" % number for number in head]) + b"".join(orders)


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
    fields.append(b"%d" % len(program.collect))
    fields += [os.fsencode(path) for path in program.collect]
    return framing.pack(fields)


def _result(fields: list[bytes], program: Program, cpu_s: float) -> RunResult:
    ended, wall_ms, is_cut, stdout, stderr, *report = fields
    exit_code = signal_number = None
    cpu_ms = 0
    how: str = ended.decode()
    collected: dict[str, bytes] = {}
    if report:
        wait_status, cpu_ms = int(report[0]), int(report[1])
        found = report[2:]
        for path, is_there, data in zip(program.collect, found[::2], found[1::2], strict=True):
            if int(is_there):
                collected[path] = data
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
        wall_s=int(wall_ms) / 1000,
        cpu_s=cpu_ms / 1000,
    )
