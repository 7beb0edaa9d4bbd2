"""A registry of one server, in this process."""

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
        self.entry = ServerEntry(
            server_id=server_id,
            url=self.entry.url,
            kind=self.entry.kind,
            policy_version=policy_version,
            is_quarantined=quarantined,
        )
