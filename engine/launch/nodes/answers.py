"""What programs on nodes answer: one JSON line for each record, among other output."""

from __future__ import annotations

import msgspec

from outloop.engine.launch.finding import Finding

_MARK = "OUTLOOP-DOCTOR "
"""Before a record on its line: engines and libraries print to the same output."""


class FolderIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a node sees at a path; equal on two nodes if it can be the same folder."""

    path: str
    """The folder, or the nearest one above it that is there."""
    inode: int
    filesystem: str
    """Its kind: ext4, nfs4, lustre."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, tag="node_report"):
    """One node as it is."""

    machine: str
    """The same on two nodes if one kernel has both."""
    findings: tuple[Finding, ...]
    releases: dict[str, str]
    """By what is compared between nodes: python, outloop, torch; empty: there is none."""
    run_folder: FolderIdentity
    model: str
    """Changes with names, sizes and short files of the model's folder; empty: it is not there."""


class Meeting(msgspec.Struct, frozen=True, kw_only=True, tag="meeting"):
    """Where rank 0 waits for the others."""

    address: str
    """HOST:PORT."""


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of a rank against that of rank 0."""

    rank: int
    ahead_s: float
    round_trip_s: float
    """Of the exchange that it is known by; it is right within half of that."""


class SendRate(msgspec.Struct, frozen=True, kw_only=True):
    """How fast bytes came from rank 0 to a rank, which did nothing else."""

    rank: int
    bytes_per_s: float


class LinkReport(msgspec.Struct, frozen=True, kw_only=True, tag="link_report"):
    """What rank 0 measured between the nodes."""

    backend: str
    clocks: tuple[ClockOffset, ...]
    sends: tuple[SendRate, ...]
    reduce_bytes_per_s: float
    """Of an all-reduce over all measured ranks: bytes over each node's link, 2 (n - 1) / n of the
    tensor's, by its time; 0: one rank."""


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag="joined"):
    """A rank was there from the beginning to the end."""

    rank: int


class Missing(msgspec.Struct, frozen=True, kw_only=True, tag="missing"):
    """What a rank could not reach, in a sentence."""

    rank: int
    sentence: str
    ranks: tuple[int, ...] = ()
    """That did not come, as rank 0 knows them."""


Answer = NodeReport | Meeting | LinkReport | Joined | Missing


def line_of(answer: Answer) -> str:
    """The line that carries the record, with its end."""
    return _MARK + msgspec.json.encode(answer).decode() + "\n"


def read_line(line: str) -> Answer | None:
    """The record on a line; None: it carries none.

    Raises:
        msgspec.DecodeError: the line begins like one and is none, as of another release of outloop.
    """
    before, mark, text = line.rstrip("\n").partition(_MARK)
    # An engine may write its own words before it, such as the number of the task.
    return msgspec.json.decode(text, type=Answer) if mark and len(before) < len(_MARK) else None
