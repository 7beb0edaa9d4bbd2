"""The nodes that a run would use on a cluster, and how a program is started on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

CONTROL = "control"
"""Beside the parts of a placement: where Redis, the routers and the launcher would be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNode:
    """One node, by the name that a person knows it by."""

    name: str
    parts: tuple[str, ...]
    """Of control, server, trainer and runner; at least one."""


class RunNodes(Protocol):
    """Nodes that are held for as long as they are examined."""

    @property
    def nodes(self) -> tuple[RunNode, ...]:
        """Each once."""
        ...

    def command(
        self, node: RunNode, program: Sequence[str], *, advertises: bool = False
    ) -> list[str]:
        """The command line for this machine that runs `program` on the node.

        It passes the program's output on and ends with its exit code; when it is asked to stop
        (SIGTERM), the program is too. The program has the resources of one of the node's parts.

        Args:
            advertises: add `--advertise` and the node's address to the program's words.
        """
        ...
