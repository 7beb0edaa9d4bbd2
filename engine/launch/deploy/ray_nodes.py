"""The nodes of a Ray cluster that a run would use: those of its placement group, and this machine.

Nothing of the run is started. The resources of all its parts are held meanwhile, so that the nodes
are those that the run would be given now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from outloop.buffer.settings import Settings
from outloop.engine.launch.deploy.ray_placement import (
    Bundle,
    RayReservation,
    bundle_command,
    bundles_of,
    reserved_on_ray,
)
from outloop.engine.launch.deploy.run_nodes import CONTROL, RunNode

_MOST_GPUS_FIRST = ("trainer", "server", "runner")


class RayNodes:
    """Where the bundles of a reservation are, and this machine, which has the routers."""

    def __init__(
        self,
        held: RayReservation,
        bundles: Sequence[Bundle],
        node_of_bundle: Mapping[int, str],
        addresses: Mapping[str, str],
        this_node: str,
    ) -> None:
        """
        Args:
            node_of_bundle: the number of a bundle -> the id of its node.
            addresses: the id of a node -> its address, of all that are alive.
            this_node: the id of this machine's.
        """
        self._held = held
        numbers: dict[str, list[int]] = {this_node: []}
        for number in sorted(
            node_of_bundle, key=lambda number: _MOST_GPUS_FIRST.index(bundles[number].part)
        ):
            numbers.setdefault(node_of_bundle[number], []).append(number)
        alike = Counter(addresses.get(node, node) for node in numbers)
        self._bundles: dict[str, list[int]] = {}
        found = []
        for node, held_there in numbers.items():
            address = addresses.get(node, node)
            name = address if alike[address] == 1 else f"{address}/{node[:8]}"
            parts = [CONTROL] if node == this_node else []
            parts += dict.fromkeys(bundles[number].part for number in held_there)
            self._bundles[name] = held_there
            found.append(RunNode(name=name, parts=tuple(parts)))
        self._nodes = tuple(found)

    @property
    def nodes(self) -> tuple[RunNode, ...]:
        """This machine first."""
        return self._nodes

    def command(
        self, node: RunNode, program: Sequence[str], *, advertises: bool = False
    ) -> list[str]:
        """As RunNodes says; this machine without a bundle runs the program itself."""
        numbers = self._bundles[node.name]
        if not numbers:
            more = ["--advertise", self._held.host] if advertises else []
            return [*program, *more]
        held = self._held
        place = bundle_command(held.address, held.group_name, f"doctor-{node.name}", numbers[:1])
        return [*place, *(["--advertise"] if advertises else []), "--", *program]


@contextmanager
def nodes_of_ray(settings: Settings) -> Iterator[RayNodes]:
    """Hold the nodes that a run of these settings would use now.

    Raises:
        SettingsError: Ray is not installed, or no cluster answers.
        DeadlineExceeded: the cluster had no room within server.start_timeout_s.
    """
    with reserved_on_ray(settings) as held:
        import ray

        table: Any = ray.util.placement_group_table(held.group)
        yield RayNodes(
            held,
            bundles_of(settings),
            table["bundles_to_node_id"],
            {row["NodeID"]: row["NodeManagerAddress"] for row in ray.nodes() if row["Alive"]},
            ray.get_runtime_context().get_node_id(),
        )
