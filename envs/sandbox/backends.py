"""The sandboxes there are, by name, and how each starts a jail.

Owns: command lines of bubblewrap and container engines, refusing what this machine cannot do. Does
not own: calls (jail), limits inside (guest/). Invariant: what was asked for is what is used, or an
error says why not; nothing falls back to less.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Unpack

import structlog

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.envs.sandbox.api import Files, Jail, Limits, Options, RunResult, Sandbox
from outloop.envs.sandbox.cgroups import Cgroup, find_cgroups
from outloop.envs.sandbox.guest_bundle import JAIL_FOLDER, Bundle, boot_argv
from outloop.envs.sandbox.session import Bounds, SupervisedJail
from outloop.envs.sandbox.supervisor_process import Launch, SupervisorProcess

_log = structlog.get_logger()
_NOBODY = 65534
_USER = 1000


class _Supervised:
    """What the backends share: jails with a supervisor in them."""

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits or Limits()
        self._bundle = Bundle()
        self._bounds: Bounds = "cgroup"

    async def run(
        self,
        files: Files,
        command: Sequence[str],
        limits: Limits | None = None,
        **options: Unpack[Options],
    ) -> RunResult:
        """See `Sandbox.run`."""
        async with self.jail(limits) as jail:
            return await jail.run(files, command, **options)

    def jail(self, limits: Limits | None = None) -> AbstractAsyncContextManager[Jail]:
        """See `Sandbox.jail`."""
        return self._jail(limits or self._limits)

    @asynccontextmanager
    async def _jail(self, limits: Limits) -> AsyncIterator[Jail]:
        async def start() -> tuple[SupervisorProcess, Cgroup | None]:
            return await self._start(limits)

        jail = SupervisedJail(limits, start, self._bounds)
        await jail.open()
        try:
            yield jail
        finally:
            await jail.close()

    async def _start(self, limits: Limits) -> tuple[SupervisorProcess, Cgroup | None]:
        return await SupervisorProcess.start(self._launch(limits)), None

    def _launch(self, limits: Limits, events: int = -1) -> Launch:
        """How a jail is started; `events`: see `boot_argv`."""
        raise NotImplementedError

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._bundle.close()


class BubblewrapSandbox(_Supervised):
    """Jails by bubblewrap: namespaces, no network, only /usr and what is named, read-only."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        python: str | None = None,
        python_path: Sequence[Path] = (),
        read_only: Sequence[Path] = (),
        cgroup_parent: Path | None = None,
    ) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SettingsError(
                "sandbox='bubblewrap': there is no bwrap on PATH; install the package bubblewrap "
                "(apt-get install bubblewrap, dnf install bubblewrap), or set sandbox='container' "
                "with docker or podman, or sandbox='subprocess', which protects nothing"
            )
        super().__init__(limits)
        self._bwrap = bwrap
        self._python = python or _system_python()
        self._python_path = tuple(str(path) for path in python_path)
        self._read_only = tuple(str(path) for path in (*python_path, *read_only))
        self._cgroups, reason = find_cgroups(cgroup_parent)
        if self._cgroups is not None:
            self.enforcement = (
                f"cgroups (version {self._cgroups.version}) bound memory and processes of a jail"
            )
        else:
            self._bounds = "watched"
            self.enforcement = (
                "resource limits bound each process, and the supervisor ends a call whose "
                f"processes together hold too much memory; no cgroups: {reason}"
            )
        _log.info("sandbox", backend="bubblewrap", enforcement=self.enforcement)

    async def _start(self, limits: Limits) -> tuple[SupervisorProcess, Cgroup | None]:
        if self._cgroups is None:
            return await super()._start(limits)
        try:
            cgroup = self._cgroups.create(limits)
        except OSError as error:
            raise EnvironmentFailure(
                f"the jail's cgroup could not be made: {error}; see docs/sandbox.md, cgroups"
            ) from error
        try:
            with cgroup.events() as events:
                return await SupervisorProcess.start(self._launch(limits, events)), cgroup
        except BaseException:
            cgroup.remove()
            raise

    def _launch(self, limits: Limits, events: int = -1) -> Launch:
        boot = boot_argv(
            self._python,
            JAIL_FOLDER,
            "namespaces",
            limits,
            extra=self._python_path,
            events=events,
        )
        argv = [
            self._bwrap,
            *_system_folders(self._python),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--dir", "/box", "--dir", "/work", "--dir", "/tmp"),
            *("--ro-bind", str(self._bundle.path), JAIL_FOLDER),
            *("--symlink", f"..{JAIL_FOLDER}/passwd", "/etc/passwd"),
            *(word for path in self._read_only for word in ("--ro-bind", path, path)),
            *("--remount-ro", "/dev", "--remount-ro", "/"),
            *("--unshare-all", "--unshare-user", "--uid", str(_USER), "--gid", str(_USER)),
            *("--hostname", "jail", "--die-with-parent", "--new-session", "--clearenv"),
            *("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SYS_RESOURCE"),
            *("--setenv", "LANG", "C.UTF-8", "--chdir", "/", "--", *boot),
        ]
        # Root would be root for the kernel inside too: not bound by the limit on processes.
        user = _NOBODY if os.getuid() == 0 else None
        return Launch(argv=argv, user=user, pass_fds=() if events < 0 else (events,))


