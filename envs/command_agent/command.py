"""Runs the programs of one episode: the agent, and a verifier that is a command.

A program gets the key of its own episode and none of outloop's settings. When `run` returns or is
cancelled, none of its processes is alive. Limits inside the process tree are in `process_reaper`,
what the program can reach is in `confinement`.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from outloop.buffer import untrusted_tree
from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.user_code import import_folders
from outloop.envs.sandbox.cgroups import Cgroup

_REAPER = Path(__file__).with_name("process_reaper.py")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_REAPER_S = 10.0
_NOT_INHERITED = re.compile(
    r"OUTLOOP_.*|(OPENAI|ANTHROPIC)_(API_KEY|BASE_URL|AUTH_TOKEN|ORG_ID|PROJECT_ID|ADMIN_KEY)"
)
"""Variables that hold outloop's settings, or lead a program to another endpoint."""
_INHERITED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "SSL_CERT_FILE", "TMPDIR", "TZ")
"""Variables that an agent program inherits, besides PATH and those of env.agent_environment."""


class CompletedProgram(msgspec.Struct, frozen=True):
    """How a program ended."""

    exit_code: int | None
    """Negative for a signal; None if a limit ended it."""
    reason: str
    """The limit that ended it: time, memory, processes, terminals, disk or output. Empty: none."""
    stdout: str
    """The end of the program's standard output."""
    stderr: str
    memory_mb: float
    is_started: bool
    """False: bubblewrap failed before it started the program."""


class Limits(msgspec.Struct, frozen=True):
    """What a program may use."""

    time_s: float
    memory_mb: float
    output_bytes: int
    kept_bytes: int
    disk_mb: float = 0
    """Of all files below `folder` together; 0: no limit."""
    folder: str = ""


class Walls(msgspec.Struct, frozen=True):
    """What a program is started in."""

    program: tuple[str, ...]
    """The command to put before it; the first word is bubblewrap."""
    files: dict[str, str]
    """Options of bubblewrap, and the files whose descriptors they take."""
    cgroup: Cgroup | None
    """Where its memory and its processes are counted."""


class CommandLine:
    """A command line in which `{name}` stands for a value.

    Raises:
        SettingsError: it is empty, cannot be split, or its program is not there.
    """

    def __init__(self, text: str, *, setting: str, import_dir: Path | None) -> None:
        self._named = f"{setting}={text!r}"
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise SettingsError(f"{self._named}: {error}; quote it as in a shell") from error
        if not self._words:
            raise SettingsError(f"{self._named} is empty; give a program and its arguments")
        folders = import_folders(import_dir)
        program = self._words[0]
        places = [folder / program for folder in folders] if "/" in program else [program]
        if "{" not in program and not any(shutil.which(one, path=search_path()) for one in places):
            where = ", ".join(map(str, folders))
            raise SettingsError(
                f"{self._named}: there is no program {program!r} in PATH or {where}; give its "
                "path, make it executable, or put its interpreter before it"
            )
        for word in self._words[1:]:
            self._refuse_missing_script(word, folders)
        self.folder = folders[-1] if self._is_relative_to(folders) else folders[0]

    @property
    def placeholders(self) -> set[str]:
        """The names in braces."""
        return {name for word in self._words for name in _PLACEHOLDER.findall(word)}

    def check(self, known: Sequence[str]) -> None:
        """Refuse placeholders that are not among `known`.

        Raises:
            SettingsError: names the nearest.
        """
        for name in sorted(self.placeholders - set(known)):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise SettingsError(
                f"{self._named}: nothing is known as {{{name}}}; {hint}"
                f"allowed here: {', '.join(sorted(known))}"
            )

    @property
    def words_given(self) -> tuple[str, ...]:
        """The words, placeholders not filled in."""
        return tuple(self._words)

    @property
    def is_module(self) -> bool:
        """True for `python -m NAME`, which needs the module's folder in PYTHONPATH."""
        return "-m" in self._words

    def at_home(self) -> CommandLine:
        """The same command for another working directory: its own files have their full paths."""
        line = copy.copy(self)
        line._words = [self._full(word) for word in self._words]
        return line

    def _full(self, word: str) -> str:
        is_name = "/" in word or "." in word
        found = self.folder / word
        return str(found) if is_name and "{" not in word and found.exists() else word

    def words(self, values: Mapping[str, object]) -> list[str]:
        """Fill in the placeholders; a value is never split or quoted.

        Raises:
            EnvironmentFailure: this task has no such field.
        """

        def value(match: re.Match[str]) -> str:
            try:
                found = values[match[1]]
            except KeyError:
                raise EnvironmentFailure(
                    f"{self._named}: the task has no {match[1]!r} for {match[0]}"
                ) from None
            return found if isinstance(found, str) else json.dumps(found)

        return [_PLACEHOLDER.sub(value, word) for word in self._words]

    def _refuse_missing_script(self, word: str, folders: Sequence[Path]) -> None:
        """Refuse a script that does not exist, if the word can only be a file: `agnet.py`."""
        # With a space: the text of `sh -c`.
        if (
            word.startswith("-")
            or re.search(r"[{ ]", word)
            or not re.search(r"\.(py|js|mjs|ts|sh|rb)$", word)
        ):
            return
        if any((folder / word).is_file() for folder in folders):
            return
        name = Path(word).name
        near = difflib.get_close_matches(
            name, [path.name for folder in folders for path in folder.iterdir()], n=1
        )
        hint = f"did you mean {near[0]!r}? " if near else ""
        where = " or ".join(map(str, folders))
        raise SettingsError(f"{self._named}: there is no file {word!r} in {where}; {hint}")

    def _is_relative_to(self, folders: Sequence[Path]) -> bool:
        """True if its files exist only in the settings file's folder."""
        files = [word for word in self._words if "/" in word or "." in word]
        return any(
            (folders[-1] / word).is_file() and not (folders[0] / word).is_file() for word in files
        )


