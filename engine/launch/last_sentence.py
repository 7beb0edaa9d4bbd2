"""The sentence with which a part ended, as its launcher reads it.

It goes through a pipe, because the part's log may be on a disk without room.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import suppress

_VARIABLE = "OUTLOOP_LAST_SENTENCE_FD"
_MAX_BYTES = 4096
"""That a pipe takes at once."""


class LastSentence:
    """The launcher's side; `descriptor` and `environment` are for the part."""

    def __init__(self) -> None:
        self._reading, self.descriptor = os.pipe()
        weakref.finalize(self, os.close, self._reading)
        os.set_blocking(self._reading, False)
        self.environment: Mapping[str, str] = {_VARIABLE: str(self.descriptor)}
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
        found = os.environ.pop(_VARIABLE, None)
        self._descriptor = None if found is None else int(found)
        if self._descriptor is not None:
            os.set_inheritable(self._descriptor, False)

    def tell(self, sentence: str) -> None:
        """Say it, if the launcher is there."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.write(self._descriptor, sentence.encode()[:_MAX_BYTES])
