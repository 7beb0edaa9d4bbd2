"""What the parts of a run ask of a Ray cluster, without one."""

import pytest

from outloop.buffer.errors import SettingsError
from outloop.engine.launch.deploy.ray_nodes import RayNodes
from outloop.engine.launch.deploy.ray_placement import (
    RayPlacement,
    RayReservation,
    bundles_of,
    placed_by_ray,
)

from .conftest import Written


def placement(written: Written) -> RayPlacement:
    """That of the cluster's settings."""
    settings, _ = written()
    return RayPlacement(settings, address="10.0.0.1:6379", group="walk-1", host="10.0.0.1")


def options_of(command: list[str]) -> list[str]:
    """What comes before the part's own command."""
    return command[: command.index("--")]


def test_every_process_has_a_bundle_and_a_machine_of_the_trainer_has_one(written: Written) -> None:
    settings, _ = written()
    parts = [bundle.part for bundle in bundles_of(settings)]
    assert parts == ["server"] * 2 + ["trainer"] * 2 + ["runner"] * 3


def test_a_bundle_asks_for_cpus_memory_and_gpus_of_the_kind(written: Written) -> None:
    settings, _ = written()
    server, _, trainer, *_ = bundles_of(settings)
    assert server.resources["CPU"] == 6
    assert server.resources["memory"] == 60000 * 1_000_000
    assert server.resources["GPU"] == 2
    assert trainer.resources["GPU"] == 4
    assert 0 < server.resources["accelerator_type:H100"] < 1


def test_each_process_is_started_in_its_own_bundle(written: Written) -> None:
    place = placement(written)
    server = place.command("server-1", "server", ["python", "x"])
    runner = place.command("runner-2", "runner", ["python", "x"])
    assert options_of(server)[-3:] == ["--bundles", "1", "--advertise"]
    assert options_of(runner)[-2:] == ["--bundles", "6"]
    assert server[server.index("--") + 1 :] == ["python", "x"]


def test_ranks_on_several_machines_are_started_by_torchrun_on_each(written: Written) -> None:
    options = options_of(placement(written).command("trainer", "trainer", ["python", "x"]))
    assert options[-4:] == ["--bundles", "2,3", "--ranks-per-node", "4"]


def test_router_and_archiver_stay_beside_the_launcher(written: Written) -> None:
    place = placement(written)
    router = place.command("router-0", "router", ["python", "x"])
    assert router == ["python", "x", "--advertise", "10.0.0.1"]
    assert place.command("archiver", "archiver", ["python", "x"]) == ["python", "x"]


def test_without_the_package_the_sentence_says_what_to_install(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = written()
    with (
        pytest.raises(SettingsError, match=r"pip install 'outloop\[ray\]'"),
        placed_by_ray(settings, is_installed=lambda: False),
    ):
        pass


def test_nodes_are_those_of_the_bundles_and_this_machine(written: Written) -> None:
    """Each once, with the GPUs of the trainer's bundle where it has one; named by its address."""
    settings, _ = written()
    held = RayReservation(address="10.0.0.1:6379", group=None, group_name="walk-1", host="10.0.0.1")
    placed = RayNodes(
        held,
        bundles_of(settings),
        {0: "b" * 56, 1: "c" * 56, 2: "b" * 56, 3: "d" * 56, 4: "d" * 56, 5: "d" * 56, 6: "d" * 56},
        {"a" * 56: "10.0.0.1", "b" * 56: "10.0.0.2", "c" * 56: "10.0.0.3", "d" * 56: "10.0.0.3"},
        "a" * 56,
    )
    assert {node.name: node.parts for node in placed.nodes} == {
        "10.0.0.1": ("control",),
        "10.0.0.2": ("trainer", "server"),
        "10.0.0.3/dddddddd": ("trainer", "runner"),
        "10.0.0.3/cccccccc": ("server",),
    }
    here, there, *_ = placed.nodes
    assert placed.command(here, ["python", "x"]) == ["python", "x"]
    assert placed.command(here, ["x"], advertises=True) == ["x", "--advertise", "10.0.0.1"]
    command = placed.command(there, ["python", "x"], advertises=True)
    assert options_of(command)[-3:] == ["--bundles", "2", "--advertise"]
    assert command[command.index("--") + 1 :] == ["python", "x"]
