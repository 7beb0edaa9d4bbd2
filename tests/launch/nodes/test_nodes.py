"""Nodes that are examined by real programs; here each is a process of this machine."""

import importlib
import io
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from fakes import user_folder
from outloop.buffer.settings import Settings, load_settings
from outloop.cli import cli
from outloop.engine.launch.deploy.run_nodes import RunNode
from outloop.engine.launch.finding import good
from outloop.engine.launch.nodes.answers import NodeReport, line_of, read_line
from outloop.engine.launch.nodes.comparison import Row
from outloop.engine.launch.nodes.examination import examine_nodes, measure_links, show_rows
from outloop.engine.launch.nodes.node_report import identity_of
from outloop.engine.models.random_init import write_policy

Command = Callable[[RunNode, list[str]], list[str]]


class Here:
    """Nodes of a run that are all this machine."""

    def __init__(self, nodes: Sequence[RunNode], change: Command = lambda _, words: words) -> None:
        """`change`: of the command line that runs a program on a node."""
        self.nodes = tuple(nodes)
        self._change = change

    def command(
        self, node: RunNode, program: Sequence[str], *, advertises: bool = False
    ) -> list[str]:
        """As RunNodes says."""
        return self._change(node, [*program, *(["--advertise", "127.0.0.1"] * advertises)])


NODES = (
    RunNode(name="n0", parts=("control",)),
    RunNode(name="n1", parts=("trainer",)),
    RunNode(name="n2", parts=("server",)),
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a run in a user's folder, which is the working folder."""
    write_policy(tmp_path / "model-files", 0)
    user_folder.write(tmp_path, tmp_path / "model-files", {})
    monkeypatch.chdir(tmp_path)
    return load_settings(tmp_path / "run.toml")


def row_of(rows: Sequence[Row], what: str) -> Row:
    """The first with that name."""
    return next(row for row in rows if row.finding.what == what)


@pytest.mark.medium
def test_a_node_s_program_prints_one_line(settings: Settings, tmp_path: Path) -> None:
    """Beside its logs; with what this machine is for the part, and nothing is made."""
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "outloop.engine.launch.nodes.node_report"),
            *("--parts", "server,runner", settings.model_dump_json()),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    (report,) = filter(None, map(read_line, answer.stdout.splitlines()))
    assert isinstance(report, NodeReport)
    found = {finding.what: finding for finding in report.findings}
    assert found["settings"].found == "model, tasks and code load"
    assert "redis server" not in found
    assert report.releases["Python"] == platform.python_version()
    assert report.run_folder == identity_of(tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_every_node_is_examined_and_what_is_between_them(settings: Settings) -> None:
    """What all have is told once, and what the routers' node has of it alone."""
    rows = examine_nodes(settings, Here(NODES))
    out = io.StringIO()
    assert show_rows(rows, NODES, Console(file=out, width=250)) == 0, out.getvalue()
    assert row_of(rows, "settings").nodes == ("n0", "n1", "n2")
    assert row_of(rows, "redis server").nodes == ("n0",)
    assert row_of(rows, "run folder on all nodes").finding.is_ok
    assert "torch " in row_of(rows, "same on all nodes").finding.found
    assert row_of(rows, "bandwidth").finding.is_ok
    assert "n2: server" in out.getvalue()


@pytest.mark.medium
def test_bandwidth_is_measured_between_the_nodes_of_trainer_and_servers(
    settings: Settings,
) -> None:
    """By three processes over gloo; the clock of the third is compared too."""
    found = {one.what: one for one in measure_links(settings, Here(NODES), NODES, 60)}
    told = found["bandwidth"].found
    assert re.fullmatch(r"gloo, from n1: [0-9.e-]+ GB/s to n2; the weights, .* MB, in .* s", told)
    assert "GB/s over each node's link" in found["all-reduce"].found
    assert found["clocks of the nodes"].is_ok
    assert "of n1" in found["clocks of the nodes"].found


@pytest.fixture
def namespaces(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes hosts of network namespaces."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "chaos"))
    return importlib.import_module("hosts")


@pytest.mark.medium
def test_bandwidth_is_that_of_the_link(settings: Settings, tmp_path: Path, namespaces: Any) -> None:
    """Between two namespaces of the network with 400 Mbit/s, which is 0.05 GB/s with headers."""
    if reason := namespaces.why_not():
        pytest.skip(reason)
    changed = load_settings(tmp_path / "run.toml", ('run.network_interface="eth0"',))
    with namespaces.hosts(("trainer", "server")) as made:
        for host in made.values():
            host.slow(("rate", "400mbit", "burst", "256kb", "latency", "50ms"))

        def change(node: RunNode, words: list[str]) -> list[str]:
            found = made[node.parts[0]]
            return found.command([found.address if w == "127.0.0.1" else w for w in words])

        found = {
            one.what: one.found
            for one in measure_links(changed, Here(NODES[1:], change), NODES[1:], 60)
        }
    for what in ("bandwidth", "all-reduce"):
        told = re.search(r"([0-9.e-]+) GB/s", found[what])
        assert told, found
        assert 0.02 < float(told[1]) <= 0.052, found


@pytest.mark.medium
def test_a_node_that_does_not_answer_is_named_and_its_program_stopped(
    settings: Settings, tmp_path: Path
) -> None:
    """One is silent until the deadline, one ends at once; the table has what others said."""
    report = NodeReport(
        machine="m",
        findings=(good("settings", "load"),),
        releases={"torch": ""},
        run_folder=identity_of(tmp_path),
        model="abc",
    )
    silent = f"""
import pathlib, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("waiting for room", flush=True)
signal.sigwait([signal.SIGTERM])
pathlib.Path({str(tmp_path / "stopped")!r}).touch()
"""
    in_place = {
        "n0": f"print('noise'); print({line_of(report)!r})",
        "n1": silent,
        "n2": "print('no route to host'); raise SystemExit(7)",
    }
    placed = Here(NODES, lambda node, _: [sys.executable, "-c", in_place[node.name]])
    rows = examine_nodes(settings, placed, report_timeout_s=3)
    found = {row.nodes: row.finding for row in rows if row.finding.what == "node"}
    assert "no answer within 3 s: waiting for room" in found[("n1",)].found
    assert "ended with exit_code=7: no route to host" in found[("n2",)].found
    assert row_of(rows, "settings").nodes == ("n0",)
    assert (tmp_path / "stopped").exists()
    out = io.StringIO()
    assert show_rows(rows, NODES, Console(file=out, width=250)) == 1
    assert "cannot run: see node" in out.getvalue()


@pytest.mark.slow
def test_nodes_that_cannot_reach_each_other_are_named(settings: Settings) -> None:
    """The address of the trainer's node means nothing on the server's."""

    def change(node: RunNode, words: list[str]) -> list[str]:
        if node.name != "n2" or "--meet" not in words:
            return words
        place = words.index("--meet") + 1
        return [*words[:place], "127.0.0.1:1", *words[place + 1 :]]

    (finding,) = measure_links(settings, Here(NODES, change), NODES[1:], 20)
    assert finding.what == "reaching n2"
    assert "cannot reach 127.0.0.1:1" in finding.found
    assert finding.is_required
    assert "firewall" in finding.advice


def test_an_engine_needs_a_run_to_examine() -> None:
    answer = CliRunner().invoke(cli, ["doctor", "--on", "ray"])
    assert answer.exit_code == 2
    assert "--on ray needs --config PATH" in answer.output
