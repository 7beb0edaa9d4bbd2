"""Sandboxes by docker or podman: a container for each session."""

from __future__ import annotations

import json
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
        runtime: str | None = None,
    ) -> None:
        """Look for the engine, and whether it works.

        Args:
            runtime: what runs a container, by the engine's name for it: "runsc" is gVisor, a kernel
                of its own in front of this machine's. None: the engine's default.

        Raises:
            SettingsError: there is no engine, it does not answer, or has no such runtime.
        """
        names = (engine,) if engine else ("docker", "podman")
        found = next((path for name in names if (path := shutil.which(name))), None)
        if found is None:
            raise SettingsError(
                f"sandbox='container': none of {', '.join(names)} is on PATH; install one, "
                "or set sandbox='bubblewrap'"
            )
        self._ask(found, "info")
        if runtime is not None:
            self._check_runtime(found, runtime)
        super().__init__(limits)
        self._runtime = runtime
        self._engine = found
        self._image = image
        self._python = python
        self.enforcement = (
            f"{Path(found).name} bounds memory and processes of a container by cgroups"
            + (f"; runtime {runtime}" if runtime is not None else "")
        )
        _log.info("sandbox", backend="container", enforcement=self.enforcement)

    @staticmethod
    def _ask(engine: str, *words: str) -> str:
        """What the engine says of itself."""
        command = " ".join((engine, *words))
        try:
            answer = subprocess.run(
                [engine, *words], capture_output=True, timeout=30, check=False, text=True
            )
        except subprocess.TimeoutExpired as error:
            raise SettingsError(f"sandbox='container': `{command}` hangs; repair it") from error
        if answer.returncode:
            said = " ".join(answer.stderr.split())[-300:]
            raise SettingsError(
                f"sandbox='container': `{command}` fails: {said}; start the engine, "
                "or set sandbox='bubblewrap'"
            )
        return answer.stdout

    def _check_runtime(self, engine: str, runtime: str) -> None:
        if Path(engine).name == "podman":
            # It takes any program on PATH, and lists none.
            known = [runtime] if shutil.which(runtime) else []
        else:
            known = sorted(json.loads(self._ask(engine, "info", "--format", "{{json .Runtimes}}")))
        if runtime not in known:
            raise SettingsError(
                f"sandbox='container' runtime={runtime!r}: {Path(engine).name} does not have it "
                f"(it has {', '.join(known) or 'none of that name on PATH'}); install it and enter "
                "it in the engine's configuration, or leave runtime out"
            )

    def _launch(self, limits: Limits, base: Path | None, events: int = -1) -> Launch:
        name = f"outloop-{uuid.uuid4().hex}"
        return Launch(
            argv=container_argv(
                self._engine,
                name,
                self._image,
                self._python,
                self.bundle.path,
                limits,
                base,
                runtime=self._runtime,
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
    *,
    runtime: str | None = None,
) -> list[str]:
    """The command that starts a container with a supervisor in it."""
    memory = f"{limits.memory_bytes + limits.disk_bytes + 64 * 2**20}b"
    box = f"/box:rw,nosuid,nodev,exec,size={limits.disk_bytes}"
    if Path(engine).name != "podman":  # which refuses the option: files are bounded as memory there
        box += f",nr_inodes={limits.max_files + 8}"
    chosen = ("--runtime", runtime) if runtime is not None else ()
    # For podman it is an option of every command, for docker one of this command.
    is_global = Path(engine).name == "podman"
    capabilities = ("SETUID", "SETGID", "CHOWN", "KILL", "DAC_OVERRIDE")
    return [
        *((engine, *chosen, "run") if is_global else (engine, "run", *chosen)),
        *("--rm", "--interactive", "--name", name),
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
