"""The Slurm job: what its script asks for, and how parts are placed from inside it."""

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fakes.torchrun_words import program_of
from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.cli import cli
from outloop.engine.launch.deploy.slurm import SlurmPlacement, batch_script, submit_job
from outloop.engine.launch.deploy.slurm_nodes import SlurmNodes, allocation_words

Written = Callable[..., tuple[Settings, Path]]


def components_of(script: str) -> list[list[str]]:
    """The sbatch options of each component."""
    head = script.partition("\n\n")[0]
    return [
        re.findall(r"^#SBATCH (--\S+)", part, re.MULTILINE)
        for part in head.split("#SBATCH hetjob\n")
    ]


def test_each_part_has_a_component_of_its_own(written: Written) -> None:
    """Tasks, CPUs, memory and GPUs by the settings; raw options in all of them."""
    settings, config = written()
    control, server, trainer, runner = components_of(batch_script(settings, config, ()))
    assert control[:2] == ["--job-name=walk", f"--output={settings.run.dir}/walk/slurm-%j.log"]
    assert {"--requeue", "--signal=B:USR1@90", "--ntasks=1", "--cpus-per-task=3"} <= {*control}
    assert server == [
        *("--ntasks=2", "--cpus-per-task=6", "--mem-per-cpu=10000M", "--gpus-per-task=H100:2"),
        *("--partition=gpu", "--exclusive"),
    ]
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-task=H100:4"} <= {*trainer}
    assert "--ntasks=3" in runner
    assert not any("gpus" in option for option in control + runner)


def test_whoever_submits_is_told_of_nodes_and_of_redis(written: Written) -> None:
    """On the terminal, not in the script: the nodes that Slurm will take, and a Redis that nobody
    starts."""
    _, config = written()
    run_dir = f"run.dir={config.parent / 'runs'}"
    command = ["submit", "slurm", str(config), "--dry-run", "--set", run_dir]
    answer = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert answer.stdout.startswith("#!/bin/bash\n")
    # Control, servers and runners one each, the trainer two.
    assert answer.stderr.startswith("at least 5 nodes")
    assert "server (2 tasks of 6 CPUs and 2 GPUs), trainer (2 tasks" in answer.stderr
    assert "Redis" not in answer.stderr
    there = [*command, "--set", "buffer.redis_url=redis://there:6379"]
    answer = CliRunner().invoke(cli, there, catch_exceptions=False)
    assert "warning: the job starts no Redis and waits for redis://there:6379" in answer.stderr
    assert "warning" not in answer.stdout


def test_the_example_for_two_nodes_is_one_to_submit() -> None:
    """It starts its own Redis, and takes two nodes with GPUs and two without."""
    path = Path(__file__).parents[3] / "examples/gpu/qwen3-30b-a3b-two-nodes.toml"
    answer = CliRunner().invoke(cli, ["submit", "slurm", str(path), "--dry-run"])
    assert answer.exit_code == 0
    assert answer.stderr.startswith("at least 4 nodes")
    assert "warning" not in answer.stderr
    assert "outloop redis" in answer.stdout
    assert '--set=publish.host="\'"$(scontrol' in answer.stdout


def test_the_script_is_one_for_bash_and_holds_no_secret(written: Written, tmp_path: Path) -> None:
    """Redis of the job by a password in a file; a Redis that is there is taken as it is."""
    settings, config = written("publish.transport=collective")
    script = batch_script(settings, config, ("trainer.num_steps=7",))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "redis --dir" in script
    assert "--set=trainer.num_steps=7" in script
    assert '--set=publish.host="\'"$(scontrol show hostnames' in script
    own, config = written('buffer.redis_url="redis://there:6379"', "publish.transport=disk")
    script = batch_script(own, config, ())
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "outloop redis" not in script


