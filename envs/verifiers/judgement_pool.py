"""Worker processes for judgements that may never end: patterns, schemas, mathematics.

A worker has one job at a time. A worker past its deadline is killed; the next job gets a new one,
forked from a process that has imported everything.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from outloop.buffer.errors import DeadlineExceeded, EnvironmentFailure
from outloop.envs.verifiers.task_fields import num_cores
from outloop.envs.verifiers.turns import SHORT_CPU_S, Place, Turns

_START_S = 120.0
_MAX_ANSWER_BYTES = 2 * 2**20
_WALL_FACTOR = 5.0
"""A worker ends itself by its CPU time. Beside others it may take so many times as long."""


class Judgement(msgspec.Struct, frozen=True):
    """The result of one job."""

    value: str | None = None
    error: str = ""
    """Set if the job itself is wrong: a pattern, a schema, an expected answer."""


class JudgementPool:
    """A pool of workers, started by the first job.

    Args:
        num_workers: jobs that take long at the same time, with a few others beside them; None:
            this process's share of the cores.
        preload: modules that the workers find imported.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        preload: Sequence[str] = (),
    ) -> None:
        self._preload = list(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._turns = Turns[socket.socket](num_workers or num_cores())
        self._starting: asyncio.Lock | None = None
        self.num_replaced = 0

    async def call(self, job: Sequence[str], *, timeout_s: float) -> str | None:
        """Run a job; None also if it takes more CPU than `timeout_s`, or ends its worker.

        It waits for its turn without a limit of its own.

        Raises:
            EnvironmentFailure: the job is wrong, or no worker can be started.
        """
        await self._start()
        short_s = min(timeout_s, SHORT_CPU_S)
        judged = await self._judge(job, short_s, is_long=False)
        if judged is None and short_s < timeout_s:
            judged = await self._judge(job, timeout_s, is_long=True)
        if judged is None:
            return None
        if judged.error:
            raise EnvironmentFailure(f"the verifier cannot judge: {judged.error}")
        return judged.value

    async def _judge(self, job: Sequence[str], cpu_s: float, *, is_long: bool) -> Judgement | None:
        async with self._turns.turn(is_long=is_long) as place:
            template = self._process
            try:
                if place.held is None:
                    place.held = self._fork()
                async with asyncio.timeout(_WALL_FACTOR * cpu_s):
                    return await _ask(place.held, [str(cpu_s), *job])
            except (TimeoutError, OSError, EOFError) as error:
                self._give_up(place)
                if template is None or template.poll() is not None:
                    raise EnvironmentFailure(
                        "the process that forks the verifier's workers has ended"
                    ) from error
                return None
            except BaseException:
                self._give_up(place)
                raise

    async def _start(self) -> None:
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._process is not None and self._process.poll() is None:
                return
            self._close_lines()
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            command = [
                sys.executable,
                "-P",
                "-m",
                "outloop.envs.verifiers.judgement_worker",
                *self._preload,
            ]
            self._process = await asyncio.to_thread(
                subprocess.Popen, command, stdin=theirs.fileno()
            )
            theirs.close()
            self._control = ours
            try:
                async with asyncio.timeout(_START_S):
                    answer = await asyncio.get_running_loop().sock_recv(ours, 1)
            except TimeoutError as error:
                await self.close()
                raise DeadlineExceeded(
                    who="verifier", phase="start", peer="the worker template", after_s=_START_S
                ) from error
            if answer != b"+":
                code = await asyncio.to_thread(self._process.wait)
                raise EnvironmentFailure(
                    f"the verifier's workers did not start (exit_code={code}): one of "
                    f"{self._preload} cannot be imported; install outloop[verifiers]"
                )

    def _fork(self) -> socket.socket:
        """The socket of a new worker."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        theirs.close()
        return ours

    def _give_up(self, place: Place[socket.socket]) -> None:
        """Close a worker's socket: the template then kills the worker."""
        line, place.held = place.held, None
        if line is not None:
            line.close()
            self.num_replaced += 1

    async def close(self) -> None:
        """Stop the template and every worker."""
        process, self._process = self._process, None
        self._close_lines()
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 5)
            process.kill()
            await asyncio.to_thread(process.wait)

    def _close_lines(self) -> None:
        """Close the sockets of the template and of every idle worker."""
        for line in self._turns.take_held():
            line.close()
        if self._control is not None:
            self._control.close()
            self._control = None


async def _ask(line: socket.socket, job: Sequence[str]) -> Judgement:
    loop = asyncio.get_running_loop()
    data = msgspec.json.encode(list(job))
    await loop.sock_sendall(line, len(data).to_bytes(8, "big") + data)
    length = int.from_bytes(await _read(line, 8), "big")
    if length > _MAX_ANSWER_BYTES:
        raise EOFError(f"an answer of length={length}")
    return msgspec.json.decode(await _read(line, length), type=Judgement)


async def _read(line: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = await asyncio.get_running_loop().sock_recv(line, length - len(data))
        if not chunk:
            raise EOFError(f"the worker ended after {len(data)} of {length} bytes")
        data += chunk
    return bytes(data)
