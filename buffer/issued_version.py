"""The highest policy_version that a run's trainer ever announced, in a file of the run's folder.

A Redis that lost its last writes does not know it, and servers may hold it: it must not be used for
other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outloop.buffer.room import wait_for_room
from outloop.buffer.whole_file import whole_file

_FILE = "issued_version"


class IssuedVersion:
    """The file of one run; its one trainer writes it."""

    def __init__(self, run_dir: Path, *, max_full_s: float, on_full: Callable[[str], None]) -> None:
        """`max_full_s`: how long a note waits for room; `on_full`: gets a sentence when it does."""
        self._path = run_dir / _FILE
        self._max_full_s, self._on_full = max_full_s, on_full

    def read(self) -> int:
        """-1 if none was noted."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return -1

    def note(self, policy_version: int) -> None:
        """Note a version before it is announced; a higher one stays.

        Raises:
            DiskFull: there was no room in time.
        """
        if policy_version <= self.read():
            return

        def write() -> None:
            with whole_file(self._path) as writing:
                writing.write_text(str(policy_version))

        wait_for_room(write, self._path, max_s=self._max_full_s, on_full=self._on_full)
