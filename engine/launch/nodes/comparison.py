"""What nodes found, as one table; and findings that exist only between them. Asks nobody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outloop.engine.launch.deploy.run_nodes import RunNode
from outloop.engine.launch.finding import Finding, bad, good
from outloop.engine.launch.nodes.answers import FolderIdentity, LinkReport, NodeReport
from outloop.engine.launch.run_readiness import MAX_CLOCK_SKEW_S

_MAX_VALUES = 4
"""Of a row that is well everywhere: what else nodes have is counted."""
_OF_ONE_MACHINE = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)
"""File systems that two machines cannot have mounted at once."""
_GB = 1e9
_MB = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A finding, and the nodes that have it."""

    finding: Finding
    nodes: tuple[str, ...]


def merge(found: Mapping[str, Sequence[Finding]]) -> list[Row]:
    """The findings of nodes, each once.

    What is not well has a row for each sentence, with every node that says so. What is well has one
    row, in which values that differ are told with their nodes. Rows are in the order in which nodes
    have them.

    Args:
        found: by the name of a node.
    """
    bad_rows: dict[Finding, list[str]] = {}
    # A node may have several good findings of one name: the first is compared with the first.
    good_rows: dict[tuple[str, int], dict[str, list[str]]] = {}
    samples: dict[tuple[str, int], Finding] = {}
    order: dict[Finding | tuple[str, int], None] = {}
    for node, findings in found.items():
        seen: dict[str, int] = {}
        for finding in findings:
            if not finding.is_ok:
                nodes = bad_rows.setdefault(finding, [])
                if node not in nodes:
                    nodes.append(node)
                order[finding] = None
                continue
            number = seen[finding.what] = seen.get(finding.what, -1) + 1
            key = (finding.what, number)
            good_rows.setdefault(key, {}).setdefault(finding.found, []).append(node)
            samples.setdefault(key, finding)
            order[key] = None
    rows = []
    for one in order:
        if isinstance(one, Finding):
            rows.append(Row(finding=one, nodes=tuple(bad_rows[one])))
        else:
            values = good_rows[one]
            rows.append(
                Row(
                    finding=replace(samples[one], found=_told(values)),
                    nodes=tuple(node for nodes in values.values() for node in nodes),
                )
            )
    return rows


def _told(values: Mapping[str, Sequence[str]]) -> str:
    """Values with their nodes; one that all have stands alone."""
    if len(values) == 1:
        return next(iter(values))
    shown = [f"{value} ({', '.join(nodes)})" for value, nodes in list(values.items())[:_MAX_VALUES]]
    if len(values) > _MAX_VALUES:
        shown.append(f"and {len(values) - _MAX_VALUES} other values")
    return "; ".join(shown)


def compare_nodes(
    nodes: Sequence[RunNode], reports: Mapping[str, NodeReport], servers_nccl: str
) -> list[Finding]:
    """What must be alike on nodes: releases, the run's folder, the model.

    Args:
        nodes: all of the run.
        reports: by the name of a node; those without one are not compared.
        servers_nccl: which of the releases is the servers' NCCL, which must be the trainer's.
    """
    told = [node for node in nodes if node.name in reports]
    return [
        *_compare_releases(told, reports),
        *_compare_nccl(told, reports, servers_nccl),
        _compare_run_folder({node.name: reports[node.name] for node in told}),
        _compare_model({node.name: reports[node.name].model for node in told}),
    ]


def _compare_releases(
    nodes: Sequence[RunNode], reports: Mapping[str, NodeReport]
) -> Iterable[Finding]:
    names = dict.fromkeys(name for node in nodes for name in reports[node.name].releases)
    alike = []
    for name in names:
        values = _by_value(
            {node.name: reports[node.name].releases.get(name) or "none" for node in nodes}
        )
        if len(values) == 1:
            if "none" not in values:
                alike.append(f"{name} {next(iter(values))}")
            continue
        trainers = {
            reports[node.name].releases.get(name) for node in nodes if "trainer" in node.parts
        }
        yield bad(
            f"{name} on all nodes",
            _plain(values),
            "give all nodes the same environment, by a shared folder or one image",
            # Runners and routers may have another Python or torch; ranks of one group may not.
            is_required=name == "outloop" or len(trainers) > 1,
        )
    if alike:
        yield good("same on all nodes", ", ".join(alike))


def _compare_nccl(
    nodes: Sequence[RunNode], reports: Mapping[str, NodeReport], servers_nccl: str
) -> Iterable[Finding]:
    """Servers join the trainer's group, though each has an environment of its own."""
    trainers = {
        n.name: reports[n.name].releases.get("NCCL", "") for n in nodes if "trainer" in n.parts
    }
    servers = {
        n.name: reports[n.name].releases.get(servers_nccl, "") for n in nodes if "server" in n.parts
    }
    known = {release for release in (*trainers.values(), *servers.values()) if release}
    if any(servers.values()) and len(known) > 1:
        yield bad(
            "NCCL of trainer and servers",
            f"trainer: {_plain(_by_value(trainers))}; servers: {_plain(_by_value(servers))}",
            "two releases of NCCL refuse each other: install the same nvidia-nccl package in both "
            "environments",
        )


