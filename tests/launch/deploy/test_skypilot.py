"""The job group for SkyPilot, by the fields that its loader reads."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.torchrun_words import program_of
from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, load_settings
from outloop.cli import cli
from outloop.engine.launch.deploy.skypilot import job_group

Tree = dict[str, Any]
Written = Callable[..., tuple[Settings, Path]]


def tasks_of(text: str) -> tuple[Tree, dict[str, Tree]]:
    """The group's header, and its tasks by name."""
    header, *tasks = yaml.safe_load_all(text)
    return header, {task["name"]: task for task in tasks}


def test_each_server_and_runner_is_a_task_on_a_spot_machine(written: Written) -> None:
    """Names, machines and counts; the trainer's end is the group's."""
    settings, config = written()
    header, tasks = tasks_of(job_group(settings, config))
    assert (header["name"], header["execution"]) == ("walk", "parallel")
    assert header["primary_tasks"] == ["trainer"]
    servers, runners = ["server-0", "server-1"], ["runner-0", "runner-1", "runner-2"]
    assert list(tasks) == ["control", "trainer", *servers, *runners]
    spot = [name for name, task in tasks.items() if task["resources"]["use_spot"]]
    assert spot == servers + runners
    assert tasks["trainer"]["num_nodes"] == 2
    assert tasks["trainer"]["resources"]["accelerators"] == "H100:4"
    server = tasks["server-1"]["resources"]
    assert (server["accelerators"], server["cpus"], server["memory"]) == ("H100:2", "6+", "59+")
    fields = {"name", "workdir", "num_nodes", "resources", "file_mounts", "secrets", "run"}
    assert all(set(task) == fields for task in tasks.values())


def test_the_commands_meet_at_the_group_s_names(written: Written, tmp_path: Path) -> None:
    """Redis, router, trainer and servers are reached as TASK-NODE.GROUP."""
    settings, config = written()
    _, tasks = tasks_of(job_group(settings, config, ("trainer.num_steps=7",)))
    line = next(
        line for line in tasks["control"]["run"].splitlines() if " outloop init " in f" {line}"
    )
    words = shlex.split(line.partition("do ")[2].partition(" && ")[0])
    assert words[:3] == ["outloop", "init", "run.toml"]
    sets = tuple(word.removeprefix("--set=") for word in words[3:])
    loaded = load_settings(tmp_path / "run.toml", sets)
    assert loaded.trainer.num_steps == 7
    assert loaded.buffer.redis_url == "redis://control-0.walk:6379"
    assert loaded.buffer.redis_password_env in tasks["control"]["secrets"]
    assert (loaded.publish.transport, loaded.publish.host) == ("collective", "trainer-0.walk")
    assert "--advertise server-1-0.walk" in tasks["server-1"]["run"]
    assert "--router-url http://control-0.walk:8000" in tasks["runner-2"]["run"]
    assert "--rdzv-endpoint=trainer-0.walk:29500" in tasks["trainer"]["run"]
    started = tasks["trainer"]["run"].strip().splitlines()[-1]
    assert program_of(shlex.split(started))[:3] == ["outloop.cli", "trainer", "--run"]


def test_archiver_and_monitor_are_beside_the_router(written: Written) -> None:
    """Started again when they end, without an end of Redis and router; on a machine that has room
    for all; left out where the settings want neither."""
    settings, config = written("telemetry.prometheus_port=0")
    _, tasks = tasks_of(job_group(settings, config))
    control = tasks["control"]
    lines = control["run"].splitlines()
    for part in ("archiver", "monitor"):
        (line,) = (line for line in lines if f"outloop {part} --run /outloop-runs/walk" in line)
        assert line.startswith("while true; do ")
        assert line.endswith(" &")
        assert lines.index(line) > next(n for n, one in enumerate(lines) if one.startswith("touch"))
        assert part in cli.commands
    assert lines[-1] == "wait -n"
    assert (control["resources"]["cpus"], control["resources"]["memory"]) == ("4+", "9+")
    for text in ("trajectories.enabled=true", "telemetry.prometheus_port=9100"):
        assert f"--set={text}" in control["run"]
    for task in tasks.values():
        subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    settings, config = written("trajectories.enabled=false", "alarms.enabled=false")
    _, tasks = tasks_of(job_group(settings, config))
    assert "while" not in tasks["control"]["run"]
    assert tasks["control"]["resources"]["cpus"] == "2+"


def test_secrets_are_declared_and_not_written(written: Written) -> None:
    """A runner declares its key only, and forgets what the group's launch gave it besides."""
    settings, config = written()
    _, tasks = tasks_of(job_group(settings, config))
    for task in tasks.values():
        assert set(task["secrets"].values()) == {None}
    assert set(tasks["runner-0"]["secrets"]) == {"OUTLOOP_RUNNER_KEY"}
    trusted = {"OUTLOOP_KEYS", "OUTLOOP_REDIS_PASSWORD"}
    assert set(tasks["trainer"]["secrets"]) == set(tasks["server-0"]["secrets"]) == trusted
    lines = tasks["runner-0"]["run"].splitlines()
    (forgets,) = (line for line in lines if line.startswith("unset"))
    assert trusted <= set(forgets.split())
    assert lines.index(forgets) < next(
        n for n, line in enumerate(lines) if "outloop runner" in line
    )


def test_a_missing_kind_of_gpu_is_a_sentence(written: Written) -> None:
    """SkyPilot has to know it; nothing is guessed."""
    settings, config = written()
    changed = settings.model_copy(
        update={"deploy": settings.deploy.model_copy(update={"gpu_type": None})}
    )
    with pytest.raises(SettingsError, match="deploy.gpu_type is missing"):
        job_group(changed, config)
