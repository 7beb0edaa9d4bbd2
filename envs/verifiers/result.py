"""What an episode left for its verifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outloop.envs.sandbox.guest import workspace


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The artefacts of one episode."""

    answer: str
    """The text to judge. Of an agent program: its standard output, stripped."""
    exit_code: int | None = None
    """Of an agent program; None if a limit ended it, or if there was no program."""
    reason: str = ""
    """The limit that ended it: time, memory, processes, terminals, disk or output. Empty: none."""
    stdout: str = ""
    """The end of its standard output, at most env.max_kept_bytes."""
    stderr: str = ""
    folder: Path | None = None
    """The episode's folder with the files that it left; removed after the verdict."""

    def read(self, path: str, max_bytes: int = 2**20) -> bytes | None:
        """Read a file below `folder`, without following links.

        Never raises for what the agent left, so that no file of the agent's can make a verifier
        fail.

        Returns:
            The content; None if there is no regular file of at most `max_bytes` at `path`.
        """
        if self.folder is None:
            return None
        try:
            return workspace.read_file(str(self.folder), path, max_bytes)
        except (OSError, ValueError):
            return None