def _compare_run_folder(reports: Mapping[str, NodeReport]) -> Finding:
    what = "run folder on all nodes"
    seen: dict[str, list[str]] = {}
    for name, report in reports.items():
        seen.setdefault(_place_of(report.run_folder, report.machine), []).append(name)
    if len(seen) == 1:
        folder = next(iter(reports.values())).run_folder
        return good(what, f"the same folder: {folder.path} ({folder.filesystem or 'unknown kind'})")
    return bad(
        what,
        _plain(seen),
        "run.dir must be in a file system that all nodes share",
    )


def _place_of(folder: FolderIdentity, machine: str) -> str:
    """Equal for nodes that can see one folder, as far as it can be told without writing into it."""
    place = f"{folder.path} ({folder.filesystem or 'unknown kind'}, inode {folder.inode})"
    if folder.filesystem in _OF_ONE_MACHINE:
        return f"{place} of machine {machine[:8]}"
    return place


def _compare_model(models: Mapping[str, str]) -> Finding:
    what = "model on all nodes"
    values = _by_value({name: model or "not there" for name, model in models.items()})
    if len(values) == 1 and "not there" not in values:
        return good(what, "the same files, by names, sizes and short files' contents")
    return bad(what, _plain(values), "model.path must hold the same files on all nodes")


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return found


def _plain(values: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value or 'none'} ({', '.join(nodes)})" for value, nodes in values.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfers:
    """What a run sends between nodes, and how long it waits for it."""

    weights_bytes: float
    gradients_bytes: float
    """Of all parameters in float32, which data-parallel ranks add up in each step."""
    trainer_nodes: int
    bucket_bytes: float | None
    """Of weights that are broadcast from the trainer; None: they go another way."""
    bucket_timeout_s: float
    rank_timeout_s: float


def compare_links(report: LinkReport, names: Sequence[str], transfers: Transfers) -> list[Finding]:
    """What rank 0 measured, for a person.

    The only bounds are deadlines of the settings: no other speed is wrong by itself.

    Args:
        names: of the nodes, by rank.
    """
    return [*_compare_clocks(report, names), *_compare_rates(report, names, transfers)]


def _compare_clocks(report: LinkReport, names: Sequence[str]) -> Iterable[Finding]:
    if not report.clocks:
        return
    what = "clocks of the nodes"
    # Beyond what the exchange itself can hide.
    far = [
        clock
        for clock in report.clocks
        if abs(clock.ahead_s) - clock.round_trip_s / 2 > MAX_CLOCK_SKEW_S
    ]
    if far:
        told = ", ".join(f"{names[clock.rank]} {clock.ahead_s:+.1f} s" for clock in far)
        yield bad(
            what,
            f"{told}, against {names[0]}",
            "deadlines and times in the logs disagree between machines; run NTP",
            is_required=False,
        )
        return
    farthest = max(report.clocks, key=lambda clock: abs(clock.ahead_s))
    yield good(
        what,
        f"within {abs(farthest.ahead_s) * 1e3:.1f} ms of {names[0]}, as far as round trips of "
        f"{max(clock.round_trip_s for clock in report.clocks) * 1e3:.1f} ms at most tell",
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _GB:.3g} GB/s"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GB:.3g} GB" if num_bytes >= _GB else f"{num_bytes / _MB:.3g} MB"


def _compare_rates(
    report: LinkReport, names: Sequence[str], transfers: Transfers
) -> Iterable[Finding]:
    if not report.sends:
        yield good("bandwidth", "one node has trainer and servers: nothing between nodes")
        return
    slow = min(report.sends, key=lambda one: one.bytes_per_s)
    fast = max(report.sends, key=lambda one: one.bytes_per_s)
    weights_s = transfers.weights_bytes / slow.bytes_per_s
    told = f"{report.backend}, from {names[0]}: {_rate(slow.bytes_per_s)} to {names[slow.rank]}"
    if slow is not fast:
        told += f" (slowest), {_rate(fast.bytes_per_s)} to {names[fast.rank]} (fastest)"
    told += f"; the weights, {_size(transfers.weights_bytes)}, in {weights_s:.2g} s"
    needed = (transfers.bucket_bytes or 0.0) / transfers.bucket_timeout_s
    if slow.bytes_per_s < needed:
        yield bad(
            "bandwidth",
            told,
            f"below {_rate(needed)} a bucket of publish.bucket_mb takes longer than half of "
            "publish.phase_timeout_s, and the server is quarantined; see whether "
            "run.network_interface is the fast one, or lower the first or raise the second",
            is_required=False,
        )
    else:
        yield good("bandwidth", told)
    gradients_s = (
        transfers.gradients_bytes
        / report.reduce_bytes_per_s
        * 2
        * (1 - 1 / transfers.trainer_nodes)
    )
    told = f"{report.backend}, {_rate(report.reduce_bytes_per_s)} over each node's link"
    if transfers.trainer_nodes > 1:
        size = _size(transfers.gradients_bytes)
        told += f"; gradients in float32, {size}, in {gradients_s:.2g} s"
    if gradients_s > transfers.rank_timeout_s:
        yield bad(
            "all-reduce",
            told,
            "ranks that wait for each other so long end the run; see whether "
            "run.network_interface is the fast one, or raise trainer.rank_timeout_s",
            is_required=False,
        )
    else:
        yield good("all-reduce", told)
