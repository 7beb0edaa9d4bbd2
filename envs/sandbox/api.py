"""The interface of every sandbox, and the result of a call.

A result describes what the program did. A failure of the sandbox itself is an EnvironmentFailure,
never a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
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
"""How a program ended. exited, signaled: on its own. wall_time, cpu_time, memory, output: by that
limit. refused: its files could not be written. killed: from outside. partner: the other program of
a pair ended first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one call. A session is opened with the highest limits that its calls may have."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """CPU time of each process."""
    memory_bytes: int = 512 * 2**20
    """Memory of all processes together."""
    max_processes: int = 32
    """Processes and threads together."""
    disk_bytes: int = 64 * 2**20
    """Limit of all files together, and of each file."""
    max_files: int = 4096
    output_bytes: int = 64 * 2**10
    """How much of stdout, and of stderr, is kept. A program that writes 16 times as much ends."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0:
                raise SettingsError(f"Limits: {name}={value!r}; a number above 0 is allowed")


Files = Mapping[str, bytes | str]
"""Path below the working directory -> content."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or symbolic link of a tree, without a file's content."""

    kind: Literal["file", "folder", "link"]
    path: str
    mode: int
    """The nine bits of permission."""
    size: int = 0
    target: str = ""
    """Of a link."""


class Options(TypedDict, total=False):
    """Further arguments of a call; see `Program`."""

    stdin: bytes
    environ: Mapping[str, str]
    given: Mapping[str, tuple[int, bytes]]
    arrange: Sequence[Entry]
    collect: Sequence[str]
    listed: Sequence[str]
    keep_files: bool
    copies_kept: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One program to run, with everything that it can see."""

    command: Sequence[str]
    """`python` is the session's interpreter; `python script.py` runs in a fork of it, without a new
    start."""
    files: Files = field(default_factory=dict)
    stdin: bytes = b""
    environ: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)
    """Files below /outloop/given, path -> (mode, content), which the program cannot change; in
    bubblewrap only."""
    arrange: Sequence[Entry] = ()
    """Folders and links to make, and modes to set, when `files` are written."""
    collect: Sequence[str] = ()
    """Files to return: regular files only, links are not followed. In bubblewrap, paths that begin
    with /tmp/ are allowed too."""
    listed: Sequence[str] = ()
    """Files and folders to list, with what is below them, when no process of the program is left.
    Links that lead out of the working directory, and what is no file, folder or link, are left
    out."""
    keep_files: bool = False
    """True: run in a folder that is kept until the session closes. False: in an empty folder."""
    copies_kept: bool = False
    """True: run in a copy of the kept folder and of the kept /tmp, which goes with the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a program ended, its output and its files."""

    ended: Ended
    exit_code: int | None
    """None unless ended is "exited"."""
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    is_output_cut: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Those of `Program.collect` that exist, are regular files and fit the disk limit."""
    entries: Sequence[Entry] = ()
    """Those of `Program.listed`: folders before what is in them."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    lost_state: bool = False
    """Of an interpreter: it ended, so that the next input finds none of its variables, working
    folder and background processes. Its files are kept, unless `ended` is "killed"."""

    @property
    def is_ok(self) -> bool:
        """True if the program exited with code 0."""
        return self.exit_code == 0


class Interpreter(Protocol):
    """A shell or a Python that keeps its state from one input to the next: variables, functions,
    working folder, and processes that it left running."""

    async def run(self, text: str, *, wall_s: float | None = None) -> RunResult:
        """Run one input: commands of the shell, or statements of Python, whose last expression is
        shown.

        It has `wall_s`, at most the limits' own, and its own share of output. An interpreter that
        ended, or was ended by a limit, is begun again with the next input; the result says so
        (`lost_state`). Output that background processes write later is in a later result.

        Raises:
            SettingsError: `wall_s` is above that of the limits.
            EnvironmentFailure: the session was lost, and no other can be started.
        """
        ...


class Session(Protocol):
    """Runs the programs of one episode, one call after the other."""

    async def run(
        self,
        files: Files,
        command: Sequence[str],
        limits: Limits | None = None,
        **options: Unpack[Options],
    ) -> RunResult:
        """Run one program; limits above the session's own are refused.

        Raises:
            SettingsError: limits above the session's, or an empty command.
            EnvironmentFailure: the session was lost, and no other can be started.
        """
        ...

    async def run_pair(
        self, first: Program, second: Program, limits: Limits | None = None
    ) -> tuple[RunResult, RunResult]:
        """Run two programs that share only a socket, which is descriptor 3 of each.

        The pair ends when `first` ends.
        """
        ...

    def interpreter(
        self,
        kind: Literal["bash", "python"],
        limits: Limits | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Interpreter]:
        """A shell or a Python of the session, in the folder of kept files; all its processes end
        with the context. Until then the session takes no other calls.

        Args:
            limits: memory and processes are of all its processes together; CPU time is of each,
                over its life.

        Raises:
            SettingsError: another one is open, or limits are above the session's.
        """
        ...


class Sandbox(Protocol):
    """Runs programs that a policy wrote."""

    @property
    def enforcement(self) -> str:
        """One sentence: what limits memory and processes here."""
        ...

    async def run(
        self,
        files: Files,
        command: Sequence[str],
        limits: Limits | None = None,
        **options: Unpack[Options],
    ) -> RunResult:
        """Run one program in a fresh session of its own.

        Raises:
            EnvironmentFailure: the session could not be started.
        """
        ...

    def session(
        self, limits: Limits | None = None, *, base: Path | None = None
    ) -> AbstractAsyncContextManager[Session]:
        """Open a session for an episode; it ends with the context.

        Args:
            limits: the highest that its calls may have; the sandbox's own when left out.
            base: a folder of this machine that calls begin with in place of an empty one. It is
                never changed. Where OverlayFS can be mounted and the folder's files belong to the
                session's user, only changes count as the session's disk; otherwise it is copied.

        Raises:
            EnvironmentFailure: on entering, when it could not be started.
        """
        ...

    async def close(self) -> None:
        """Remove the files that the sandbox keeps on this machine."""
        ...
