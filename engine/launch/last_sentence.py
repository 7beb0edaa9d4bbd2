"""The sentence with which a part ended, as its launcher reads it.

It goes through a pipe, because the part's log may be on a disk without room.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Mapping
from contextlib import suppress

VARIABLE = "OUTLOOP_LAST_SENTENCE_FD"
"""The number of the pipe's descriptor, and the pipe's own; without meaning on another machine."""
_MAX_BYTES = 4096
"""That a pipe takes at once."""


class LastSentence:
    """The launcher's side; `descriptor` and `environment` are for the part."""

    def __init__(self) -> None:
        self._reading, self.descriptor = os.pipe()
        weakref.finalize(self, os.close, self._reading)
        os.set_blocking(self._reading, False)
        self.environment: Mapping[str, str] = {
            VARIABLE: f"{self.descriptor}:{os.fstat(self.descriptor).st_ino}"
        }
        self._said = ""

    def close_part_side(self) -> None:
        """The part has it now, or was not started."""
        os.close(self.descriptor)

    def read(self) -> str:
        """What the part said; "" while it has said nothing."""
        with suppress(BlockingIOError):
            self._said += os.read(self._reading, _MAX_BYTES).decode(errors="replace")
        return self._said


class SentenceForLauncher:
    """The part's side; does nothing in a process that no launcher started."""

    def __init__(self) -> None:
        # Not for this process's own children, in which the number is another file's.
        found = os.environ.pop(VARIABLE, None)
        self._descriptor = None if found is None else _pipe_of(found)
        if self._descriptor is not None:
            os.set_inheritable(self._descriptor, False)

    def tell(self, sentence: str) -> None:
        """Say it, if the launcher is there."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.write(self._descriptor, sentence.encode()[:_MAX_BYTES])


def _pipe_of(text: str) -> int | None:
    """The descriptor that a launcher named; None where an engine carried the name to a process that
    was not given the pipe, in which the number is another file's or none."""
    number, inode = map(int, text.split(":"))
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return number if stat.S_ISFIFO(found.st_mode) and found.st_ino == inode else None
