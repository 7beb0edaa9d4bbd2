"""A run as one heterogeneous Slurm job.

The batch script runs on the first component's machine and starts Redis and `outloop train --on
slurm` there; the launcher places servers, trainer and runners by srun, each in the component of its
part, and watches, restarts and stops them as on one machine. The run's folder, the interpreter and
the model must be on a file system that all machines share.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outloop.buffer.errors import SettingsError
from outloop.buffer.redis.client import wait_for_redis
from outloop.buffer.run import with_access
from outloop.buffer.settings import Settings
from outloop.engine.launch.deploy.parts import (
    RANKS_MODULE,
    TRAINER_PORT,
    apart,
    gpus_of_server,
    gpus_of_trainer_node,
    num_servers,
    override_words,
    ranks_of_node,
)
from outloop.engine.launch.last_sentence import VARIABLE

FIRST_PORT = 20000
NUM_PORTS = 12000
"""Of Redis, by the job's number; below those that systems give to clients."""

# srun makes of SIGTERM the end of the step at once; what is to stop well is sent it by scancel.
_WATCH_STEP = """\
job=$1
step=$2
shift 2
rm -f "$step"
"$@" &
child=$!
trap 'scancel --signal=TERM "$job.$(cat "$step")" || kill -TERM "$child"' TERM
while :; do
    wait "$child"
    code=$?
    kill -0 "$child" 2> /dev/null || exit "$code"
done
"""
_NAME_STEP = f'unset {VARIABLE}; [ "$SLURM_PROCID" != 0 ] || echo "$SLURM_STEP_ID" > "$0"; '
_SBATCH_TIMEOUT_S = 60
_REDIS_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Like processes of one part, and what each is given."""

    part: str
    num_tasks: int
    cpus: int
    memory_mb: int
    gpus: int = 0
    num_nodes: int | None = None

    def sentence(self) -> str:
        """For a person: "server (2 tasks of 4 CPUs and 2 GPUs)"."""
        tasks = f"{self.num_tasks} tasks" if self.num_tasks > 1 else "1 task"
        gpus = f" and {self.gpus} GPUs" if self.gpus else ""
        return f"{self.part} ({tasks} of {self.cpus} CPUs{gpus})"

    def options(self, gpu_type: str | None) -> list[str]:
        """As sbatch and srun spell them."""
        words = [
            f"--ntasks={self.num_tasks}",
            f"--cpus-per-task={self.cpus}",
            f"--mem-per-cpu={math.ceil(self.memory_mb / self.cpus)}M",
        ]
        if self.num_nodes is not None:
            words += [f"--nodes={self.num_nodes}", "--ntasks-per-node=1"]
        if self.gpus:
            kind = f"{gpu_type}:" if gpu_type else ""
            words.append(f"--gpus-per-task={kind}{self.gpus}")
        return words


def components(settings: Settings) -> tuple[Component, ...]:
    """Those of the job, in its order; the first holds Redis, routers and the launcher.

    Raises:
        SettingsError: ranks do not divide among the machines, or Redis has too little memory.
    """
    deploy = settings.deploy
    redis, router = deploy.resources("redis"), deploy.resources("router")
    has_redis = settings.buffer.redis_url is None
    if has_redis and redis.memory_mb < settings.buffer.max_memory_mb:
        raise SettingsError(
            f"deploy.parts.redis.memory_mb={redis.memory_mb} is below buffer.max_memory_mb="
            f"{settings.buffer.max_memory_mb}; raise the first"
        )
    routers = settings.router.num_processes
    found = [
        Component(
            part="control",
            num_tasks=1,
            cpus=redis.cpus * has_redis + router.cpus * routers,
            memory_mb=redis.memory_mb * has_redis + router.memory_mb * routers,
        )
    ]
    for part, number, gpus in (
        ("server", num_servers(settings), gpus_of_server(settings)),
        ("trainer", deploy.trainer_nodes, gpus_of_trainer_node(settings)),
        ("runner", settings.env.num_runners, 0),
    ):
        given = deploy.resources(part)  # type: ignore[arg-type]
        if number:
            found.append(
                Component(
                    part=part,
                    num_tasks=number,
                    cpus=given.cpus,
                    memory_mb=given.memory_mb,
                    gpus=gpus,
                    num_nodes=number if part == "trainer" else None,
                )
            )
    return tuple(found)


def nodes_needed(settings: Settings) -> list[str]:
    """Say, for a person, how many nodes the job takes and what it expects to be there.

    Raises:
        SettingsError: as `components`.
    """
    found = components(settings)
    least = sum(component.num_nodes or 1 for component in found)
    parts = ", ".join(component.sentence() for component in found)
    said = [f"at least {least} nodes, each component on nodes of its own: {parts}"]
    url = settings.buffer.redis_url
    if url is not None:
        said.append(
            f"warning: the job starts no Redis and waits for {url} "
            "(buffer.redis_url), which every node must reach; leave the setting out to have the "
            "job start one"
        )
    return said


class SlurmPlacement:
    """Starts parts by srun from inside the job; Redis, routers and archiver are beside it."""

    def __init__(self, settings: Settings) -> None:
        """For the job that this process is in.

        Raises:
            SettingsError: it is in none, or as `components`.
        """
        if "SLURM_JOB_ID" not in os.environ:
            raise SettingsError(
                "on='slurm' without SLURM_JOB_ID in the environment: this is no Slurm job; run "
                "`outloop submit slurm CONFIG`, which starts one"
            )
        self._settings = settings
        self._steps = (settings.run.dir / settings.run.name / "logs").absolute()
        self._components = components(settings)

    def command(self, name: str, part: str, command: Sequence[str]) -> list[str]:
        """As Placement says; a part that listens registers the name of its own machine."""
        if part == "router":
            return [*command, "--advertise", socket.gethostname()]
        place = [item for item in enumerate(self._components) if item[1].part == part]
        if not place:
            return list(command)
        ((group, component),) = place
        words = list(command)
        num_tasks = component.num_tasks if part == "trainer" else 1
        if part == "trainer" and num_tasks > 1:
            words = self._ranks(words, group)
        one = Component(
            part=part,
            num_tasks=num_tasks,
            cpus=component.cpus,
            memory_mb=component.memory_mb,
            gpus=component.gpus,
            num_nodes=num_tasks,
        )
        srun = [
            *("srun", f"--het-group={group}", f"--job-name={name}", "--exact"),
            *("--kill-on-bad-exit=1", "--input=none", *one.options(self._settings.deploy.gpu_type)),
        ]
        advertise = ' --advertise "$(hostname)"' if part == "server" else ""
        job = os.environ[f"SLURM_JOB_ID_HET_GROUP_{group}"]
        step = str(self._steps / f"{name}.step")
        return [
            *("sh", "-c", _WATCH_STEP, name, job, step, *srun),
            *("sh", "-c", f'{_NAME_STEP}exec "$@"{advertise}', step, *words),
        ]

    def _ranks(self, command: Sequence[str], group: int) -> list[str]:
        """torchrun on each of the trainer's machines; they meet on the first one."""
        meet = f'"$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{group}" | head -n 1)"'
        words = (
            *("-m", "torch.distributed.run", "--nnodes", str(self._settings.deploy.trainer_nodes)),
            *("--nproc-per-node", str(ranks_of_node(self._settings))),
            *("--rdzv-backend", "c10d", "--rdzv-id", "trainer"),
        )
        meeting = f"--rdzv-endpoint {meet}:{TRAINER_PORT}"
        line = f'export PYTHONSAFEPATH=1; exec "$0" {shlex.join(words)} {meeting} "$@"'
        interpreter, *rest = command
        program = rest[rest.index("-m") + 2 :]
        return ["sh", "-c", line, interpreter, *RANKS_MODULE, *program]


