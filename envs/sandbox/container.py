"""Sandboxes by docker or podman: a container for each session."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from pathlib import Path

import structlog

from outloop.buffer.errors import SettingsError
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.guest_bundle import GUEST_FOLDER, boot_argv
from outloop.envs.sandbox.supervised import SupervisedSandbox
from outloop.envs.sandbox.supervisor_process import Launch

_log = structlog.get_logger()


class ContainerSandbox(SupervisedSandbox):
    """Sessions by docker or podman: one container each, calls under user ids of their own."""

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
            raise SettingsError(f"sandbox='container': `{engine} info` hangs; repair it") from error
        if answer.returncode:
            words = " ".join(answer.stderr.split())[-300:]
            raise SettingsError(
                f"sandbox='container': `{engine} info` fails: {words}; start the engine, "
                "or set sandbox='bubblewrap'"
            )

    def _launch(self, limits: Limits, base: Path | None, events: int = -1) -> Launch:
        name = f"outloop-{uuid.uuid4().hex}"
        return Launch(
            argv=container_argv(
                self._engine, name, self._image, self._python, self.bundle.path, limits, base
            ),
            end_argv=(self._engine, "rm", "--force", name),
            inherits_environ=True,
            start_timeout_s=120.0,
        )


def container_argv(
    engine: str,
    name: str,
    image: str,
    python: str,
    bundle: Path,
    limits: Limits,
    base: Path | None = None,
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
        *("--volume", f"{bundle}:{GUEST_FOLDER}:ro", "--user", "0:0", "--hostname", "sandbox"),
        *(("--volume", f"{base}:/base:ro") if base is not None else ()),
        image,
        *boot_argv(python, GUEST_FOLDER, "users", limits, base="/base" if base else ""),
    ]
