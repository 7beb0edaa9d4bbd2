"""One supervisor process and the socket to it.

After `close` the process has ended and is reaped; in a namespace, everything in the sandbox ends
with it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from outloop.buffer.errors import EnvironmentFailure
from outloop.envs.sandbox.guest import framing

_MAX_ERROR_BYTES = 2000
_LEAVE_S = 2.0
_LARGE_BYTES = 2**20
"""Messages from here on are taken apart in a thread."""
ENVIRON = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
"""The environment that every program in a sandbox begins with."""


class SessionLost(EnvironmentFailure):
    """The supervisor ended, or did not answer in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a supervisor is started."""

    argv: Sequence[str]
    user: int | None = None
    """Numeric user and group of the process; None: those of this process."""
    inherits_environ: bool = False
    """True: the command needs the variables with the address of its engine."""
    pass_fds: Sequence[int] = ()
    """Descriptors that it inherits under the same numbers."""
    end_argv: Sequence[str] = ()
    """A command that ends what killing the process would leave behind."""
    start_timeout_s: float = 10.0


class SupervisorProcess:
    """A started supervisor."""

    def __init__(
        self, launch: Launch, process: subprocess.Popen[bytes], line: socket.socket
    ) -> None:
        self._launch = launch
        self._process = process
        self._line = line

    @property
    def pid(self) -> int:
        """Process id of the outermost process."""
        return self._process.pid

    @classmethod
    async def start(cls, launch: Launch) -> SupervisorProcess:
        """Start it and wait until it is ready.

        Raises:
            EnvironmentFailure: with what it wrote to stderr.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.to_thread(_popen, launch, theirs)
        except OSError as error:
            ours.close()
            raise EnvironmentFailure(
                f"the sandbox could not start {launch.argv[0]!r}: {error}"
            ) from error
        finally:
            theirs.close()
        started = cls(launch, process, ours)
        try:
            await started.receive(launch.start_timeout_s)
        except SessionLost as error:
            await started.close()
            raise EnvironmentFailure(
                f"the sandbox did not start: {error}; docs/sandbox.md says what each backend needs"
            ) from error
        except asyncio.CancelledError:
            await started.close()
            raise
        return started

    async def send(self, data: bytes) -> None:
        """Send messages.

        Raises:
            SessionLost: the supervisor has ended; with what it wrote to stderr.
        """
        try:
            await asyncio.get_running_loop().sock_sendall(self._line, data)
        except OSError as error:
            raise self._lost(error) from error

    async def receive(self, timeout_s: float) -> list[bytes]:
        """Receive the next message.

        Raises:
            SessionLost: the supervisor has ended, or did not answer within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._read(framing.body_length(await self._read(8)))
            if len(body) < _LARGE_BYTES:
                return framing.unpack(body)
            return await asyncio.to_thread(framing.unpack, body)
        except TimeoutError as error:
            raise SessionLost(
                f"the supervisor in the sandbox did not answer in {timeout_s:.1f} s; it was ended"
            ) from error
        except (OSError, ValueError) as error:
            raise self._lost(error) from error

    async def _read(self, length: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < length:
            chunk = await loop.sock_recv(self._line, min(2**20, length - len(data)))
            if not chunk:
                raise ValueError(f"end after {len(data)} of {length} bytes")
            data += chunk
        return bytes(data)

    def _lost(self, error: Exception) -> SessionLost:
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        written = self._process.stderr.read(_MAX_ERROR_BYTES) or b""
        words = " ".join(written.decode(errors="replace").split())
        return SessionLost(f"the supervisor in the sandbox has ended: {error}; {words}")

    async def close(self) -> None:
        """Kill and reap the process, with everything in the sandbox."""
        self._line.close()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        # The supervisor ends when its socket closes, and the session with it.
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        if self._launch.end_argv:
            subprocess.run(self._launch.end_argv, capture_output=True, check=False, timeout=60)


def _popen(launch: Launch, line: socket.socket) -> subprocess.Popen[bytes]:
    # The runner's extra groups could open files that the user cannot.
    groups: list[int] | None = None if launch.user is None else []
    return subprocess.Popen(
        list(launch.argv),
        stdin=line.fileno(),
        stdout=line.fileno(),
        stderr=subprocess.PIPE,
        pass_fds=launch.pass_fds,
        start_new_session=True,
        env=None if launch.inherits_environ else ENVIRON,
        cwd="/",
        user=launch.user,
        group=launch.user,
        extra_groups=groups,
    )
