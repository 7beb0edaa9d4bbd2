"""Programs that outloop starts for one episode: the agent, and a verifier that is a command.

Owns: command lines with placeholders, the environment a program gets, running it under its keeper.
Does not own: limits inside the process tree (keeper), what a program's end means (agent_command).
Invariant: a program sees the keys of its own episode and none of outloop's settings; when `run`
returns or is cancelled, nothing of it is alive.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.envs.runner.imports import import_folders

_KEEPER = Path(__file__).with_name("process_reaper.py")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_KEEPER_S = 10.0
_NOT_INHERITED = re.compile(
    r"OUTLOOP_.*|(OPENAI|ANTHROPIC)_(API_KEY|BASE_URL|AUTH_TOKEN|ORG_ID|PROJECT_ID|ADMIN_KEY)"
)
"""Variables that would show a program outloop's settings, or lead it to another endpoint."""


class Ran(msgspec.Struct, frozen=True):
    """How a program ended."""

    exit_code: int | None
    """Negative for a signal; None if a limit ended it."""
    reason: str
    """Which limit ended it: time, memory or output; empty for none."""
    stdout: str
    """The end of it."""
    stderr: str
    memory_mb: float
    is_clean: bool


class Limits(msgspec.Struct, frozen=True):
    """What a program may use."""

    time_s: float
    memory_mb: float
    output_bytes: int
    kept_bytes: int


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
        if "{" not in program and shutil.which(program, path=_path()) is None:
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
        """Names in braces."""
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

    def words(self, values: Mapping[str, object]) -> list[str]:
        """The command with its placeholders filled in; a value is never split or quoted.

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
        """`python agnet.py` is told before anything starts, if the word can only be a file."""
        if word.startswith("-") or "{" in word or not re.search(r"\.(py|js|mjs|ts|sh|rb)$", word):
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
        """True if its files are found only in the settings file's folder."""
        files = [word for word in self._words if "/" in word or "." in word]
        return any(
            (folders[-1] / word).is_file() and not (folders[0] / word).is_file() for word in files
        )


def environment(episode: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program: this process's without other keys, plus the episode's."""
    kept = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    return {**kept, "PATH": _path(), **episode}


async def run(words: Sequence[str], limits: Limits, *, env: Mapping[str, str], folder: Path) -> Ran:
    """Run a program to its end or a limit.

    Raises:
        EnvironmentFailure: its keeper could not be started, or died.
    """
    ours, theirs = socket.socketpair()
    options = {**msgspec.structs.asdict(limits), "control": theirs.fileno()}
    try:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        keeper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_KEEPER), json.dumps(options), *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=env,
            cwd=folder,
        )
    except (OSError, ValueError) as error:
        raise EnvironmentFailure(f"the program could not be started: {error}") from error
    finally:
        theirs.close()
    try:
        data = await asyncio.wait_for(reader.read(), limits.time_s + _KEEPER_S)
    except TimeoutError:
        data = b""
    finally:
        # Its keeper ends the program when this side is closed.
        writer.close()
        await _wait(keeper)
    try:
        return msgspec.json.decode(data, type=Ran)
    except msgspec.DecodeError as error:
        raise EnvironmentFailure(
            f"the program's keeper ended with exit_code={keeper.returncode} and said nothing"
        ) from error


async def _wait(keeper: asyncio.subprocess.Process) -> None:
    waiting = asyncio.ensure_future(keeper.wait())
    try:
        await asyncio.wait_for(asyncio.shield(waiting), _KEEPER_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        await waiting


def _path() -> str:
    """PATH with this interpreter's folder first, so that `python` is the one that runs outloop."""
    path = os.environ.get("PATH", os.defpath)
    own = str(Path(sys.executable).parent)
    return path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}"
