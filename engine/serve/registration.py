"""A server's entry in the run's registry.

A server is entered without a policy_version: the weights that it loaded at its start have no
version until a publish gives it one.
"""

from __future__ import annotations

from outloop.buffer.reader import BufferReader
from outloop.buffer.records import Libraries, ServerEntry
from outloop.buffer.run import Run
from outloop.engine.machine.visible_gpus import visible_gpus

UNTOLD = Libraries()
"""Of a server that does not say what it has."""


class Registration:
    """The entry of `server-{index}`; each call is a short connection to Redis."""

    def __init__(self, run: Run, index: int) -> None:
        self.server_id = f"server-{index}"
        self._run = run
        self._is_entered = False

    def enter(self, url: str, libraries: Libraries = UNTOLD) -> None:
        """Answering at `url`, so that all weights are loaded before it serves."""
        entry = ServerEntry(
            server_id=self.server_id,
            url=url,
            kind=self._run.settings.server.kind,
            policy_version=None,
            is_quarantined=False,
            gpus=visible_gpus(),
            libraries=libraries,
        )
        reader = BufferReader.connect_patiently(self._run)
        try:
            reader.registry.register_server(entry)
        finally:
            reader.close()
        self._is_entered = True

    def claim_start(self) -> bool:
        """Whether the server may take GPUs that it shares with the trainer; then `end_start`."""
        reader = BufferReader.connect_patiently(self._run)
        try:
            timeout_s = self._run.settings.server.start_timeout_s
            return reader.registry.claim_start(self.server_id, timeout_s=timeout_s)
        finally:
            reader.close()

    def end_start(self) -> None:
        """It has started, or given up."""
        reader = BufferReader.connect_patiently(self._run)
        try:
            reader.registry.end_start(self.server_id)
        finally:
            reader.close()

    def withdraw(self) -> None:
        """Take it out of traffic; without effect before `enter`."""
        if not self._is_entered:
            return
        reader = BufferReader.connect_patiently(self._run, is_stopping=lambda: True)
        try:
            reader.registry.set_server_version(self.server_id, None, quarantined=True)
        finally:
            reader.close()
        self._is_entered = False

    def held_version(self) -> int | None:
        """The version that the registry has for this server."""
        reader = BufferReader.connect_patiently(self._run)
        try:
            entries = reader.registry.servers()
        finally:
            reader.close()
        return next((e.policy_version for e in entries if e.server_id == self.server_id), None)
