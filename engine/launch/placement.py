"""Where the launcher's parts run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Placement(Protocol):
    """Makes of the command of a part the one that starts it where it belongs.

    The command that is returned lives as long as the part, passes SIGTERM on to it and ends with
    its exit code; so the launcher watches, restarts and stops a part alike wherever it is.
    """

    def command(self, name: str, part: str, command: Sequence[str]) -> list[str]:
        """The command line for this machine; `name` is the process's own, such as server-0."""


class Here:
    """Every part on the launcher's machine."""

    def command(self, name: str, part: str, command: Sequence[str]) -> list[str]:
        """The command as it is."""
        return list(command)


HERE = Here()
