"""What the parts of a run ask of a Ray cluster, without one."""

import pytest

from outloop.buffer.errors import SettingsError
from outloop.engine.launch.deploy.ray_placement import RayPlacement, bundles_of, placed_by_ray

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