class ContainerSandbox(_Supervised):
    """Jails by docker or podman: one container each, calls under user ids of their own."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        image: str = "python:3.11-slim",
        engine: str | None = None,
        python: str = "python3",
    ) -> None:
        names = (engine,) if engine else ("docker", "podman")
        found = next((path for name in names if (path := shutil.which(name))), None)
        if found is None:
            raise SettingsError(
                f"sandbox='container': none of {', '.join(names)} is on PATH; install one, "
                "or set sandbox='bubblewrap'"
            )
        self._check_engine(found)
        super().__init__(limits)
        self._engine = found
        self._image = image
        self._python = python
        self.enforcement = (
            f"{Path(found).name} bounds memory and processes of a container by cgroups"
        )
        _log.info("sandbox", backend="container", enforcement=self.enforcement)

    def _check_engine(self, engine: str) -> None:
        try:
            answer = subprocess.run(
                [engine, "info"], capture_output=True, timeout=30, check=False, text=True
            )
        except subprocess.TimeoutExpired as error:
            raise SettingsError(f"sandbox='container': `{engine} info` hangs; mend it") from error
        if answer.returncode:
            words = " ".join(answer.stderr.split())[-300:]
            raise SettingsError(
                f"sandbox='container': `{engine} info` fails: {words}; start the engine, "
                "or set sandbox='bubblewrap'"
            )

    def _launch(self, limits: Limits, events: int = -1) -> Launch:
        name = f"outloop-{uuid.uuid4().hex}"
        return Launch(
            argv=container_argv(
                self._engine, name, self._image, self._python, self._bundle.path, limits
            ),
            end_argv=(self._engine, "rm", "--force", name),
            inherits_environ=True,
            start_timeout_s=120.0,
        )


class SubprocessSandbox(_Supervised):
    """No sandbox: programs run with the runner's rights; for code that you wrote yourself."""

    enforcement = "resource limits bound each process; nothing protects this machine"

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._bounds = "each"
        _log.warning("sandbox", backend="subprocess", enforcement=self.enforcement)

    def _launch(self, limits: Limits, events: int = -1) -> Launch:
        return Launch(argv=boot_argv(sys.executable, str(self._bundle.path), "plain", limits))


SANDBOXES: Mapping[str, Callable[..., Sandbox]] = {
    "bubblewrap": BubblewrapSandbox,
    "container": ContainerSandbox,
    "subprocess": SubprocessSandbox,
}


def open_sandbox(name: str = "bubblewrap", limits: Limits | None = None, **options: Any) -> Sandbox:
    """The sandbox of that name; `limits` are the defaults of its jails.

    Raises:
        SettingsError: no such name, or this machine cannot do it; nothing else is taken instead.
    """
    if name not in SANDBOXES:
        raise SettingsError(f"sandbox={name!r}; {', '.join(SANDBOXES)} are allowed")
    return SANDBOXES[name](limits, **options)


def container_argv(
    engine: str, name: str, image: str, python: str, bundle: Path, limits: Limits
) -> list[str]:
    """The command that starts a container with a supervisor in it."""
    memory = f"{limits.memory_bytes + limits.disk_bytes + 64 * 2**20}b"
    box = f"/box:rw,nosuid,nodev,exec,size={limits.disk_bytes}"
    if Path(engine).name != "podman":  # which refuses the option: files are bounded as memory there
        box += f",nr_inodes={limits.max_files + 8}"
    capabilities = ("SETUID", "SETGID", "CHOWN", "KILL", "DAC_OVERRIDE")
    return [
        *(engine, "run", "--rm", "--interactive", "--name", name),
        *("--network", "none", "--read-only", "--init"),
        *("--cap-drop", "ALL", *(w for one in capabilities for w in ("--cap-add", one))),
        *("--security-opt", "no-new-privileges"),
        *("--memory", memory, "--memory-swap", memory),
        *("--pids-limit", str(2 * limits.max_processes + 16)),
        *("--shm-size", f"{limits.disk_bytes}b", "--tmpfs", box),
        *("--volume", f"{bundle}:{JAIL_FOLDER}:ro", "--user", "0:0", "--hostname", "jail"),
        image,
        *boot_argv(python, JAIL_FOLDER, "users", limits),
    ]


def _system_python() -> str:
    """A Python that is there for every user; the runner's own may be in a private folder."""
    found = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    return os.path.realpath(found or sys.executable)


def _system_folders(python: str) -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    prefix = os.path.dirname(os.path.dirname(python))
    if not prefix.startswith("/usr"):
        words += ["--ro-bind", prefix, prefix]
    elif not prefix.startswith("/usr/local") and os.path.isdir("/usr/local"):
        words += ["--tmpfs", "/usr/local", "--remount-ro", "/usr/local"]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        words += ["--ro-bind-try", name, name]
    return words
