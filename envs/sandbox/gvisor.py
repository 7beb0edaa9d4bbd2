"""Sandboxes by gVisor: a kernel of their own, in a process of this machine's; without an engine."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.owned_folder import OwnedFolder
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.cgroups import Cgroup, find_cgroups
from outloop.envs.sandbox.guest_bundle import GUEST_FOLDER, boot_argv, system_python
from outloop.envs.sandbox.supervised import SupervisedSandbox
from outloop.envs.sandbox.supervisor_process import ENVIRON, Launch, SupervisorProcess

_log = structlog.get_logger()
_BASE = "/base"
_KERNEL_BYTES = 256 * 2**20
"""For gVisor's own processes of a session."""
_KERNEL_PROCESSES = 256
_INIT = ("/bin/sh", "-c", '"$@"; exit $?', "init")
"""The first process of a session: it reaps what calls leave, as an engine's does."""
_NAMESPACES = ("pid", "mount", "ipc", "uts", "network")
_LIMITS = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NPROC")
"""Those that each call is given; runsc begins with lower ones."""
_NO_LIMIT = 2**64 - 1
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", "CAP_KILL", "CAP_DAC_OVERRIDE")


class GvisorSandbox(SupervisedSandbox):
    """Sessions by `runsc`: one sandbox of gVisor each, calls under user ids of their own.

    Args:
        limits: of sessions that are opened without any.
        python: the interpreter of the sessions; the system's when left out.
        python_path: folders with modules for it.
        read_only: further files and folders that programs may read.
        platform: how gVisor catches system calls, by its own name; None: its default.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        python: str | None = None,
        python_path: Sequence[Path] = (),
        read_only: Sequence[Path] = (),
        platform: str | None = None,
    ) -> None:
        runsc = shutil.which("runsc")
        if runsc is None:
            raise SettingsError(
                "sandbox='gvisor': there is no runsc on PATH; install gVisor (apt-get install "
                "runsc, or as gvisor.dev says), or set sandbox='bubblewrap'"
            )
        if os.getuid() != 0:
            raise SettingsError(
                f"sandbox='gvisor' uid={os.getuid()}: runsc needs root for a session of several "
                "users; run the runner as root, or set sandbox='bubblewrap'"
            )
        super().__init__(limits)
        self._runsc = runsc
        self._python = python or system_python()
        self._python_path = tuple(str(path) for path in python_path)
        self._read_only = tuple(str(path) for path in (*python_path, *read_only))
        self._options = () if platform is None else (f"--platform={platform}",)
        # Beside what is counted within: a flood of processes there is one of threads here.
        self._bounds = "watched"
        self._cgroups, reason = find_cgroups()
        self._folder = OwnedFolder("outloop-runsc")
        self._root = self._folder.path / "root"
        self._root.mkdir()
        outside = f"no cgroups: {reason}"
        if self._cgroups is not None:
            outside = f"cgroups (version {self._cgroups.version}) bound a session from outside"
        self.enforcement = (
            f"{self._release()}; its kernel bounds each process, and the supervisor ends a call "
            f"whose processes together hold too much memory; {outside}"
        )
        _log.info("sandbox", backend="gvisor", enforcement=self.enforcement)

    def _release(self) -> str:
        words = [self._runsc, "--version"]
        answer = subprocess.run(words, capture_output=True, timeout=30, check=False, text=True)
        if answer.returncode:
            raise SettingsError(
                f"sandbox='gvisor': `runsc --version` fails: {answer.stderr.strip()[-300:]}; "
                "repair it, or set sandbox='bubblewrap'"
            )
        return answer.stdout.splitlines()[0]

    async def _start(
        self, limits: Limits, base: Path | None
    ) -> tuple[SupervisorProcess, Cgroup | None]:
        if self._cgroups is None:
            return await super()._start(limits, base)
        around = dataclasses.replace(
            limits,
            memory_bytes=limits.memory_bytes + _KERNEL_BYTES,
            max_processes=4 * limits.max_processes + _KERNEL_PROCESSES,
        )
        try:
            cgroup = self._cgroups.create(around)
        except OSError as error:
            raise EnvironmentFailure(
                f"the session's cgroup could not be made: {error}; see docs/sandbox.md, cgroups"
            ) from error
        try:
            return await SupervisorProcess.start(self._launch(limits, base)), cgroup
        except BaseException:
            cgroup.remove()
            raise

    def _launch(self, limits: Limits, base: Path | None, events: int = -1) -> Launch:
        name = f"outloop-{uuid.uuid4().hex}"
        folder = self._folder.path / name
        folder.mkdir()
        boot = boot_argv(
            self._python,
            GUEST_FOLDER,
            "users",
            limits,
            extra=self._python_path,
            base=_BASE if base is not None else "",
        )
        (folder / "config.json").write_text(json.dumps(self._container(boot, limits, base)))
        state = self._folder.path / "state"
        runsc = (self._runsc, f"--root={state}", "--network=none", "--ignore-cgroups")
        remove = (
            f"{shlex.join((*runsc, 'delete', '--force', name))}; rm -rf {shlex.quote(str(folder))}"
        )
        return Launch(
            argv=(*runsc, *self._options, "run", "--bundle", str(folder), name),
            end_argv=("sh", "-c", remove),
            start_timeout_s=120.0,
        )

    def _container(
        self, command: Sequence[str], limits: Limits, base: Path | None
    ) -> dict[str, Any]:
        """The description of a container, as runtimes of the Open Container Initiative read it."""
        size = f"size={limits.disk_bytes}"
        mounts = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "dev"},
            self._disk("/dev/shm", "mode=1777", size),
            self._disk("/box", "mode=0711", size),
            *self._system(),
            self._bind(str(self.bundle.path), GUEST_FOLDER),
            *(self._bind(path) for path in self._read_only),
            *([] if base is None else [self._bind(str(base), _BASE)]),
        ]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [*_INIT, *command],
                "env": [f"{key}={value}" for key, value in ENVIRON.items()],
                "cwd": "/",
                "capabilities": {
                    kind: list(_CAPABILITIES) for kind in ("bounding", "effective", "permitted")
                },
                "rlimits": [
                    {"type": kind, "soft": _NO_LIMIT, "hard": _NO_LIMIT} for kind in _LIMITS
                ],
                "noNewPrivileges": True,
            },
            "root": {"path": str(self._root), "readonly": True},
            "hostname": "sandbox",
            "mounts": mounts,
            "linux": {"namespaces": [{"type": kind} for kind in _NAMESPACES]},
        }

    def _system(self) -> list[dict[str, Any]]:
        """What programs need of this machine's."""
        mounts = [self._bind("/usr")]
        for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
            link = self._root / name[1:]
            if os.path.islink(name):
                if not link.is_symlink():
                    link.symlink_to(os.readlink(name))
            elif os.path.isdir(name):
                mounts.append(self._bind(name))
        prefix = os.path.dirname(os.path.dirname(self._python))
        if not prefix.startswith("/usr"):
            mounts.append(self._bind(prefix))
        elif not prefix.startswith("/usr/local") and os.path.isdir("/usr/local"):
            mounts.append(self._disk("/usr/local", "ro"))
        mounts += [
            self._bind(name)
            for name in ("/etc/ld.so.cache", "/etc/alternatives")
            if os.path.exists(name)
        ]
        return mounts

    def _disk(self, path: str, *options: str) -> dict[str, Any]:
        return {
            "destination": path,
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "nodev", *options],
        }

    def _bind(self, source: str, path: str | None = None) -> dict[str, Any]:
        """Mount a file or folder of this machine's, read-only."""
        target = path or source
        point = self._root / target[1:]
        if os.path.isdir(source):
            point.mkdir(parents=True, exist_ok=True)
        else:
            point.parent.mkdir(parents=True, exist_ok=True)
            point.touch()
        return {
            "destination": target,
            "type": "bind",
            "source": source,
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }

    async def close(self) -> None:
        """See `Sandbox.close`."""
        await super().close()
        self._folder.close()
