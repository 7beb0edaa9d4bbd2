"""What every sandbox can do, and what a call gives back.

Owns: limits, programs, results, the two protocols. Does not own: how a backend keeps its promises
(backends, jail). Invariant: a result describes what the program did; what the sandbox itself failed
at is an EnvironmentFailure, never a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypedDict, Unpack

from outloop.buffer.errors import SettingsError

Ended = Literal[
    "exited",
    "signaled",
    "wall_time",
    "cpu_time",
    "memory",
    "output",
    "refused",
    "killed",
    "partner",
]
"""exited, signaled: by itself. wall_time, cpu_time, memory, output: by that limit. refused: its
files could not be written. killed: from outside. partner: the other of a pair ended first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one call may use; a jail is opened with the most that any of its calls may use."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Of each process."""
    memory_bytes: int = 512 * 2**20
    """Of all processes together."""
    max_processes: int = 32
    """Threads count."""
    disk_bytes: int = 64 * 2**20
    """All files together; a single file too."""
    max_files: int = 4096
    output_bytes: int = 64 * 2**10
    """Kept of stdout, and of stderr; sixteen times as much ends the program."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0:
                raise SettingsError(f"Limits: {name}={value!r}; a number above 0 is allowed")


Files = Mapping[str, bytes | str]
"""Path below the working directory -> content."""


class Options(TypedDict, total=False):
    """What a call may be given beside its files and its command; see `Program`."""

    stdin: bytes
    environ: Mapping[str, str]
    collect: Sequence[str]
    keep_files: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One program to run: everything that it gets to see."""

    command: Sequence[str]
    """`python` is the jail's own interpreter; `python script.py` is a fork of it, already warm."""
    files: Files = field(default_factory=dict)
    stdin: bytes = b""
    environ: Mapping[str, str] = field(default_factory=dict)
    collect: Sequence[str] = ()
    """Files to bring back; only regular files, links are not followed."""
    keep_files: bool = False
    """True: work in the folder that stays until the jail closes. False: in an empty one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a program left behind."""

    ended: Ended
    exit_code: int | None
    """None unless ended is "exited"."""
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    is_output_cut: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Of `Program.collect`, those that are there, regular and not too large."""
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Exited with code 0."""
        return self.exit_code == 0


class Jail(Protocol):
    """A place for the calls of one episode; one call at a time, further ones wait."""

    async def run(
        self,
        files: Files,
        command: Sequence[str],
        limits: Limits | None = None,
        **options: Unpack[Options],
    ) -> RunResult:
        """Run one program; limits above the jail's own are refused.

        Raises:
            SettingsError: limits above the jail's, or an empty command.
            EnvironmentFailure: the jail is lost, and no other can be started.
        """
        ...

    async def run_pair(
        self, first: Program, second: Program, limits: Limits | None = None
    ) -> tuple[RunResult, RunResult]:
        """Run two programs that cannot reach each other but by a socket, descriptor 3 of each.

        The pair ends when `first` ends.
        """
        ...


class Sandbox(Protocol):
    """Where programs that a policy wrote are run."""

    @property
    def enforcement(self) -> str:
        """One sentence: what bounds memory and processes here."""
        ...

    async def run(
        self,
        files: Files,
        command: Sequence[str],
        limits: Limits | None = None,
        **options: Unpack[Options],
    ) -> RunResult:
        """Run one program in a fresh jail of its own.

        Raises:
            EnvironmentFailure: the jail could not be started.
        """
        ...

    def jail(self, limits: Limits | None = None) -> AbstractAsyncContextManager[Jail]:
        """A jail for an episode; it ends with the context.

        Raises:
            EnvironmentFailure: on entering, when it could not be started.
        """
        ...

    async def close(self) -> None:
        """Remove what the sandbox keeps on this machine."""
        ...