def agent_environment(names: Sequence[str], episode: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent program: little of the runner's, and the episode's."""
    kept = {name: os.environ[name] for name in (*_INHERITED, *names) if name in os.environ}
    return {**kept, "PATH": search_path(), **episode}


def check_agent_environment(names: Sequence[str]) -> None:
    """Refuse variables that the episode sets.

    Raises:
        SettingsError: which.
    """
    for name in names:
        if _NOT_INHERITED.fullmatch(name) or name == "PATH" or "=" in name:
            raise SettingsError(
                f"env.agent_environment={list(names)!r}: {name!r} cannot be passed on; an agent "
                "always gets PATH and the address and key of its episode; names of other "
                "variables are allowed"
            )


def verifier_environment() -> dict[str, str]:
    """The environment of a verifier: this process's, without outloop's settings and endpoints."""
    kept = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    return {**kept, "PATH": search_path()}


async def run(
    words: Sequence[str],
    limits: Limits,
    *,
    env: Mapping[str, str],
    folder: Path,
    walls: Walls | None = None,
) -> CompletedProgram:
    """Run a program to its end or a limit.

    Raises:
        EnvironmentFailure: it could not be started, or its reaper died.
    """
    options: dict[str, object] = {
        **msgspec.structs.asdict(limits),
        "tree_module": untrusted_tree.__file__,
    }
    if walls is not None:
        words = (*walls.program, *words)
        options["files"] = walls.files
        if walls.cgroup is not None:
            groups = {str(path / "cgroup.procs") for path in walls.cgroup.folders.values()}
            options["groups"] = sorted(groups)
    try:
        async with _reaper(words, options, env, folder) as (reader, reaper):
            try:
                data = await asyncio.wait_for(reader.read(), limits.time_s + _REAPER_S)
            except TimeoutError:
                data = b""
        num_killed = walls.cgroup.oom_kills() if walls and walls.cgroup else 0
    finally:
        if walls is not None and walls.cgroup is not None:
            await asyncio.to_thread(walls.cgroup.remove)
    try:
        ran = msgspec.json.decode(data, type=CompletedProgram)
    except msgspec.DecodeError as error:
        raise EnvironmentFailure(
            f"the program's reaper ended with exit_code={reaper.returncode} and without a report"
        ) from error
    if num_killed and not ran.reason and ran.exit_code:
        ran = msgspec.structs.replace(
            ran, reason="memory", exit_code=None, memory_mb=limits.memory_mb
        )
    if not ran.is_started and not ran.reason:
        last = " ".join(ran.stderr.split())[-300:]
        raise EnvironmentFailure(
            f"the program could not be started in its sandbox: {last}; name folders that it needs "
            'in env.agent_read_only, or set env.agent_sandbox="none"'
        )
    return ran


@asynccontextmanager
async def _reaper(
    words: Sequence[str], options: dict[str, object], env: Mapping[str, str], folder: Path
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.subprocess.Process]]:
    """The process that runs the program, and a reader of its report; both end with the context."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        # The reaper ends the program when this side is closed.
        try:
            options["control"] = theirs.fileno()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_REAPER), json.dumps(options), *words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=env,
                cwd=folder,
            )
        except (OSError, ValueError) as error:
            await _close(writer)
            raise EnvironmentFailure(f"the program could not be started: {error}") from error
        except BaseException:
            writer.close()
            raise
    try:
        yield reader, process
    finally:
        await _close(writer)
        await _wait(process)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _wait(process: asyncio.subprocess.Process) -> None:
    waiting = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait_for(asyncio.shield(waiting), _REAPER_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await waiting


def search_path() -> str:
    """PATH with this interpreter's folder first, so that `python` is the one that runs outloop."""
    path = os.environ.get("PATH", os.defpath)
    own = str(Path(sys.executable).parent)
    return path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}"
