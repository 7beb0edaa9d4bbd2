"""Connections to whichever server is the primary when they are made.

redis-py's own connections of a Sentinel ask who that is when they are made, but go back to the same
server when they are made again for a command that is repeated, as that of a trainer that waits.
"""

from __future__ import annotations

import redis
import redis.asyncio
from redis.asyncio.sentinel import SentinelManagedConnection as AsyncManagedConnection
from redis.sentinel import SentinelManagedConnection

Address = tuple[str, int]


class PrimaryConnection(SentinelManagedConnection):
    """One that asks its pool for the primary's address whenever it is made."""

    def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """Connect to the primary, if not connected."""
        self.connect()

    def connect_to(self, address: Address) -> None:
        """Connect to a server."""
        self.host, self.port = address
        redis.Connection.connect_check_health(self, check_health=False, retry_socket_connect=False)


class AsyncPrimaryConnection(AsyncManagedConnection):
    """The same for asyncio."""

    async def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """As `PrimaryConnection.connect_check_health`."""
        await self.connect()

    async def connect_to(self, address: Address) -> None:
        """As `PrimaryConnection.connect_to`."""
        self.host, self.port = address
        await redis.asyncio.Connection.connect_check_health(
            self, check_health=False, retry_socket_connect=False
        )
