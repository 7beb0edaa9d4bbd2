"""The network and the cores of a part; machines with several are folders written here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.machine_binding import bind, read_numa
from outloop.engine.visible_gpus import Gpu

TWO = ("eth0", "ib0")


def settings(**run: Any) -> Settings:
    """With these settings of [run]."""
    return Settings(model={"path": "m"}, run=run)


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """`machine({0: "0-1"}, {"0000:3b:00.0": 0})`: a /sys with these nodes and GPUs."""

    def make(nodes: dict[int, str], gpus: dict[str, int]) -> Path:
        for node, cores in nodes.items():
            folder = tmp_path / f"devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{cores}\n")
        for address, node in gpus.items():
            folder = tmp_path / "bus/pci/devices" / address
            folder.mkdir(parents=True)
            (folder / "numa_node").write_text(f"{node}\n")
        return tmp_path

    return make


def gpus_at(*addresses: str) -> tuple[Gpu, ...]:
    """GPUs at these addresses."""
    return tuple(Gpu(id=f"GPU-{index}", pci=pci) for index, pci in enumerate(addresses))


def test_one_setting_names_the_network_to_both_libraries() -> None:
    """And a name that this machine's environment has stays."""
    environment = {"GLOO_SOCKET_IFNAME": "bond0"}
    bind(settings(network_interface="ib0"), tuple, environment=environment, interfaces=lambda: TWO)
    assert environment == {"GLOO_SOCKET_IFNAME": "bond0", "NCCL_SOCKET_IFNAME": "ib0"}
    environment = {}
    bind(settings(), tuple, environment=environment, interfaces=lambda: TWO)
    assert environment == {}


def test_an_interface_that_is_not_here_is_refused_by_name() -> None:
    """NCCL would say that it found none, after the processes had waited for each other."""
    with pytest.raises(SettingsError, match=r"'eth7' is not on this machine, which has eth0, ib0"):
        bind(settings(network_interface="eth7"), tuple, environment={}, interfaces=lambda: TWO)
    with pytest.raises(ValueError, match="network_interface"):
        settings(network_interface="eth0,eth1")


def test_cores_are_those_of_the_nodes_of_a_parts_gpus(machine: Callable[..., Path]) -> None:
    """Of one node, of both, and of none where the firmware does not tell a GPU's."""
    first, second, lost = gpus_at("0000:3b:00.0", "0000:d8:00.0", "0000:17:00.0")
    sysfs = machine(
        {0: "0-3,8-11", 1: "4-7,12", 2: ""}, {first.pci: 0, second.pci: 1, lost.pci: -1}
    )
    numa = read_numa([first, second, lost], sysfs)
    assert numa.cores_beside([first]) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert numa.cores_beside([second]) == {4, 5, 6, 7, 12}
    assert len(numa.cores_beside([first, second])) == 13
    assert numa.cores_beside([first, lost]) == frozenset()
    assert numa.cores_beside([]) == frozenset()
    assert numa.sentence() == "node 0: 8 cores, 1 GPUs; node 1: 5 cores, 1 GPUs"


@pytest.mark.parametrize("nodes", [{}, {0: "0-1"}])
def test_without_several_nodes_there_is_nothing_to_bind(
    machine: Callable[..., Path], nodes: dict[int, str]
) -> None:
    """And that is what `outloop doctor` says."""
    (gpu,) = gpus_at("0000:3b:00.0")
    sysfs = machine(nodes, {gpu.pci: 0})
    assert read_numa([gpu], sysfs).sentence() == "one node: nothing to bind"
    before = os.sched_getaffinity(0)
    bind(settings(binds_numa=True), lambda: [gpu], environment={}, sysfs=sysfs)
    assert os.sched_getaffinity(0) == before


BOUND = """
import json, os, sys
from pathlib import Path
from outloop.buffer.settings import Settings
from outloop.engine.machine_binding import bind
from outloop.engine.visible_gpus import Gpu
sysfs, binds, local_rank = Path(sys.argv[1]), sys.argv[2] == "yes", sys.argv[3]
gpus = (Gpu(id="a", pci="0000:3b:00.0"), Gpu(id="b", pci="0000:d8:00.0"))
environment = {"LOCAL_RANK": local_rank} if local_rank else {}
settings = Settings(model={"path": "m"}, run={"binds_numa": binds})
bind(settings, lambda: gpus, environment=environment, sysfs=sysfs)
print(json.dumps(sorted(os.sched_getaffinity(0))))
"""


@pytest.mark.parametrize(
    ("binds", "local_rank", "kept"),
    [("yes", "0", "first"), ("yes", "1", "rest"), ("yes", "", "all"), ("no", "0", "all")],
)
def test_a_process_stays_on_the_cores_beside_its_gpus(
    machine: Callable[..., Path], binds: str, local_rank: str, kept: str
) -> None:
    """A rank beside its own, a server beside all of its own, and without the setting nobody."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core")
    first, rest = cores[:1], cores[1:]
    nodes = {0: str(first[0]), 1: ",".join(map(str, rest))}
    sysfs = machine(nodes, {"0000:3b:00.0": 0, "0000:d8:00.0": 1})
    command = [sys.executable, "-c", BOUND, str(sysfs), binds, local_rank]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found == {"first": first, "rest": rest, "all": cores}[kept]
