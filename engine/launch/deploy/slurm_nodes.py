"""The nodes of a Slurm job of a run's shape, and an allocation of that shape to look at them.

Nothing of the run is started: each node is given one task, by a step of its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.launch.deploy.run_nodes import RunNode
from outloop.engine.launch.deploy.slurm import Component, components, raw_option
from outloop.engine.machine.parent_death import die_with_parent

_ASK_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_TIME_LIMIT = "--time=00:15:00"
"""Of an allocation that is only looked at, whatever deploy.slurm says: short ones come earlier."""


def is_in_job(environment: Mapping[str, str] = os.environ) -> bool:
    """This process is in a Slurm job."""
    return "SLURM_JOB_ID" in environment


class SlurmNodes:
    """Those of the job that this process is in, by its components."""

    def __init__(self, settings: Settings) -> None:
        """Ask Slurm for the names of the nodes.

        Raises:
            SettingsError: the job has not the components of the run, or as `components`.
        """
        self._gpu_type = settings.deploy.gpu_type
        self._places: dict[str, tuple[int, Component]] = {}
        parts: dict[str, list[str]] = {}
        for group, component in enumerate(components(settings)):
            nodes = os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}")
            if nodes is None:
                raise SettingsError(
                    f"SLURM_JOB_ID={os.environ.get('SLURM_JOB_ID')}: this job has no component "
                    f"{group}, which would be {component.part}; run doctor outside of a job, where "
                    "it asks for an allocation of the run's shape, or in a job of `outloop submit "
                    "slurm CONFIG`"
                )
            for name in _hostnames(nodes):
                self._places.setdefault(name, (group, component))
                parts.setdefault(name, []).append(component.part)
        self._nodes = tuple(RunNode(name=name, parts=tuple(of)) for name, of in parts.items())

    @property
    def nodes(self) -> tuple[RunNode, ...]:
        """In the order of the job's components."""
        return self._nodes

    def command(
        self, node: RunNode, program: Sequence[str], *, advertises: bool = False
    ) -> list[str]:
        """As RunNodes says, by a step of one task beside those that may be running."""
        group, component = self._places[node.name]
        one = Component(
            part=component.part,
            num_tasks=1,
            cpus=component.cpus,
            memory_mb=component.memory_mb,
            gpus=component.gpus,
            num_nodes=1,
        )
        srun = [
            *("srun", f"--het-group={group}", f"--nodelist={node.name}", "--job-name=doctor"),
            *("--overlap", "--input=none", "--kill-on-bad-exit=1", *one.options(self._gpu_type)),
        ]
        if not advertises:
            return [*srun, *program]
        return [*srun, "sh", "-c", 'exec "$0" "$@" --advertise "$(hostname)"', *program]


def _hostnames(nodes: str) -> list[str]:
    """The single names in Slurm's way of writing several."""
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", nodes],
        capture_output=True,
        text=True,
        timeout=_ASK_TIMEOUT_S,
        check=False,
    )
    if answer.returncode:
        raise SettingsError(
            f"scontrol show hostnames {nodes} failed (exit_code={answer.returncode}): "
            f"{answer.stderr.strip()}"
        )
    return answer.stdout.split()


def allocation_words(settings: Settings, name: str) -> list[str]:
    """salloc and its options for a job `name` of the run's shape, without the program.

    Raises:
        SettingsError: as `components`.
    """
    deploy = settings.deploy
    raw = [
        raw_option(option, value)
        for option, value in deploy.slurm.items()
        if option.replace("_", "-") != "time"
    ]
    words = ["salloc", f"--job-name={name}"]
    for number, component in enumerate(components(settings)):
        words += [":"] if number else []
        words += [*component.options(deploy.gpu_type), *raw, _TIME_LIMIT]
    return words


def run_in_allocation(
    settings: Settings, program: Sequence[str], *, queue_timeout_s: float, timeout_s: float
) -> int:
    """Run `program` here, inside an allocation of the run's shape, and give that back.

    What salloc and the program print goes to this process's own output.

    Args:
        queue_timeout_s: for the wait in Slurm's queue.
        timeout_s: for the program after that.

    Returns:
        The program's exit code; 1 where Slurm refused the allocation, which salloc then says.

    Raises:
        SettingsError: there is no salloc, or as `components`.
        DeadlineExceeded: a time was up; the allocation is given back, the request withdrawn.
    """
    if shutil.which("salloc") is None:
        raise SettingsError(
            "salloc is not on PATH: this machine is no login machine of a Slurm cluster; run "
            "doctor there, or without --on for this machine alone"
        )
    name = f"doctor-{settings.run.name}-{secrets.token_hex(4)}"
    command = [*allocation_words(settings, name), *program]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent) as process:
        try:
            code = _wait(process, queue_timeout_s)
            if code is None and _is_in_queue(name):
                raise DeadlineExceeded(
                    who="doctor",
                    phase="queue",
                    peer="Slurm to give an allocation of the run's shape; ask for less in [deploy] "
                    "and the numbers of parts, or again when nodes are free",
                    after_s=queue_timeout_s,
                )
            code = _wait(process, timeout_s) if code is None else code
            if code is None:
                raise DeadlineExceeded(
                    who="doctor", phase="nodes", peer="programs on the nodes", after_s=timeout_s
                )
            return code
        finally:
            if process.poll() is None:
                process.terminate()
                if _wait(process, _STOP_TIMEOUT_S) is None:
                    process.kill()


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code; None: the time is up."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _is_in_queue(name: str) -> bool:
    """Slurm has not begun the job."""
    answer = subprocess.run(
        ["squeue", "--noheader", f"--name={name}", "--states=PENDING"],
        capture_output=True,
        text=True,
        timeout=_ASK_TIMEOUT_S,
        check=False,
    )
    return bool(answer.stdout.strip())
