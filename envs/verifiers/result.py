"""What an episode left for its verifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The artefacts of one episode."""

    answer: str
    """What is to be judged: for an agent program, what it wrote to its standard output, without
    white space around it."""
    exit_code: int | None = None
    """Of an agent program; None if a limit ended it, or it was none."""
    reason: str = ""
    """Which limit ended it: time, memory or output; empty for none."""
    stdout: str = ""
    """The end of it, at most env.max_kept_bytes."""
    stderr: str = ""
    folder: Path | None = None
    """The episode's own folder with the files that it left; removed after the verdict."""