def placed_by_slurm(settings: Settings) -> SlurmPlacement:
    """The placement of the job that this process is in, once the job's Redis answers.

    Raises:
        SettingsError: this is no job, or a secret is not there.
        DeadlineExceeded: Redis did not answer.
    """
    placement = SlurmPlacement(settings)
    if settings.buffer.redis_url is not None:
        url = with_access(settings.buffer.redis_url, settings.buffer)
        wait_for_redis(url, _REDIS_TIMEOUT_S)
    return placement


def batch_script(settings: Settings, config: Path, overrides: Sequence[str]) -> str:
    """The text for sbatch; it holds no secret.

    Args:
        config: the settings file.
        overrides: `--set` values of the person who submits.

    Raises:
        SettingsError: as `components`.
    """
    run_dir = (settings.run.dir / settings.run.name).absolute()
    deploy, found = settings.deploy, components(settings)
    raw = [raw_option(name, value) for name, value in deploy.slurm.items()]
    head = [
        f"--job-name={settings.run.name}",
        f"--output={run_dir}/slurm-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{deploy.notice_s}",
    ]
    lines = ["#!/bin/bash"]
    for number, component in enumerate(found):
        if number:
            lines.append("#SBATCH hetjob")
        lines.append(f"# {component.part}")
        options = [*([] if number else head), *component.options(deploy.gpu_type), *raw]
        lines += [f"#SBATCH {option}" for option in options]
    trainer = next(n for n, component in enumerate(found) if component.part == "trainer")
    own_redis = settings.buffer.redis_url is None
    given = apart(settings, redis_url=None, trainer_host="TRAINER_HOST")
    given["run.dir"] = str(settings.run.dir.absolute())
    password = settings.buffer.redis_password_file or run_dir / "redis_password"
    if own_redis:
        given["buffer.redis_password_file"] = str(password)
    words = [f"--set={text}" for text in overrides] + override_words(given)
    sets = " ".join(shlex.quote(word) for word in words)
    host = (
        '"$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_'
        + str(trainer)
        + '}" | head -n 1)"'
    )
    sets = sets.replace("TRAINER_HOST", f"'{host}'")
    python = shlex.join([sys.executable, "-P", "-m", "outloop.cli"])
    body = _BODY.format(
        workdir=shlex.quote(str(Path.cwd())),
        run_dir=shlex.quote(str(run_dir)),
        outloop=python,
        redis=_REDIS.format(
            password=shlex.quote(str(password)),
            first=FIRST_PORT,
            number=NUM_PORTS,
            fsync=settings.buffer.fsync,
            max_memory_mb=settings.buffer.max_memory_mb,
        )
        if own_redis
        else "sets=()\n",
        config=shlex.quote(str(config.absolute())),
        sets=sets,
    )
    return "\n".join(lines) + "\n" + body