def test_parts_are_started_in_their_components(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step for each server; the trainer's ranks by torchrun on each of its machines."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for group in range(4):
        monkeypatch.setenv(f"SLURM_JOB_ID_HET_GROUP_{group}", str(7 + group))
    settings, _ = written()
    placement = SlurmPlacement(settings)
    command = ["python", "-m", "outloop.cli", "server", "--run", "runs/walk"]
    server = placement.command("server-1", "server", command)
    srun = server[server.index("srun") :]
    assert {"--het-group=1", "--ntasks=1", "--gpus-per-task=H100:2", "--exact"} <= {*srun}
    assert srun[-len(command) :] == command
    assert any("--advertise" in word for word in srun)
    assert server[server.index("server-1") + 1] == "8"
    command = ["python", "-m", "outloop.cli", "trainer", "--run", "runs/walk"]
    trainer = placement.command("trainer", "trainer", command)
    assert {"--het-group=2", "--ntasks=2", "--nodes=2"} <= {*trainer}
    line = next(word for word in trainer if "torch.distributed.run" in word)
    assert "--nnodes 2 --nproc-per-node 4" in line
    assert "SLURM_JOB_NODELIST_HET_GROUP_2" in line
    given = trainer[trainer.index(line) + 2 :]
    program = ["outloop.cli", "trainer", "--run", "runs/walk"]
    assert program_of(["torch.distributed.run", *given]) == program
    router = placement.command("router-0", "router", ["python", "router"])
    assert router[:3] == ["python", "router", "--advertise"]
    assert placement.command("archiver", "archiver", ["python"]) == ["python"]


def test_a_stop_reaches_the_step_by_scancel(
    written: Written, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The watcher asks Slurm to stop the step, waits for its end and hands on its exit code."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_ID_HET_GROUP_3", "10")
    tools = {
        # Runs the step's command here, under the number 5.
        "srun": 'while [ "$1" != sh ]; do shift; done\n'
        "export SLURM_PROCID=0 SLURM_STEP_ID=5\n"
        'echo $$ > pid; exec "$@"\n',
        "scancel": 'echo "$@" > cancelled; kill -TERM "$(cat pid)"\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings, _ = written()
    (settings.run.dir / "walk/logs").mkdir(parents=True)
    part = "trap 'exit 3' TERM; echo up; while :; do sleep 0.05; done"
    command = SlurmPlacement(settings).command("runner-0", "runner", ["bash", "-c", part])
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(20) == 3
    assert shlex.split((tmp_path / "cancelled").read_text()) == ["--signal=TERM", "10.5"]


def test_outside_a_job_and_without_slurm_is_a_sentence(
    written: Written, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each says what to do instead."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    settings, _ = written()
    with pytest.raises(SettingsError, match="outloop submit slurm CONFIG"):
        SlurmPlacement(settings)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="--dry-run"):
        submit_job(settings, "")
    with pytest.raises(SettingsError, match=r"deploy.slurm.requeue is set by outloop submit"):
        written("deploy.slurm.requeue=true")


def test_nodes_are_those_of_the_job_s_components(
    written: Written, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is given one task by a step of its own, with what its part has of a node."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho $3 | tr , '\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    settings, _ = written()
    with pytest.raises(SettingsError, match="SLURM_JOB_ID=7: this job has no component 0"):
        SlurmNodes(settings)
    for group, nodes in enumerate(("a", "b", "c,d", "e,f")):
        monkeypatch.setenv(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", nodes)
    placed = SlurmNodes(settings)
    parts = {node.name: node.parts for node in placed.nodes}
    assert parts == {
        "a": ("control",),
        "b": ("server",),
        "c": ("trainer",),
        "d": ("trainer",),
        "e": ("runner",),
        "f": ("runner",),
    }
    command = placed.command(placed.nodes[3], ["python", "x"])
    assert {"--het-group=2", "--nodelist=d", "--ntasks=1", "--nodes=1"} <= {*command}
    assert {"--gpus-per-task=H100:4", "--overlap"} <= {*command}
    assert command[-2:] == ["python", "x"]
    told = placed.command(placed.nodes[1], ["python", "x"], advertises=True)
    assert told[-2:] == ["python", "x"]
    assert "--advertise" in told[-3]


def test_an_allocation_to_look_at_has_the_run_s_shape_and_little_time(written: Written) -> None:
    """The components of the batch script; the raw options but for the time limit."""
    settings, _ = written('deploy.slurm={partition="gpu", time="24:00:00"}')
    words = allocation_words(settings, "doctor-walk")
    assert words[:2] == ["salloc", "--job-name=doctor-walk"]
    assert words.count(":") == 3
    assert words.count("--partition=gpu") == 4
    assert {word for word in words if word.startswith("--time")} == {"--time=00:15:00"}
    assert "--gpus-per-task=H100:2" in words
