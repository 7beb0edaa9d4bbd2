"""A run through a real Slurm: a controller and four node daemons on this machine (make test-slurm).

They run as root, on loopback, with their files in a folder of the test.
"""

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fakes import user_folder
from fakes.cluster_run import cluster_settings, wait_until
from outloop.buffer.events import read_events
from outloop.engine.models.random_init import write_policy

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(540)]

CONF = """\
ClusterName=outloop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool.%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=20000\n"
SETTINGS = cluster_settings("slurm", checkpoint_every=100)


def output(*command: str) -> str:
    """What a program of Slurm prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Daemons that are up, for every program of Slurm that this process starts."""
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    with ExitStack() as sockets:
        listeners = [
            sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)
        ]
        ports = [listener.getsockname()[1] for listener in listeners]
    host = socket.gethostname().partition(".")[0]
    nodes = [NODE.format(n=n, host=host, port=port) for n, port in enumerate(ports[1:])]
    head, partition = CONF.format(host=host, ports=ports, dir=folder).rsplit("PartitionName", 1)
    (folder / "slurm.conf").write_text(f"{head}{''.join(nodes)}PartitionName{partition}")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    munged = ["munged", "--foreground", "--force", f"--key-file={folder / 'munge.key'}"]
    for option, name in (("socket", "socket"), ("pid-file", "pid"), ("seed-file", "seed")):
        munged.append(f"--{option}={folder / f'munge.{name}'}")
    daemons = [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"n{n}"] for n in range(4))]
    with ExitStack() as stack:
        for command in daemons:
            log = stack.enter_context((folder / f"{command[0]}.out").open("ab"))
            process = stack.enter_context(
                subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )
            stack.callback(process.terminate)
            if command is munged:
                wait_until("munged", (folder / "munge.socket").exists, 20)
        wait_until("nodes", lambda: " idle " in output_of_sinfo(), 60)
        wait_until("four nodes", lambda: "n[0-3]" in output_of_sinfo(), 60)
        yield


def output_of_sinfo() -> str:
    """Empty while there is no controller."""
    answer = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, check=False)
    return answer.stdout


def write(tmp_path: Path) -> Path:
    """A user's folder whose parts need one CPU each."""
    write_policy(tmp_path / "model-files", 0)
    folder = tmp_path / "user"
    folder.mkdir()
    user_folder.write(folder, tmp_path / "model-files", SETTINGS)
    sizes = {"redis": 1500, "router": 500, "server": 1500, "trainer": 3000, "runner": 1500}
    rows = [f"{part} = {{cpus = 1, memory_mb = {mb}}}" for part, mb in sizes.items()]
    with (folder / "run.toml").open("a") as file:
        file.write("[deploy.parts]\n" + "\n".join(rows) + "\n")
    return folder


def test_doctor_examines_every_node_of_an_allocation(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the run's shape; it is given back, and nothing is made."""
    folder = write(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    doctor = ("doctor", "--config", "run.toml", "--on", "slurm")
    answer = user_folder.run(folder, *doctor, timeout_s=200)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    places = {f"n{n}": part for n, part in enumerate(("control", "server", "trainer", "runner"))}
    for node, part in places.items():
        assert f"{node}: {part}\n" in answer.stdout
    assert re.search(r"redis server +│ n0 ", answer.stdout)
    assert re.search(r"settings +│ all +│ model, tasks and code load", answer.stdout)
    assert re.search(r"bandwidth +│ all +│ gloo, from n2: [0-9.e-]+ GB/s to n1", answer.stdout)
    assert "this run can start on these 4 nodes" in answer.stdout
    assert not (folder / "runs").exists()
    wait_until("an empty queue", lambda: output("squeue", "-h") == "", 60)
    # Two of four nodes are taken: the request is withdrawn when its time in the queue is up.
    with subprocess.Popen(["srun", "--nodes=2", "--exclusive", "sleep", "600"]) as other:
        wait_until("a job", lambda: output("squeue", "-h", "-o", "%t").split() == ["R"], 60)
        monkeypatch.setenv("OUTLOOP_SERVER__START_TIMEOUT_S", "5")
        answer = user_folder.run(folder, *doctor, timeout_s=100)
        assert answer.returncode == 1
        assert "doctor waited 5.0 s in phase='queue' for Slurm" in answer.stderr
        assert output("squeue", "-h", "-o", "%j").split() == ["sleep"]
        other.terminate()
    wait_until("an empty queue", lambda: output("squeue", "-h") == "", 60)


def test_a_run_is_queued_again_before_its_time_is_up_and_finishes(
    cluster: None, tmp_path: Path
) -> None:
    """The notice makes a checkpoint, the job goes back to the queue, and each step is made once."""
    folder = write(tmp_path)
    answer = user_folder.run(folder, "submit", "slurm", "run.toml", timeout_s=120)
    assert answer.returncode == 0, answer.stderr
    job = answer.stdout.split()[-1]
    run_dir = folder / "runs/slurm"

    def made() -> list[int]:
        path = run_dir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [row["step"] for row in map(json.loads, lines) if "train/loss" in row]

    def kinds() -> list[str]:
        """Of what happened to the run; the alarms of its few steps are another matter."""
        events = read_events(run_dir) if run_dir.exists() else []
        return [one["kind"] for one in events if one["kind"] not in ("alarm", "alarm_over")]

    wait_until("steps", lambda: len(made()) >= 3, 200)
    assert output("squeue", "-h", "-s", "-o", "%j").split().count("server-0") == 1
    output("scancel", "--batch", "--signal=USR1", job)
    wait_until("a stop", lambda: "stopped" in kinds(), 100)
    in_queue = ["PD"] * 4
    wait_until("the queue", lambda: output("squeue", "-h", "-o", "%t").split() == in_queue, 60)
    before = made()
    assert list((run_dir / "checkpoints").glob("step_*")) != []
    for number in range(int(job), int(job) + 4):
        output("scontrol", "update", f"jobid={number}", "StartTime=now")
    wait_until("the end", lambda: "finished" in kinds(), 300)
    wait_until("an empty queue", lambda: output("squeue", "-h") == "", 60)
    assert kinds() == ["started", "stopped", "started", "finished"]
    assert before == list(range(1, len(before) + 1))
    assert made() == list(range(1, 41))
    assert (run_dir / "hf/config.json").is_file()
    assert (run_dir / "redis_password").stat().st_mode & 0o777 == 0o600
