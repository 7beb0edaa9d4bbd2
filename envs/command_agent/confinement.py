"""Runs an agent program in bubblewrap.

The program sees an empty machine with the system's programs, the interpreters on PATH, the files
that its command names and imports, and what the settings name. It writes only into its episode's
folders. When the runner is root, it runs as a user of its own. Code that a policy writes belongs
into `envs.sandbox`, which isolates more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from outloop.buffer import untrusted_tree
from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.settings import Settings
from outloop.buffer.settings.env import EnvSettings, TaskSourceSettings
from outloop.buffer.user_code import import_folders
from outloop.envs.command_agent.command import CommandLine, Walls, search_path
from outloop.envs.command_agent.own_files import own_files
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.cgroups import Cgroup, find_cgroups
from outloop.envs.sandbox.guest import seccomp
from outloop.envs.sandbox.host_users import new_user

_PROBE_S = 20.0
_MAX_PROCESSES = 1024
_MAX_SEARCHED = 50_000
"""How many files of named folders are looked through for the keys of runs."""
_STATUS_FD = 3
"""Bubblewrap reports the program's end on this descriptor, which shows that it was started."""
_ROOT_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    # Libraries and programs.
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "terminfo", "inputrc"),
    # Names, time and language.
    *("resolv.conf", "hosts", "host.conf", "nsswitch.conf", "gai.conf", "services", "protocols"),
    *("localtime", "timezone", "locale.alias", "locale.conf", "mime.types", "os-release"),
    # Certificates, without keys.
    *("ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf"),
    *("pki/tls/certs", "pki/ca-trust", "crypto-policies"),
)
_KERNEL_FILES = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
_OF_AN_INTERPRETER = ("bin", "lib", "lib64", "lib32", "libexec", "include", "ssl", "pyvenv.cfg")
_FIND_PROGRAM = """
found=$(command -v "$1") || exit 1
asked=$(head -c 200 "$found" | tr -d '\\0' | sed -n '1s/^#! *\\([^ ]*\\).*/\\1/p')
test -z "$asked" || test -x "$asked"
"""


