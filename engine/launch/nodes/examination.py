"""`outloop doctor --on`: examines every node that a run would use, through its engine.

It changes nothing on the nodes and ends by itself: programs that do not answer are stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console

from outloop.buffer.rich_terminal import PlainTable, show, show_table
from outloop.buffer.settings import Settings
from outloop.engine.launch.deploy.parts import (
    apart,
    gpus_of_server,
    gpus_of_trainer_node,
    with_given,
)
from outloop.engine.launch.deploy.run_nodes import RunNode, RunNodes
from outloop.engine.launch.finding import Finding, bad
from outloop.engine.launch.nodes.answers import LinkReport, Meeting, Missing, NodeReport
from outloop.engine.launch.nodes.comparison import (
    Row,
    Transfers,
    compare_links,
    compare_nodes,
    merge,
)
from outloop.engine.launch.nodes.node_programs import NodePrograms
from outloop.engine.launch.nodes.node_report import SERVERS_NCCL
from outloop.engine.launch.run_readiness import size_of_model

REPORT_TIMEOUT_S = 180.0
"""For a node to start Python, import torch and load the model's configuration, tasks and code."""
LINK_TIMEOUT_S = 120.0
_MEET_TIMEOUT_S = 40.0
_NODE = "node"
Engine = Literal["ray", "slurm"]


def examine_run_nodes(
    settings: Settings, config: Path, engine: Engine, console: Console | None = None
) -> int:
    """Print what every node of the run has, and return 0 if nothing required is missing, else 1.

    With Slurm outside of a job, it asks for an allocation of the run's shape and examines that.

    Args:
        config: the settings file, which is on the nodes too.

    Raises:
        SettingsError: the engine is not here, or refuses what the settings ask of it.
        DeadlineExceeded: it had no room within server.start_timeout_s.
    """
    out = console or Console()
    if engine == "slurm":
        from outloop.engine.launch.deploy.slurm_nodes import is_in_job, run_in_allocation

        if not is_in_job():
            program = (sys.executable, "-P", "-m", "outloop.cli", "doctor", "--config", str(config))
            return run_in_allocation(
                settings,
                [*program, "--on", engine],
                queue_timeout_s=settings.server.start_timeout_s,
                timeout_s=2 * (REPORT_TIMEOUT_S + LINK_TIMEOUT_S),
            )
    with _held(settings, engine) as placed:
        given = apart(settings, redis_url=None, trainer_host=placed.nodes[0].name)
        rows = examine_nodes(with_given(settings, given, engine=engine), placed)
    return show_rows(rows, placed.nodes, out)


@contextmanager
def _held(settings: Settings, engine: Engine) -> Iterator[RunNodes]:
    """The nodes that the run would use, while they are examined."""
    if engine == "slurm":
        from outloop.engine.launch.deploy.slurm_nodes import SlurmNodes

        yield SlurmNodes(settings)
        return
    from outloop.engine.launch.deploy.ray_nodes import nodes_of_ray

    with nodes_of_ray(settings) as placed:
        yield placed


def examine_nodes(
    settings: Settings,
    placed: RunNodes,
    *,
    report_timeout_s: float = REPORT_TIMEOUT_S,
    link_timeout_s: float = LINK_TIMEOUT_S,
) -> list[Row]:
    """What each node says of itself, and what is between those that answered."""
    reports, silent = _ask_for_reports(settings, placed, report_timeout_s)
    found: dict[str, list[Finding]] = {
        node.name: [*silent.get(node.name, ())] for node in placed.nodes
    }
    for name, report in reports.items():
        found[name] += report.findings
    between = compare_nodes(placed.nodes, reports, SERVERS_NCCL) if reports else []
    able = [
        node
        for node in placed.nodes
        if node.name in reports and reports[node.name].releases.get("torch")
    ]
    if len(able) > 1:
        between += measure_links(settings, placed, able, link_timeout_s)
    all_names = tuple(node.name for node in placed.nodes)
    return [*merge(found), *(Row(finding=finding, nodes=all_names) for finding in between)]


def _ask_for_reports(
    settings: Settings, placed: RunNodes, timeout_s: float
) -> tuple[dict[str, NodeReport], dict[str, list[Finding]]]:
    """What nodes answered, and findings of those that did not."""
    names = [node.name for node in placed.nodes]
    module = "outloop.engine.launch.nodes.node_report"
    with NodePrograms() as programs:
        deadline = time.monotonic() + timeout_s
        for node in placed.nodes:
            program = [sys.executable, "-P", "-m", module, "--parts", ",".join(node.parts)]
            program.append(settings.model_dump_json())
            programs.start(node.name, placed.command(node, program))
        answers = programs.wait_for(names, deadline)
        reports = {name: one for name, one in answers.items() if isinstance(one, NodeReport)}
        silent = {
            name: [_silent(programs.silence(name, timeout_s))]
            for name in names
            if name not in reports
        }
    return reports, silent


