"""A registry of one server, in this process."""

import dataclasses
from collections.abc import Sequence

from outloop.buffer.records import ServerEntry


class OneServer:
    """It, and every state that it was entered with."""

    def __init__(self, url: str, kind: str = "torch") -> None:
        self.history: list[tuple[int | None, bool]] = []
        self.entry = ServerEntry(
            server_id="server-0", url=url, kind=kind, policy_version=None, is_quarantined=False
        )

    @property
    def state(self) -> tuple[int | None, bool]:
        """Version and quarantine."""
        return self.entry.policy_version, self.entry.is_quarantined

    def servers(self) -> tuple[ServerEntry, ...]:
        """That one."""
        return (self.entry,)

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None:
        """Enter what it holds."""
        assert server_id == self.entry.server_id
        self.history.append((policy_version, quarantined))
        self.entry = dataclasses.replace(
            self.entry, policy_version=policy_version, is_quarantined=quarantined
        )

    def set_released(self, server_id: str, tags: Sequence[str]) -> None:
        """Enter what it was asked to release."""
        self.entry = dataclasses.replace(self.entry, released=tuple(tags))

    def claim_devices(self) -> tuple[str, ...]:
        """Nothing is starting."""
        return ()

    def free_devices(self) -> None:
        """Nobody waits for them."""
