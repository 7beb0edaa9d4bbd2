"""The highest policy_version that a run's trainer ever announced, in a file of the run's folder.

A Redis that lost its last writes does not know it, and servers may hold it: it must not be used for
other weights.
"""

from __future__ import annotations

import os
from pathlib import Path

_FILE = "issued_version"


class IssuedVersion:
    """The file of one run; its one trainer writes it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _FILE

    def read(self) -> int:
        """-1 if none was noted."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return -1

    def note(self, policy_version: int) -> None:
        """Note a version before it is announced; a higher one stays."""
        if policy_version <= self.read():
            return
        writing = self._path.with_name(f".{_FILE}.writing")
        writing.write_text(str(policy_version))
        os.replace(writing, self._path)
