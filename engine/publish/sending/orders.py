"""What rank 0 has the sending ranks do in a publish, and what they answer; nothing is pickled."""

from __future__ import annotations

import msgspec

Sums = dict[str, list[dict[str, str]]]
"""By kind of server, for each of a server's ranks: the checksum of every parameter."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A publish begins: take the memory for two buckets."""

    kinds: tuple[str, ...]
    """Of the servers for which checksums are kept."""


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Put bucket `index` of every rank's share together, all ranks at once."""

    index: int


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Say where in shared memory, or on the GPU, a rank's bucket lies."""

    rank: int
    index: int
    num_servers: int


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Write bucket `index` of every rank's share to a folder."""

    index: int
    folder: str


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Begin to join a group with the servers, as its rank 0."""

    rank: int
    host: str
    port: int
    name: str
    world_size: int
    timeout_s: float


class Broadcast(msgspec.Struct, frozen=True, tag="broadcast"):
    """Begin to broadcast a bucket over the rank's group."""

    rank: int
    index: int | None
    """None: one byte."""
    timeout_s: float


class Await(msgspec.Struct, frozen=True, tag="await"):
    """Wait for what `Join` or `Broadcast` began."""

    rank: int
    timeout_s: float


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Leave the groups, all ranks."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Say what was sent."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """The publish is over; memory may be kept for the next."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Give memory back."""


Order = Begin | Fill | Describe | Write | Join | Broadcast | Await | Leave | Report | End | Release


class Outcome(msgspec.Struct, frozen=True):
    """A rank's answer."""

    error: str = ""
    """How the rank failed to do it; empty if it did, or had nothing to do."""
    is_over: bool = True
    """False: what was awaited is still under way."""
    payloads: tuple[str, ...] = ()
    """Of `Describe`: one for each server, or a single one that all of them read."""
    sums: Sums = {}
    sent_bytes: int = 0
    received_bytes: int = 0
    """From other trainer ranks, to put tensors together."""
    peak_bytes: int = 0
    """The most that staging held at once."""
