"""What an episode left for its verifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The artefacts of one episode."""

    answer: str
    """The text to judge. Of an agent program: its standard output, stripped."""
    exit_code: int | None = None
    """Of an agent program; None if a limit ended it, or if there was no program."""
    reason: str = ""
    """The limit that ended it: time, memory or output; empty: none."""
    stdout: str = ""
    """The end of its standard output, at most env.max_kept_bytes."""
    stderr: str = ""
    folder: Path | None = None
    """The episode's folder with the files that it left; removed after the verdict."""
