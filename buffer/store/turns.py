"""Where the bytes of turns are: in the lists of their episodes, or on shards.

The list `episode:EPISODE:turns` holds the turns themselves, unless buffer.shards is set: then it
holds their names, and `outloop.buffer.store.shards` finds the bytes. Whoever reads turns reads the
lists first and hands them to `read`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outloop.buffer.records import Opening

Stored = Sequence[bytes | None]
"""The turns of an episode as they are stored; None: its shard lacks what it had acknowledged."""
Listed = Sequence[tuple[str, Sequence[bytes]]]
"""Ids of episodes, and what their lists hold."""


class TurnStore(Protocol):
    """For blocking clients. All but `close` raise redis-py's errors."""

    def read(self, listed: Listed) -> list[Stored]:
        """The turns of each episode; none of one that was freed since its list was read."""

    def free(self) -> None:
        """Delete what scripts have freed."""

    def free_unknown(self) -> None:
        """Delete what belongs to no episode that the run knows."""

    def write_obstacle(self) -> str | None:
        """Why turns could not be written now, as a sentence for a person; None: they could."""

    def close(self) -> None:
        """Close the connections."""


class AsyncTurnStore(Protocol):
    """For asyncio. All but `place` and `close` raise redis-py's errors."""

    def place(self, opening: Opening) -> str:
        """Which shard has the turns of an episode that is about to be opened; empty: none."""

    async def keep(self, episode_id: str, record: bytes) -> bytes:
        """Store a turn as far as it is not in its episode's list, and return what goes there.

        Raises:
            NotFound: no such episode.
        """

    async def read(self, listed: Listed) -> list[Stored]:
        """As `TurnStore.read`."""

    async def free(self) -> None:
        """As `TurnStore.free`; at most once at a time."""

    async def write_obstacle(self) -> str | None:
        """As `TurnStore.write_obstacle`."""

    async def close(self) -> None:
        """Close the connections."""


class ListedTurns:
    """Turns in the lists of their episodes: scripts keep and free them."""

    def read(self, listed: Listed) -> list[Stored]:
        """What the lists hold."""
        return [turns for _, turns in listed]

    def free(self) -> None:
        """Scripts have done so."""

    def free_unknown(self) -> None:
        """There is nothing."""

    def write_obstacle(self) -> str | None:
        """None of its own."""
        return None

    def close(self) -> None:
        """There is nothing to close."""


class AsyncListedTurns:
    """The same for asyncio."""

    def place(self, opening: Opening) -> str:
        """No shard."""
        return ""

    async def keep(self, episode_id: str, record: bytes) -> bytes:
        """The turn itself."""
        return record

    async def read(self, listed: Listed) -> list[Stored]:
        """What the lists hold."""
        return [turns for _, turns in listed]

    async def free(self) -> None:
        """Scripts have done so."""

    async def write_obstacle(self) -> str | None:
        """None of its own."""
        return None

    async def close(self) -> None:
        """There is nothing to close."""
