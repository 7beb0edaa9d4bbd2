"""Findings of many nodes as one table, and what is compared between nodes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outloop.engine.launch.deploy.run_nodes import RunNode
from outloop.engine.launch.finding import Finding
from outloop.engine.launch.nodes.answers import (
    ClockOffset,
    FolderIdentity,
    LinkReport,
    NodeReport,
    SendRate,
    line_of,
    read_line,
)
from outloop.engine.launch.nodes.comparison import (
    Transfers,
    compare_links,
    compare_nodes,
    merge,
)

SERVERS_NCCL = "NCCL of the servers"
NODES = (
    RunNode(name="n0", parts=("control",)),
    RunNode(name="n1", parts=("trainer",)),
    RunNode(name="n2", parts=("trainer",)),
    RunNode(name="n3", parts=("server",)),
)
REPORT = NodeReport(
    machine="",
    findings=(),
    releases={"Python": "3.11.2", "outloop": "1", "NCCL": "2.29.7", SERVERS_NCCL: "2.29.7"},
    run_folder=FolderIdentity(path="/shared/runs", inode=7, filesystem="nfs4"),
    model="abc",
)
TRANSFERS = Transfers(
    weights_bytes=16e9,
    gradients_bytes=32e9,
    trainer_nodes=2,
    bucket_bytes=128e6,
    bucket_timeout_s=30.0,
    rank_timeout_s=600.0,
)
findings = st.builds(
    Finding,
    what=st.sampled_from(["disk", "memory", "packages"]),
    found=st.sampled_from(["a", "b", "c"]),
    is_ok=st.booleans(),
    is_required=st.booleans(),
    advice=st.sampled_from(["", "x"]),
)
tables = st.dictionaries(
    st.sampled_from([f"n{n}" for n in range(9)]), st.lists(findings, max_size=6), max_size=9
)


def reports(**changes: NodeReport) -> dict[str, NodeReport]:
    """One of each node, on machines of their own, with those of `changes` in place of some."""
    found = {node.name: changes.get(node.name, REPORT) for node in NODES}
    return {name: with_machine(report, name) for name, report in found.items()}


def with_machine(report: NodeReport, name: str) -> NodeReport:
    """The report of another kernel."""
    return NodeReport(
        machine=name,
        findings=report.findings,
        releases=report.releases,
        run_folder=report.run_folder,
        model=report.model,
    )


def with_release(name: str, release: str) -> NodeReport:
    """A node that has another one."""
    return NodeReport(
        machine="",
        findings=(),
        releases=REPORT.releases | {name: release},
        run_folder=REPORT.run_folder,
        model=REPORT.model,
    )


def bad_of(found: list[Finding]) -> list[Finding]:
    """Those that are not well."""
    return [finding for finding in found if not finding.is_ok]


@pytest.mark.medium
@given(tables)
def test_nothing_that_a_node_found_is_lost_or_added(found: dict[str, list[Finding]]) -> None:
    """A bad finding has one row with exactly its nodes; good ones keep their nodes and values."""
    rows = merge(found)
    bad = {row.finding: set(row.nodes) for row in rows if not row.finding.is_ok}
    assert len(bad) == len([row for row in rows if not row.finding.is_ok])
    wanted: dict[Finding, set[str]] = {}
    for node, one in found.items():
        for finding in bad_of(one):
            wanted.setdefault(finding, set()).add(node)
    assert bad == wanted
    for what in ("disk", "memory", "packages"):
        of_rows = [row for row in rows if row.finding.is_ok and row.finding.what == what]
        for node, one in found.items():
            values = [f.found for f in one if f.is_ok and f.what == what]
            assert [node in row.nodes for row in of_rows].count(True) == len(values)
            for row, value in zip(of_rows, values, strict=False):
                assert value in row.finding.found


@given(st.lists(findings, max_size=6), st.integers(2, 9))
def test_nodes_that_agree_have_one_row_for_each_finding(one: list[Finding], number: int) -> None:
    """As a single node has them, without the names of nodes."""
    names = [f"n{n}" for n in range(number)]
    assert [row.finding for row in merge(dict.fromkeys(names, one))] == [
        row.finding for row in merge({"n0": one})
    ]
    assert all(set(row.nodes) == set(names) for row in merge(dict.fromkeys(names, one)))


def test_values_that_differ_are_told_with_their_nodes() -> None:
    """And counted where there are many of them."""
    memory = Finding(what="memory", found="64 GiB", is_ok=True, is_required=False)
    few = merge({"n0": [memory], "n1": [replace(memory, found="32 GiB")], "n2": [memory]})
    assert [row.finding.found for row in few] == ["64 GiB (n0, n2); 32 GiB (n1)"]
    many = merge({f"n{n}": [replace(memory, found=f"{n} GiB")] for n in range(9)})
    assert many[0].finding.found.endswith("3 GiB (n3); and 5 other values")


def test_nodes_that_are_alike_are_said_to_be() -> None:
    found = compare_nodes(NODES, reports(), SERVERS_NCCL)
    assert bad_of(found) == []
    assert "Python 3.11.2, outloop 1, NCCL 2.29.7" in found[0].found


def test_releases_that_differ_are_named_with_their_nodes() -> None:
    """Another outloop anywhere and another torch among the trainer's nodes must not be."""
    (finding,) = bad_of(
        compare_nodes(NODES, reports(n3=with_release("outloop", "2")), SERVERS_NCCL)
    )
    assert finding.what == "outloop on all nodes"
    assert finding.found == "1 (n0, n1, n2); 2 (n3)"
    assert finding.is_required
    for node, is_required in (("n0", False), ("n2", True)):
        changed = reports(**{node: with_release("Python", "3.12.1")})
        (finding,) = bad_of(compare_nodes(NODES, changed, SERVERS_NCCL))
        assert finding.is_required is is_required
        assert f"3.12.1 ({node})" in finding.found


