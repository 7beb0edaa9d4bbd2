"""`outloop manifests --plan`: what the files ask for is what the plan says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.cli import cli
from outloop.engine.launch.plan.inputs import load_plan
from outloop.engine.launch.plan.report import sizes

Written = Callable[..., tuple[Settings, Path]]
PLAN = """
num_steps = 4
[loop]
group_size = 8
groups_per_step = 32
[episodes]
seconds = 2.0
tokens = 1000.0
[servers]
count = 3
gpus = 2
tokens_per_s_alone = 100.0
tokens_per_s = 2000.0
max_running = 64
[trainer]
gpus = 4
update_s = 20.0
publish_s = 1.0
[layout]
tensor = 2
[prices]
on_demand = 3.0
spot = 1.0
[cluster]
gpus = [12]
"""


@pytest.fixture
def manifests(written: Written, tmp_path: Path) -> Callable[..., Result]:
    """The command over the cluster's settings and the plan."""
    _, config = written()
    (tmp_path / "plan.toml").write_text(PLAN)

    def run(engine: str, *words: str) -> Result:
        given = ["manifests", engine, str(config), "--plan", str(tmp_path / "plan.toml"), *words]
        return CliRunner().invoke(cli, given, catch_exceptions=False)

    return run


def objects_in(folder: Path) -> dict[tuple[str, str], Any]:
    """By kind and name."""
    items = [
        item for path in folder.glob("*.yaml") for item in yaml.safe_load_all(path.read_text())
    ]
    return {(i["kind"], i["metadata"]["name"]): i for i in items if "metadata" in i}


def spot_tasks(text: str) -> dict[str, Any]:
    """The tasks of a job group, by name."""
    return {task["name"]: task for task in list(yaml.safe_load_all(text))[1:]}


def test_kubernetes_has_the_plan_s_numbers(
    manifests: Callable[..., Result], tmp_path: Path
) -> None:
    """Servers, their GPUs, ranks over two machines, and runners with a place for every episode that
    may be in flight: two batches of 256, 64 to a runner."""
    answer = manifests("k8s", "--out", str(tmp_path / "out"))
    assert "3 servers of 2 GPUs, on spot machines, 4 trainer ranks, 8 runners" in answer.stderr
    found = objects_in(tmp_path / "out")
    server = found["StatefulSet", "walk-server"]["spec"]
    (container,) = server["template"]["spec"]["containers"]
    assert server["replicas"] == 3
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == 2
    job = found["JobSet", "walk"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    (trainer,) = job["template"]["spec"]["containers"]
    assert job["parallelism"] * int(trainer["resources"]["limits"]["nvidia.com/gpu"]) == 4
    assert found["HorizontalPodAutoscaler", "walk-runner"]["spec"]["minReplicas"] == 8


def test_skypilot_has_the_best_split_of_a_number_of_gpus(
    manifests: Callable[..., Result], tmp_path: Path
) -> None:
    """That of the plan's own table; a person's --set stands above it."""
    (size,) = sizes(load_plan(tmp_path / "plan.toml"))
    answer = manifests("sky", "--gpus", "12", "--set", "env.num_runners=2")
    tasks = spot_tasks(answer.stdout)
    servers = [task for name, task in tasks.items() if name.startswith("server")]
    assert len(servers) * 2 == size.split.server_gpus
    assert {task["resources"]["accelerators"] for task in servers} == {"H100:2"}
    assert all(task["resources"]["use_spot"] for task in servers)
    trainer = tasks["trainer"]
    gpus = int(trainer["resources"]["accelerators"].partition(":")[2])
    assert trainer["num_nodes"] * gpus == size.split.trainer_gpus
    assert sum(name.startswith("runner") for name in tasks) == 2


def test_servers_leave_spot_machines_where_these_cost_more(
    manifests: Callable[..., Result], tmp_path: Path
) -> None:
    """By the steps that are lost with them; runners stay where they were set to be."""
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace("spot = 1.0", "spot = 2.9\nspot_hours_between = 0.1"))
    tasks = spot_tasks(manifests("sky").stdout)
    assert not tasks["server-0"]["resources"]["use_spot"]
    assert tasks["runner-0"]["resources"]["use_spot"]


@pytest.mark.parametrize(
    ("change", "words", "sentence"),
    [
        (("group_size = 8", "group_size = 4"), (), "loop.group_size=4, the settings have buffer"),
        (("", ""), ("--set", "trainer.groups_per_step=5"), "trainer.groups_per_step=5: it is of"),
        (("", ""), ("--gpus", "3"), "at least 4 are needed"),
        (("gpus = 4", "gpus = 5"), (), "choose a multiple"),
    ],
)
def test_a_plan_that_does_not_fit_is_a_sentence(
    change: tuple[str, str],
    words: tuple[str, ...],
    sentence: str,
    manifests: Callable[..., Result],
    tmp_path: Path,
) -> None:
    """Of another run, or for too few GPUs."""
    (tmp_path / "plan.toml").write_text(PLAN.replace(*change) if change[0] else PLAN)
    with pytest.raises(SettingsError, match=sentence):
        manifests("sky", *words)


def test_gpus_without_a_plan_are_refused(written: Written) -> None:
    """Nothing says how to split them."""
    _, config = written()
    with pytest.raises(SettingsError, match="--gpus=8 without --plan"):
        CliRunner().invoke(
            cli, ["manifests", "sky", str(config), "--gpus", "8"], catch_exceptions=False
        )
