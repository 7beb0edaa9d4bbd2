"""Which servers could join the trainer's group, by the releases of NCCL that they told."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from outloop.buffer.records import Libraries, ServerEntry
from outloop.engine.machine.gpu_libraries import nccl_difference

_log = structlog.get_logger()


class NcclCompatibility:
    """Compares, and says of each server once what is wrong or not known."""

    def __init__(self, own: Libraries) -> None:
        self._own = own
        self._said: set[tuple[str, str]] = set()

    def refusals(self, entries: Sequence[ServerEntry]) -> dict[str, str]:
        """Of the servers that cannot join, by id: why, and what to do.

        One that told nothing is tried: NCCL's own error then comes with the group's first byte.
        """
        found: dict[str, str] = {}
        for entry in entries:
            whose = f"{entry.server_id} at {entry.url}"
            difference = nccl_difference(self._own, entry.libraries, whose)
            if difference is not None:
                found[entry.server_id] = difference
                self._say(entry, difference)
            elif self._own.nccl and not entry.libraries.nccl:
                self._say(
                    entry,
                    f"{whose} does not tell its release of NCCL, and the trainer has "
                    f"{self._own}; if it is another one, the server fails to join the group",
                )
        return found

    def _say(self, entry: ServerEntry, sentence: str) -> None:
        if (entry.server_id, sentence) not in self._said:
            self._said.add((entry.server_id, sentence))
            _log.warning("nccl_of_a_server", server_id=entry.server_id, reason=sentence)