def raw_option(name: str, value: object) -> str:
    """One of deploy.slurm as sbatch and salloc spell it."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"


_REDIS = """\
password={password}
[ -s "$password" ] || head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > "$password"
port=$(({first} + SLURM_JOB_ID % {number}))
# A Redis that died comes back with what it had acknowledged.
(
    trap 'kill -TERM "$server"; wait "$server"; exit' TERM
    while :; do
        outloop redis --dir "$run_dir/redis" --host 0.0.0.0 --port "$port" \\
            --password-file "$password" --fsync {fsync} --max-memory-mb {max_memory_mb} \\
            >> "$run_dir/logs/redis.log" 2>&1 &
        server=$!
        wait "$server"
        sleep 1
    done
) &
redis=$!
sets=(--set "buffer.redis_url=\\"redis://$(hostname):$port\\"")
"""
_BODY = """
set -u
umask 077
cd {workdir} || exit 2
run_dir={run_dir}
mkdir -p "$run_dir/logs"
outloop() {{ exec {outloop} "$@"; }}

redis=
{redis}
(outloop train {config} --on slurm {sets} "${{sets[@]}}") &
launcher=$!
notice=
# USR1: the time is nearly up, go on in another job. TERM (scancel, preemption): stop; after a
# preemption Slurm queues the job again by itself.
trap 'notice=1; kill -TERM "$launcher"' USR1
trap 'kill -TERM "$launcher"' TERM
code=130
while kill -0 "$launcher" 2> /dev/null; do
    wait "$launcher"
    code=$?
done
[ -z "$redis" ] || {{ kill -TERM "$redis"; wait "$redis"; }}
if [ -n "$notice" ] && [ "$code" = 130 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def submit_job(settings: Settings, script: str) -> str:
    """Write the script into the run's folder and give it to sbatch; what sbatch answers.

    Raises:
        SettingsError: there is no sbatch, or it refuses the script.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise SettingsError(
            "sbatch is not on PATH: this machine is no login machine of a Slurm cluster; use "
            "--dry-run to see the script"
        )
    path = (settings.run.dir / settings.run.name / "slurm.sh").absolute()
    path.write_text(script)
    answer = subprocess.run(
        [sbatch, str(path)], capture_output=True, text=True, timeout=_SBATCH_TIMEOUT_S, check=False
    )
    if answer.returncode:
        raise SettingsError(
            f"sbatch refused {path} (exit_code={answer.returncode}): {answer.stderr.strip()}; "
            "change [deploy] or [deploy.slurm]"
        )
    return answer.stdout.strip()
