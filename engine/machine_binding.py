"""The network and the cores of this machine that a part uses, however it was started.

For `outloop server` and every trainer rank, before it makes a process group or starts a thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.visible_gpus import Gpu, list_gpus

NETWORK = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Read by NCCL and gloo when a group is made."""
SYSFS = Path("/sys")
_UNKNOWN = -1
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Numa:
    """The machine's nodes, and where its GPUs are."""

    cores: Mapping[int, frozenset[int]]
    """Of each node."""
    node_of: Mapping[str, int]
    """By a GPU's PCI address; only those whose node the machine tells."""

    def cores_beside(self, gpus: Iterable[Gpu]) -> frozenset[int]:
        """Of all nodes that these GPUs are at; none where a GPU's is not known."""
        nodes = [self.node_of.get(gpu.pci, _UNKNOWN) for gpu in gpus]
        if not nodes or _UNKNOWN in nodes:
            return frozenset()
        return frozenset().union(*(self.cores[node] for node in nodes))

    def sentence(self) -> str:
        """For a person: how many nodes, and the GPUs of each."""
        if len(self.cores) < 2:
            return "one node: nothing to bind"
        placed = [
            f"node {node}: {len(cores)} cores, {list(self.node_of.values()).count(node)} GPUs"
            for node, cores in sorted(self.cores.items())
        ]
        return "; ".join(placed)


def read_numa(gpus: Sequence[Gpu], sysfs: Path = SYSFS) -> Numa:
    """What the kernel says; no nodes where it has no NUMA, or tells nothing."""
    cores: dict[int, frozenset[int]] = {}
    for folder in sorted((sysfs / "devices/system/node").glob("node[0-9]*")):
        found = _cores_of((folder / "cpulist").read_text())
        # Memory without cores is a node too.
        if found:
            cores[int(folder.name.removeprefix("node"))] = found
    node_of: dict[str, int] = {}
    for gpu in gpus:
        path = sysfs / "bus/pci/devices" / gpu.pci / "numa_node"
        node = int(path.read_text()) if gpu.pci and path.is_file() else _UNKNOWN
        # The kernel says -1 where the firmware does not tell, as in many virtual machines.
        if node in cores:
            node_of[gpu.pci] = node
    return Numa(cores=cores, node_of=node_of)


def bind(
    settings: Settings,
    gpus: Callable[[], Sequence[Gpu]] = list_gpus,
    *,
    environment: MutableMapping[str, str] = os.environ,
    interfaces: Callable[[], Collection[str]] | None = None,
    sysfs: Path = SYSFS,
) -> None:
    """Name the network to NCCL and gloo, and stay on the cores beside this part's GPUs.

    `run.network_interface` is what both are told; a name that the environment has already stays, so
    that a machine can have another. With `run.binds_numa` the process and what it starts run on the
    cores of its GPUs' nodes; memory then comes from there, as the kernel takes it beside who first
    writes it. A part without GPUs is not bound, nor where nodes are not known.

    Args:
        gpus: of this process, in its order.
        interfaces: of this machine; None: what the kernel says.

    Raises:
        SettingsError: there is no such interface here.
    """
    name = settings.run.network_interface
    if name is not None:
        missing = [variable for variable in NETWORK if variable not in environment]
        here = {each for _, each in socket.if_nameindex()} if interfaces is None else interfaces()
        if missing and name not in here:
            raise SettingsError(
                f"run.network_interface={name!r} is not on this machine, which has "
                f"{', '.join(sorted(here))}; where it has another name, set "
                f"{' and '.join(missing)} in this part's environment"
            )
        environment.update(dict.fromkeys(missing, name))
    if not settings.run.binds_numa:
        return
    own = _own_gpus(gpus(), environment)
    numa = read_numa(own, sysfs)
    allowed = os.sched_getaffinity(0)
    cores = numa.cores_beside(own) & allowed
    if len(numa.cores) < 2 or not cores:
        _log.info("numa_not_bound", nodes=len(numa.cores), gpus=len(own))
        return
    os.sched_setaffinity(0, cores)
    _log.info("numa_bound", cores=len(cores), of=len(allowed), gpus=[gpu.id for gpu in own])


def _own_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Sequence[Gpu]:
    """Of a rank of torchrun's the one at its number, else all that this process sees."""
    if "LOCAL_RANK" not in environment:
        return gpus
    number = int(environment["LOCAL_RANK"])
    return gpus[number : number + 1]


def _cores_of(cpulist: str) -> frozenset[int]:
    """The kernel's lists: "0-3,8,10-11"."""
    cores: set[int] = set()
    for piece in cpulist.strip().split(","):
        if piece:
            first, _, last = piece.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
