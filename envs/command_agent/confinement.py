"""Runs an agent program in bubblewrap.

The program cannot read the run folders, the files of tasks and keys, the folders of other episodes
and other processes; it writes only into its episode's folders. Code that a policy writes belongs
into `envs.sandbox`, which isolates more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.buffer.settings.env import EnvSettings, TaskSourceSettings
from outloop.buffer.user_code import import_folders

_log = structlog.get_logger()
_PROBE_S = 20.0
_STATUS_FD = 3
"""Bubblewrap reports the program's end on this descriptor, which shows that it was started."""
_NAMES_OF_SERVERS = Path("/run/systemd/resolve")
"""What /etc/resolv.conf is a link to on many systems."""


class Confinement:
    """Starts programs that see the machine read-only, and nothing that is private to the run.

    Args:
        project: folders of the user's code, which the program may read.
        hidden: files and folders that it may not.
        read_only: further folders that it may read, below home folders too.
    """

    def __init__(
        self, project: Sequence[Path], hidden: Iterable[Path], read_only: Iterable[Path] = ()
    ) -> None:
        self._project = tuple(project)
        self._hidden = tuple(hidden)
        self._read_only = tuple(read_only)
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SettingsError("there is no bwrap on PATH; install the package bubblewrap")
        self._bwrap = bwrap
        self._probe()

    def argv(self, words: Sequence[str], folder: Path, temporary: Path) -> list[str]:
        """The command that runs `words` in `folder`, with `temporary` as its /tmp."""
        covered = _covered_folders()
        shown = [
            path
            for path in dict.fromkeys((*self._project, *_interpreters(), *self._read_only))
            if path.exists() and any(path.is_relative_to(cover) for cover in covered)
        ]
        return [
            self._bwrap,
            *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"),
            *("--die-with-parent", "--json-status-fd", str(_STATUS_FD)),
            *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
            *(word for cover in covered for word in ("--tmpfs", str(cover))),
            *("--bind", str(temporary), "/tmp"),
            *_bind("--ro-bind-try", [_NAMES_OF_SERVERS]),
            *_bind("--ro-bind", shown),
            *(word for path in self._hidden for word in _cover(path)),
            *_bind("--bind", [folder]),
            *("--chdir", str(folder), "--", *words),
        ]

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables for the program's home and its temporary files."""
        return {"HOME": str(folder), "TMPDIR": "/tmp"}

    def _probe(self) -> None:
        with tempfile.TemporaryDirectory(prefix="outloop-probe-") as name:
            folder, temporary = Path(name) / "episode", Path(name) / "tmp"
            folder.mkdir()
            temporary.mkdir()
            argv = self.argv(["true"], folder, temporary)
            status = argv.index("--json-status-fd")
            del argv[status : status + 2]
            try:
                answer = subprocess.run(
                    argv, capture_output=True, timeout=_PROBE_S, check=False, text=True
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SettingsError(f"bubblewrap cannot be used here: {error}") from error
        if answer.returncode:
            words = " ".join(answer.stderr.split())[-300:]
            raise SettingsError(f"bubblewrap cannot be used here: {words}")


def open_confinement(env: EnvSettings, hidden: Iterable[Path]) -> Confinement | None:
    """The confinement of `env.agent_sandbox`; None: the program runs with the runner's rights.

    Raises:
        SettingsError: `env.agent_sandbox` is "bubblewrap", which does not work here.
    """
    if env.agent_sandbox == "none":
        return None
    try:
        return Confinement(
            import_folders(env.import_dir), hidden, (path.resolve() for path in env.agent_read_only)
        )
    except SettingsError as error:
        if env.agent_sandbox == "bubblewrap":
            raise SettingsError(f"env.agent_sandbox='bubblewrap': {error}") from error
        _log.warning(
            "agent_not_confined",
            reason=str(error),
            note="the agent program runs with the runner's rights: it can read the run's keys and "
            "the tasks' answers; docs/your-own-agent.md",
        )
        return None


def hidden_paths(settings: Settings) -> list[Path]:
    """What agent programs must not see: the run's folders and keys, tasks and verifier."""
    env = settings.env
    folders = import_folders(env.import_dir)
    paths = [settings.run.dir, settings.run.keys_file, settings.buffer.redis_password_file]
    sources = [env.eval_tasks or "", env.conversations or "", *(env.verifier or "").split()]
    if isinstance(env.tasks, str):
        sources.append(env.tasks)
    for source in env.tasks.values() if isinstance(env.tasks, dict) else ():
        assert isinstance(source, TaskSourceSettings)
        sources.append(source.source)
    for source_name in filter(None, sources):
        module = source_name.partition(":")[0].replace(".", "/")
        paths += [folder / name for folder in folders for name in (source_name, f"{module}.py")]
    return list(dict.fromkeys(path.resolve() for path in paths if path is not None))


def _covered_folders() -> list[Path]:
    """Folders of users, sockets and temporary files; the program sees them empty."""
    names = ("/home", "/root", "/run", "/tmp", "/var/tmp", tempfile.gettempdir(), str(Path.home()))
    found = dict.fromkeys(Path(name).resolve() for name in names if name != "/")
    return [path for path in found if path.is_dir() and path != Path("/")]


def _interpreters() -> list[Path]:
    """Folders of this Python and of PATH; for `X/bin`, the whole folder X."""
    paths = [Path(sys.prefix), Path(sys.base_prefix)]
    for name in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = Path(name)
        prefix = path.parent
        is_own = path.name == "bin" and prefix != Path.home() and prefix.name != ".local"
        paths.append(prefix if is_own else path)
    return [path for path in paths if path.is_absolute()]


def _bind(option: str, paths: Iterable[Path]) -> list[str]:
    return [word for path in paths for word in (option, str(path), str(path))]


def _cover(path: Path) -> list[str]:
    if path.is_dir():
        return ["--tmpfs", str(path), "--remount-ro", str(path)]
    return ["--ro-bind", "/dev/null", str(path)] if path.exists() else []