def test_servers_with_another_nccl_than_the_trainer_are_refused() -> None:
    """Though each environment is the same on all nodes."""
    changed = reports(**{node.name: with_release(SERVERS_NCCL, "2.30.7") for node in NODES})
    (finding,) = bad_of(compare_nodes(NODES, changed, SERVERS_NCCL))
    assert finding.is_required
    assert finding.found == "trainer: 2.29.7 (n1, n2); servers: 2.30.7 (n3)"


def test_a_run_folder_that_nodes_do_not_share_is_refused() -> None:
    """Another folder at the same path, none at all, and a file system of each machine's own."""
    for path, inode, filesystem in (
        ("/shared/runs", 8, "nfs4"),
        ("/shared", 2, "nfs4"),
        ("/shared/runs", 7, "ext4"),
    ):
        folder = FolderIdentity(path=path, inode=inode, filesystem=filesystem)
        report = NodeReport(
            machine="", findings=(), releases=REPORT.releases, run_folder=folder, model="abc"
        )
        everywhere = {name: with_machine(report, name) for name in ("n0", "n1", "n2", "n3")}
        changed = everywhere if filesystem == "ext4" else reports(n2=report)
        (finding,) = bad_of(compare_nodes(NODES, changed, SERVERS_NCCL))
        assert finding.what == "run folder on all nodes"
        assert "n2" in finding.found
    one_machine = {name: with_machine(report, "n0") for name in ("n0", "n1")}
    assert bad_of(compare_nodes(NODES, one_machine, SERVERS_NCCL)) == []


def test_a_model_that_is_not_everywhere_is_refused() -> None:
    for model in ("", "other"):
        report = NodeReport(
            machine="",
            findings=(),
            releases=REPORT.releases,
            run_folder=REPORT.run_folder,
            model=model,
        )
        (finding,) = bad_of(compare_nodes(NODES, reports(n3=report), SERVERS_NCCL))
        assert finding.what == "model on all nodes"
        assert f"{model or 'not there'} (n3)" in finding.found


def links(
    *, ahead_s: float = 0.0, round_trip_s: float = 0.001, send: float = 10e9, reduce: float = 10e9
) -> LinkReport:
    """What rank 0 measured of one other."""
    return LinkReport(
        backend="nccl",
        clocks=(ClockOffset(rank=1, ahead_s=ahead_s, round_trip_s=round_trip_s),),
        sends=(SendRate(rank=1, bytes_per_s=send),),
        reduce_bytes_per_s=reduce,
    )


def test_a_clock_is_wrong_beyond_what_the_round_trip_can_hide() -> None:
    """Two seconds, as against Redis."""
    assert bad_of(compare_links(links(ahead_s=-1.9), ["n0", "n1"], TRANSFERS)) == []
    assert bad_of(compare_links(links(ahead_s=4, round_trip_s=5), ["n0", "n1"], TRANSFERS)) == []
    (finding,) = bad_of(compare_links(links(ahead_s=-2.1), ["n0", "n1"], TRANSFERS))
    assert finding.found == "n1 -2.1 s, against n0"
    assert not finding.is_required


def test_bandwidth_is_told_with_what_a_run_sends() -> None:
    """16 GB at 10 GB/s take 1.6 s; the gradients' 32 GB go once over the link of each of two."""
    clocks, sent, reduced = compare_links(links(), ["n0", "n1"], TRANSFERS)
    assert sent.found == "nccl, from n0: 10 GB/s to n1; the weights, 16 GB, in 1.6 s"
    assert "gradients in float32, 32 GB, in 3.2 s" in reduced.found
    assert clocks.is_ok
    assert sent.is_ok
    assert reduced.is_ok


def test_bandwidth_is_too_small_where_a_deadline_of_the_settings_would_pass() -> None:
    """128 MB in 30 s for a bucket that is broadcast, 600 s for ranks that wait."""
    slow = links(send=4e6, reduce=50e6)
    (sent, reduced) = bad_of(compare_links(slow, ["n0", "n1"], TRANSFERS))
    assert "publish.bucket_mb" in sent.advice
    assert "trainer.rank_timeout_s" in reduced.advice
    by_disk = replace(TRANSFERS, bucket_bytes=None)
    assert bad_of(compare_links(slow, ["n0", "n1"], by_disk)) == [reduced]
    assert not reduced.is_required


def test_an_answer_is_one_line_among_others() -> None:
    """An engine's or a library's lines carry none."""
    line = line_of(with_machine(REPORT, "n0"))
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert read_line(line) == with_machine(REPORT, "n0")
    assert read_line(f"3: {line}") == with_machine(REPORT, "n0")
    assert read_line("outloop: doctor: on node 7\n") is None