class Confinement:
    """Starts programs that see what they are made of, and nothing that is private to the run.

    Args:
        env: of the run.
        line: the command, of which the program and its files are shown.
        hidden: files and folders that the program may not see, inside of what it sees too.

    Raises:
        SettingsError: bubblewrap does not work here, or the program cannot be run in it.
    """

    def __init__(self, env: EnvSettings, line: CommandLine, hidden: Iterable[Path]) -> None:
        folders = import_folders(env.import_dir)
        named = [_found(path, folders) for path in env.agent_read_only]
        self._named = tuple(named)
        own = own_files(line.words_given, folders, line.folder)
        words = {Path(word) for word in line.words_given}
        self._hidden = tuple(path for path in hidden if path not in words)
        _refuse_hidden_imports(own, self._hidden)
        self._hidden += (*_private_files(folders), *_folders_with_keys(named))
        self._project = folders
        # An interpreter may stand behind another program: `env`, `timeout`, `sh -c`.
        programs = (line.words_given[0], *map(str, filter(_is_program, own)))
        self._shown = (*own, *_programs(programs))
        self._limits = Limits(
            memory_bytes=int(env.agent_memory_mb * 2**20),
            disk_bytes=1,
            max_processes=_MAX_PROCESSES,
        )
        self._is_root = os.getuid() == 0
        if self._is_root:
            _refuse_unreadable((*own, *named))
        self._bwrap = _program("bwrap", "bubblewrap")
        self._setpriv = _program("setpriv", "util-linux") if self._is_root else ""
        filter_ = seccomp.build()
        self._filter = seccomp.encode(filter_) if filter_ is not None else b""
        self._cgroups, _ = find_cgroups()
        self._probe(line.words_given[0])

    def walls(self, root: Path, folder: Path) -> Walls:
        """Make what one program needs below `root`: bubblewrap's arguments, and folders.

        Args:
            folder: the program's own, below `root`; with `root/tmp` and `root/shm` all that it can
                write into.

        Raises:
            EnvironmentFailure: the kernel refuses a control group.
        """
        user = new_user()
        for name in ("tmp", "shm"):
            (root / name).mkdir(exist_ok=True)
        shown = os.getuid() if user is None else user
        (root / "passwd").write_text(f"agent:x:{shown}:{shown}:agent:{folder}:/bin/sh\n")
        (root / "group").write_text(f"agent:x:{shown}:\n")
        for path in (root / "passwd", root / "group"):
            path.chmod(0o644)
        if user is not None:
            for path in (root / "tmp", root / "shm", folder, *folder.iterdir()):
                os.chown(path, user, user, follow_symlinks=False)
            folder.chmod(0o755)  # Bubblewrap enters it without the rights of root, or of its user.
        files = {"--args": root / "arguments"}
        arguments = self._arguments(root, folder)
        files["--args"].write_bytes(b"".join(os.fsencode(word) + b"\0" for word in arguments))
        if self._filter:
            files["--seccomp"] = root / "filter"
            files["--seccomp"].write_bytes(self._filter)
        return Walls(
            program=(self._bwrap, "--", *self._as_user(user)),
            files={option: str(path) for option, path in files.items()},
            cgroup=self._cgroup(),
        )

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables for the program's home and its temporary files."""
        return {"HOME": str(folder), "TMPDIR": "/tmp"}

    def check_named(self) -> None:
        """Refuse names in env.agent_read_only of which there is nothing, or which stays hidden.

        Raises:
            SettingsError: which.
        """
        hidden = {path.resolve() for path in self._hidden}
        for path in self._named:
            if path in hidden:
                raise SettingsError(
                    f"env.agent_read_only: {str(path)!r} stays hidden from agents: it is the "
                    "project's history or its .env, holds tasks, the verifier or the keys of a run "
                    "(secrets.json), or is a run's folder; copy what the agent needs to another "
                    "place, and name that"
                )
            if not path.exists():
                raise SettingsError(
                    f"env.agent_read_only: there is no {str(path)!r}; files and folders that are "
                    "there are allowed, by their full paths or from the working directory"
                )

    def _cgroup(self) -> Cgroup | None:
        if self._cgroups is None:
            return None
        try:
            return self._cgroups.create(self._limits)
        except OSError as error:
            raise EnvironmentFailure(f"the program's cgroup could not be made: {error}") from error

    def _as_user(self, user: int | None) -> tuple[str, ...]:
        """The command that gives up root's rights, once the folders are mounted with them."""
        if user is None:
            return ()
        ids = (f"--reuid={user}", f"--regid={user}", "--clear-groups")
        return (self._setpriv, *ids, "--inh-caps=-all", "--ambient-caps=-all", "--")

    def _arguments(self, root: Path, folder: Path) -> list[str]:
        # Root mounts folders that its user may enter and others may not.
        rights = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if self._is_root else ()
        users = () if self._is_root else ("--unshare-user",)
        covered, mounts = self._mounts(root, folder)
        return [
            *(*users, "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
            *("--cap-drop", "ALL", *rights, "--new-session"),
            *("--die-with-parent", "--json-status-fd", str(_STATUS_FD)),
            *("--dev", "/dev", "--proc", "/proc"),
            *_binds("--ro-bind-try", [Path(name) for name in _KERNEL_FILES]),
            *mounts,
            *(word for path in covered for word in ("--remount-ro", str(path))),
            *("--remount-ro", "/dev", "--remount-ro", "/"),
            *("--chdir", str(folder)),
        ]

    def _mounts(self, root: Path, folder: Path) -> tuple[list[Path], list[str]]:
        """The empty folders that cover what is hidden, and all mounts: the outer ones first.

        Of two that overlap, the more specific path holds; of two with one path, what is hidden.
        """
        kinds = dict.fromkeys((*self._project, Path.home()), "cover")
        kinds |= dict.fromkeys([Path("/usr"), *map(Path("/etc").joinpath, _ETC)], "show")
        kinds |= dict.fromkeys((*self._shown, *self._named, *_certificates()), "show")
        hidden = [*self._hidden, *(path.parent / "__pycache__" for path in self._hidden)]
        kinds |= dict.fromkeys(hidden, "cover")
        kinds[folder] = "write"
        own = {
            Path("/tmp"): root / "tmp",
            Path("/dev/shm"): root / "shm",
            Path("/etc/passwd"): root / "passwd",
            Path("/etc/group"): root / "group",
        }
        kinds |= dict.fromkeys(own, "own")
        covered, words = [], _root_links()
        made: dict[Path, None] = {}
        for path in sorted(kinds, key=lambda path: len(path.parts)):
            kind = kinds[path]
            around = next((kinds[one] for one in path.parents if kinds.get(one)), "")
            source = own.get(path, path)
            if not source.exists():
                kinds[path] = ""
                continue
            if kind == ("show" if around == "show" else "cover"):
                continue  # It is seen, or not, with what is around it.
            if around != "show":
                # Bubblewrap makes those for its own user only.
                parents = [one for one in reversed(path.parents[:-1]) if one not in made]
                words += [
                    word for one in parents for word in ("--perms", "0755", "--dir", str(one))
                ]
                made |= dict.fromkeys(parents)
            if kind == "cover" and path.is_dir():
                covered.append(path)
                words += ["--tmpfs", str(path)]
            elif kind == "cover":
                words += ["--ro-bind", "/dev/null", str(path)]
            else:
                is_written = kind == "write" or (kind == "own" and source.is_dir())
                words += ["--bind" if is_written else "--ro-bind", str(source), str(path)]
        return covered, words

    def _probe(self, program: str) -> None:
        with tempfile.TemporaryDirectory(prefix="outloop-probe-") as name:
            folder = Path(name) / "episode"
            folder.mkdir()
            walls = self.walls(Path(name), folder)
            if walls.cgroup is not None:
                walls.cgroup.remove()
            arguments = self._arguments(Path(name), folder)
            status = arguments.index("--json-status-fd")
            del arguments[status : status + 2]
            command = [self._bwrap, *arguments, *walls.program[1:]]
            self._try([*command, "true"])
            if "{" not in program and self._try(
                [*command, "sh", "-c", _FIND_PROGRAM, "sh", program], is_checked=False
            ):
                raise SettingsError(
                    f"the program {program!r} cannot be started in its sandbox, which holds the "
                    "system's programs, those on PATH in folders named bin, and what the command "
                    "names; name the folders that it and its interpreter need in "
                    "env.agent_read_only (docs/your-own-agent.md)"
                )

    def _try(self, command: Sequence[str], *, is_checked: bool = True) -> int:
        try:
            answer = subprocess.run(
                command,
                env={"PATH": search_path()},
                capture_output=True,
                timeout=_PROBE_S,
                check=False,
                text=True,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SettingsError(_unusable(str(error))) from error
        if is_checked and answer.returncode:
            raise SettingsError(_unusable(" ".join(answer.stderr.split())[-300:]))
        return answer.returncode


def open_confinement(
    env: EnvSettings, line: CommandLine, hidden: Iterable[Path]
) -> Confinement | None:
    """The confinement of `env.agent_sandbox`; None: the program runs with the runner's rights.

    Raises:
        SettingsError: bubblewrap is asked for and does not work here.
    """
    if env.agent_sandbox == "none":
        return None
    try:
        return Confinement(env, line, hidden)
    except SettingsError as error:
        raise SettingsError(f"env.agent_sandbox={env.agent_sandbox!r}: {error}") from error


def hidden_paths(settings: Settings) -> list[Path]:
    """What agent programs must not see: the run's folders and keys, tasks and verifier."""
    env = settings.env
    folders = import_folders(env.import_dir)
    paths = [settings.run.dir, settings.run.keys_file, settings.buffer.redis_password_file]
    sources = [env.eval_tasks or "", env.conversations or "", *(env.verifier or "").split()]
    sources += [suite.tasks or "" for suite in settings.eval.suites.values()]
    if isinstance(env.tasks, str):
        sources.append(env.tasks)
    for source in env.tasks.values() if isinstance(env.tasks, dict) else ():
        assert isinstance(source, TaskSourceSettings)
        sources.append(source.source)
    for source_name in filter(None, sources):
        module = source_name.partition(":")[0].replace(".", "/")
        paths += [folder / source_name for folder in folders]
        if ":" in source_name:
            paths += [
                Path(folder) / f"{module}{end}"
                for folder in (*map(str, folders), *filter(None, sys.path))
                for end in (".py", "/__init__.py")
            ]
    return list(dict.fromkeys(path.resolve() for path in paths if path is not None))


def _unusable(reason: str) -> str:
    return (
        f"bubblewrap cannot be used here: {reason}; it needs user namespaces, or a runner that is "
        'root and may mount. Or set env.agent_sandbox = "none": the agent then runs with the '
        "runner's rights, and can read the run's keys and the tasks' answers"
    )


def _program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise SettingsError(
            f"there is no {name} on PATH; install the package {package} (apt-get install {package},"
            f' dnf install {package}), or set env.agent_sandbox = "none": the agent then runs '
            "with the runner's rights, and can read the run's keys and the tasks' answers"
        )
    return found


def _found(path: Path, folders: Sequence[Path]) -> Path:
    """A path of the settings: from the working directory, or from the settings file's folder."""
    return next((one for one in (folder / path for folder in folders) if one.exists()),
                folders[0] / path).resolve()  # fmt: skip


def _refuse_hidden_imports(own: Iterable[Path], hidden: Iterable[Path]) -> None:
    both = {path.resolve() for path in own} & set(hidden)
    if both:
        raise SettingsError(
            f"the agent's program imports {', '.join(sorted(map(str, both)))}, which holds the "
            "run's verifier or tasks and is hidden from agents; move what both need into a module "
            "of its own"
        )


def _refuse_unreadable(paths: Iterable[Path]) -> None:
    for path in paths:
        wanted = 0o005 if path.is_dir() else 0o004
        if path.exists() and path.stat().st_mode & wanted != wanted:
            raise SettingsError(
                f"{str(path)!r} can be read by its owner only (mode="
                f"{path.stat().st_mode & 0o777:03o}), and the agent runs as a user of its own, "
                f"since the runner is root; chmod -R a+rX {str(path)!r}"
            )


def _private_files(folders: Iterable[Path]) -> Iterator[Path]:
    """What a project keeps beside its code: its history, which holds every file, and secrets."""
    for folder in folders:
        for one in (folder, *folder.parents):
            yield one / ".git"
            yield from (path for path in one.glob(".env*") if path.is_file())
            if (one / ".git").exists():
                break


def _folders_with_keys(named: Iterable[Path]) -> Iterator[Path]:
    """Folders of runs inside of those that the settings name."""
    for root in named:
        if not root.is_dir():
            continue
        for count, entry in enumerate(untrusted_tree.walk(root)):
            if entry.name == "secrets.json":
                yield root.joinpath(*entry.parents)
            if count > _MAX_SEARCHED:
                break


def _is_program(path: Path) -> bool:
    return path.parent.name == "bin" and path.is_file() and os.access(path, os.X_OK)


def _programs(named: Iterable[str]) -> Iterator[Path]:
    """What the interpreters on PATH, this one and the command's programs are made of."""
    for path in map(Path, search_path().split(os.pathsep)):
        if path.is_absolute() and path.name in ("bin", "sbin"):
            yield path
            if _has_interpreter(path):
                yield from (path.parent / part for part in _OF_AN_INTERPRETER)
    for start in (sys.executable, *(shutil.which(one, path=search_path()) for one in named)):
        for path in _links(Path(os.path.abspath(start))) if start else ():
            yield path
            if path.parent.name == "bin":
                yield path.parent
                if _has_interpreter(path.parent):
                    yield from (path.parent.parent / part for part in _OF_AN_INTERPRETER)
    for prefix in (sys.prefix, sys.base_prefix):
        yield from (Path(prefix) / part for part in _OF_AN_INTERPRETER)


def _has_interpreter(folder: Path) -> bool:
    return (folder / "node").exists() or next(folder.glob("python*"), None) is not None


def _links(path: Path) -> Iterator[Path]:
    """The path, and what it is a link to, link by link."""
    seen: set[Path] = set()
    while path not in seen:
        seen.add(path)
        yield path
        if path.is_symlink():
            path = Path(os.path.abspath(path.parent / path.readlink()))


def _certificates() -> list[Path]:
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
    return [Path(os.environ[name]).absolute() for name in names if os.environ.get(name)]


def _root_links() -> list[str]:
    words = []
    for name in _ROOT_LINKS:
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    return words


def _binds(option: str, paths: Iterable[Path]) -> list[str]:
    return [word for path in paths for word in (option, str(path), str(path))]
