"""Sandboxes by bubblewrap: Linux namespaces, started in milliseconds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import structlog

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.envs.sandbox import base_mount
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.cgroups import Cgroup, find_cgroups
from outloop.envs.sandbox.guest_bundle import GUEST_FOLDER, boot_argv, system_python
from outloop.envs.sandbox.host_users import base_owner, new_user
from outloop.envs.sandbox.supervised import SupervisedSandbox
from outloop.envs.sandbox.supervisor_process import Launch, SupervisorProcess

_log = structlog.get_logger()
_USER = 1000
_BASE = "/base"


class BubblewrapSandbox(SupervisedSandbox):
    """Namespaces around a session: no network; /usr and what is named, read-only.

    Args:
        limits: of sessions that are opened without any.
        python: the interpreter of the sessions; the system's when left out.
        python_path: folders with modules for it.
        read_only: further files and folders that programs may read.
        links: symbolic links in the root folder, path -> target; a call's folder is /work.
        cgroup_parent: a control group of version 2 that was delegated to this user.
        uses_cgroups: False: resource limits and the supervisor bound memory and processes, as they
            do where no control group can be made.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        python: str | None = None,
        python_path: Sequence[Path] = (),
        read_only: Sequence[Path] = (),
        links: Mapping[str, str] = MappingProxyType({}),
        cgroup_parent: Path | None = None,
        uses_cgroups: bool = True,
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
        self._python = python or system_python()
        self._python_path = tuple(str(path) for path in python_path)
        self._read_only = tuple(str(path) for path in (*python_path, *read_only))
        self._links = tuple((target, path) for path, target in links.items())
        self._cgroups, reason = None, "they are not wanted"
        if uses_cgroups:
            self._cgroups, reason = find_cgroups(cgroup_parent)
        if self._cgroups is not None:
            self.enforcement = (
                f"cgroups (version {self._cgroups.version}) bound memory and processes of a session"
                + ", and give each the same share of the processors" * self._cgroups.shares_cpu
            )
        else:
            self._bounds = "watched"
            self.enforcement = (
                "resource limits bound each process, and the supervisor ends a call whose "
                f"processes together hold too much memory; no cgroups: {reason}"
            )
        _log.info("sandbox", backend="bubblewrap", enforcement=self.enforcement)

    async def _start(
        self, limits: Limits, base: Path | None
    ) -> tuple[SupervisorProcess, Cgroup | None]:
        if self._cgroups is None:
            return await super()._start(limits, base)
        try:
            cgroup = self._cgroups.create(limits)
        except OSError as error:
            raise EnvironmentFailure(
                f"the session's cgroup could not be made: {error}; see docs/sandbox.md, cgroups"
            ) from error
        try:
            with cgroup.events() as events:
                return await SupervisorProcess.start(self._launch(limits, base, events)), cgroup
        except BaseException:
            cgroup.remove()
            raise

    def _launch(self, limits: Limits, base: Path | None, events: int = -1) -> Launch:
        boot = boot_argv(
            self._python,
            GUEST_FOLDER,
            "namespaces",
            limits,
            extra=self._python_path,
            events=events,
            base=_BASE if base is not None else "",
        )
        argv = [
            self._bwrap,
            *_system_folders(self._python),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--dir", "/box", "--dir", "/work", "--dir", "/tmp"),
            *("--ro-bind", str(self.bundle.path), GUEST_FOLDER),
            *("--symlink", f"..{GUEST_FOLDER}/passwd", "/etc/passwd"),
            *(_base_words(base) if base is not None else ()),
            *(word for path in self._read_only for word in ("--ro-bind", path, path)),
            *(word for link in self._links for word in ("--symlink", *link)),
            *("--remount-ro", "/dev", "--remount-ro", "/"),
            *("--unshare-all", "--unshare-user", "--uid", str(_USER), "--gid", str(_USER)),
            *("--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv"),
            *("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SYS_RESOURCE"),
            # OverlayFS makes a folder without any rights for itself, and enters it with those of
            # the mount; and a policy may leave folders without any.
            *("--cap-add", "CAP_DAC_OVERRIDE"),
            *("--setenv", "LANG", "C.UTF-8", "--chdir", "/", "--", *boot),
        ]
        # The kernel's limit on processes does not bind root, inside the namespace neither.
        user, owner = new_user(), base_owner()
        if user is not None and base is not None and base.stat().st_uid == owner:
            words = (str(base), str(owner), str(user))
            argv = [system_python(), "-I", "-S", base_mount.__file__, *words, *argv]
            user = None
        return Launch(argv=argv, user=user, pass_fds=() if events < 0 else (events,))


def _base_words(base: Path) -> tuple[str, ...]:
    return ("--ro-bind", str(base), _BASE)


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