def _silent(why: str) -> Finding:
    return bad(
        _NODE,
        why,
        f"see whether it is up and has {sys.executable} with this release of outloop",
    )


def measure_links(
    settings: Settings, placed: RunNodes, able: Sequence[RunNode], timeout_s: float
) -> list[Finding]:
    """What is between nodes: clocks, and bandwidth among those of trainer and servers.

    Args:
        able: the nodes that have torch, at least two.
    """
    sending = [node for part in ("trainer", "server") for node in able if part in node.parts]
    sending = list(dict.fromkeys(sending))
    nodes = [*sending, *(node for node in able if node not in sending)]
    names = [node.name for node in nodes]
    words = [
        *(sys.executable, "-P", "-m", "outloop.engine.launch.nodes.link_measurement"),
        *("--num-ranks", str(len(nodes)), "--num-measured", str(len(sending))),
        *("--backend", _backend(settings, sending)),
        *("--timeout-s", str(min(_MEET_TIMEOUT_S, timeout_s / 2))),
    ]
    text = settings.model_dump_json()
    deadline = time.monotonic() + timeout_s
    with NodePrograms() as programs:
        first = placed.command(nodes[0], [*words, "--rank", "0", text], advertises=True)
        programs.start(names[0], first)
        meeting = programs.wait_for(names[:1], deadline).get(names[0])
        if not isinstance(meeting, Meeting):
            why = meeting.sentence if isinstance(meeting, Missing) else None
            return [_unmet(names[0], why or programs.silence(names[0], timeout_s))]
        for rank, node in enumerate(nodes[1:], 1):
            more = ["--rank", str(rank), "--meet", meeting.address, text]
            programs.start(node.name, placed.command(node, [*words, *more]))
        answers = programs.wait_for(names, deadline)
        report = answers.get(names[0])
        if isinstance(report, LinkReport):
            return compare_links(report, names, _transfers(settings))
        missing = {name: one for name, one in answers.items() if isinstance(one, Missing)}
        absent = {rank for one in missing.values() for rank in one.ranks}
        absent |= {rank for rank, name in enumerate(names) if name not in answers}
        blamed = [names[rank] for rank in sorted(absent)] or list(missing)
        return [
            _unmet(
                name,
                missing[name].sentence if name in missing else programs.silence(name, timeout_s),
            )
            for name in blamed
        ]


def _unmet(name: str, why: str) -> Finding:
    return bad(
        f"reaching {name}",
        why,
        "parts on different nodes connect to each other at free ports: open them between the nodes "
        "(firewall), see that names resolve on each, and set run.network_interface where a node "
        "has several networks",
    )


def _backend(settings: Settings, sending: Sequence[RunNode]) -> str:
    """NCCL where every node of trainer and servers is given GPUs, else gloo."""
    gpus = {"trainer": gpus_of_trainer_node(settings), "server": gpus_of_server(settings)}
    on_gpus = [any(gpus.get(part) for part in node.parts) for node in sending]
    return "nccl" if on_gpus and all(on_gpus) else "gloo"


def _transfers(settings: Settings) -> Transfers:
    num_parameters, weights_bytes = size_of_model(settings)
    publish = settings.publish
    is_broadcast = publish.transport == "collective"
    return Transfers(
        weights_bytes=weights_bytes,
        gradients_bytes=4 * num_parameters,
        trainer_nodes=settings.deploy.trainer_nodes,
        bucket_bytes=publish.bucket_mb * 1e6 if is_broadcast else None,
        bucket_timeout_s=publish.phase_timeout_s / 2,
        rank_timeout_s=settings.trainer.rank_timeout_s,
    )


def show_rows(rows: Sequence[Row], nodes: Sequence[RunNode], console: Console) -> int:
    """Print the table; 0 if nothing required is missing, else 1."""
    for node in nodes:
        show(console, f"{node.name}: {', '.join(node.parts)}")
    table = PlainTable(title="outloop doctor", title_justify="left")
    for heading in ("what", "on", "found", "", "what to do"):
        table.add_plain_column(heading)
    for row in rows:
        finding = row.finding
        where = "all" if len(row.nodes) == len(nodes) else ", ".join(row.nodes)
        cells = (finding.what, where, finding.found, finding.mark, finding.advice)
        table.add_plain_row(cells)
    show_table(console, table)
    missing = [row.finding.what for row in rows if row.finding.mark == "missing"]
    show(
        console,
        f"cannot run: see {', '.join(dict.fromkeys(missing))}"
        if missing
        else f"this run can start on these {len(nodes)} nodes",
    )
    return 1 if missing else 0
