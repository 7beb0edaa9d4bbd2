"""A run over a real Ray cluster of several nodes on this machine (make test-ray)."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fakes import user_folder
from fakes.cluster_run import cluster_settings, wait_until
from outloop.buffer.events import read_events
from outloop.engine.models.random_init import write_policy

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

SETTINGS = cluster_settings("ray", checkpoint_every=5)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that holds no part, and four nodes that hold one each: one of them is to spare."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(4):
        made.add_node(num_cpus=1, memory=4_000_000_000)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def write(folder: Path, changes: dict[str, dict[str, Any]]) -> None:
    """A user's folder whose parts need one CPU each."""
    write_policy(folder / "model-files", 0)
    user_folder.write(folder, folder / "model-files", changes)
    rows = [f"{part} = {{cpus = 1, memory_mb = 3000}}" for part in ("server", "trainer", "runner")]
    with (folder / "run.toml").open("a") as file:
        file.write("[deploy.parts]\n" + "\n".join(rows) + "\n")


def node_of(run_dir: Path, name: str) -> str:
    """The id of the node on which the part was started last; empty before."""
    path = run_dir / f"logs/{name}.log"
    text = path.read_text() if path.exists() else ""
    return (["", *re.findall(r"on node (\w+)", text)])[-1]


@pytest.mark.parametrize("victim", ["server-0", "trainer", "runner-0"])
def test_a_run_goes_on_elsewhere_when_a_node_is_lost(
    cluster: Any, tmp_path: Path, victim: str
) -> None:
    """Each step is made, and none is lost, whichever part's node goes."""
    write(tmp_path, SETTINGS)
    run_dir = tmp_path / "runs/ray"

    def made() -> list[int]:
        path = run_dir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [row["step"] for row in map(json.loads, lines) if "train/loss" in row]

    process = user_folder.start(tmp_path, "train", "run.toml", "--on", "ray")
    with ExitStack() as stack:
        stack.enter_context(process)
        stack.callback(process.terminate)
        wait_until("steps", lambda: len(made()) >= 6 or process.poll() is not None, timeout_s=120)
        assert process.poll() is None, process.communicate()[0]
        lost = node_of(run_dir, victim)
        places = {name: node_of(run_dir, name) for name in ("server-0", "trainer", "runner-0")}
        assert len(set(places.values())) == 3
        (node,) = [node for node in cluster.worker_nodes if node.node_id == lost]
        cluster.remove_node(node, allow_graceful=False)
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert sorted(set(made())) == list(range(1, 41))
    assert node_of(run_dir, victim) not in ("", lost)
    restarted = [event for event in read_events(run_dir) if event["kind"] == "part_restarted"]
    assert victim in {event["part"] for event in restarted}
    assert (run_dir / "hf/config.json").is_file()


def test_doctor_examines_every_node_of_the_placement_group(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the machine of the launcher; the resources are free afterwards, and nothing is made."""
    write(tmp_path, SETTINGS)
    monkeypatch.setenv("COLUMNS", "250")
    command = ("doctor", "--config", "run.toml", "--on", "ray")
    answer = user_folder.run(tmp_path, *command, timeout_s=200)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    nodes = dict(re.findall(r"^(\S+/\w{8}): (.+)$", answer.stdout, re.MULTILINE))
    assert sorted(nodes.values()) == ["control", "runner", "server", "trainer"]
    name_of = {part: re.escape(name) for name, part in nodes.items()}
    assert re.search(rf"redis server +│ {name_of['control']} ", answer.stdout)
    assert re.search(r"settings +│ all +│ model, tasks and code load", answer.stdout)
    rate = rf"from {name_of['trainer']}: [0-9.e-]+ GB/s to {name_of['server']}"
    assert re.search(rf"bandwidth +│ all +│ gloo, {rate}", answer.stdout)
    assert "this run can start on these 4 nodes" in answer.stdout
    assert not (tmp_path / "runs").exists()


def test_a_cluster_that_is_too_small_is_named(cluster: Any, tmp_path: Path) -> None:
    changes = SETTINGS | {
        "env": SETTINGS["env"] | {"num_runners": 7},
        "server": {"start_timeout_s": 3},
    }
    write(tmp_path, changes)
    answer = user_folder.run(tmp_path, "train", "run.toml", "--on", "ray", timeout_s=60)
    assert answer.returncode != 0
    assert "CPU: 9 wanted, 4 there" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_an_address_where_nothing_answers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    write(tmp_path, SETTINGS)
    answer = user_folder.run(tmp_path, "train", "run.toml", "--on", "ray", timeout_s=120)
    assert answer.returncode != 0
    assert "RAY_ADDRESS='127.0.0.1:1': no Ray cluster answers there" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_without_a_cluster_one_is_started_for_the_run(tmp_path: Path) -> None:
    write(tmp_path, SETTINGS | {"trainer": SETTINGS["trainer"] | {"num_steps": 3}})
    answer = user_folder.run(tmp_path, "train", "run.toml", "--on", "ray", timeout_s=180)
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "runs/ray/hf/config.json").is_file()
