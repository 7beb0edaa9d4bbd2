"""Connections to the primary of a Redis Cluster that owns a run.

Every key of a run carries the same hash tag, so one primary owns them all, and a client needs no
other. Which one that is, every node of the cluster says; a client asks at first, and again after a
connection was refused or lost its place. What says that another node owns the run now, or none,
ends a connection as a lost server does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncPrimaryPool
from redis.crc import key_slot
from redis.sentinel import SentinelConnectionPool as PrimaryPool

from outloop.buffer.redis.primary import Address, AsyncPrimaryConnection, PrimaryConnection

_NOT_HERE = (
    redis.exceptions.AskError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ReadOnlyError,
)
"""Answers of a node that does not own the run now; nothing was executed. MOVED is an ASK too."""
_ASK_TIMEOUT_S = 2.0
"""A node that is away must not hold up the others' answers."""
_COMMAND = ("CLUSTER", "SLOTS")


def connect_owner(
    nodes: Sequence[Address], tag: str, access: dict[str, Any], **options: Any
) -> redis.Redis:
    """A blocking client of the primary that owns the keys with hash tag `tag`.

    Args:
        nodes: some of the cluster, which know the others.
        access: user and password, for every node.
    """
    owners = _Owners(nodes, tag, access)
    pool = PrimaryPool(tag, owners, connection_class=_Connection, **access, **options)
    return redis.Redis.from_pool(pool)


def connect_owner_async(
    nodes: Sequence[Address], tag: str, access: dict[str, Any], **options: Any
) -> redis.asyncio.Redis:
    """As `connect_owner`, for asyncio."""
    owners: Any = _AsyncOwners(nodes, tag, access)
    kind: Any = _AsyncConnection
    pool = AsyncPrimaryPool(tag, owners, connection_class=kind, **access, **options)
    return redis.asyncio.Redis.from_pool(pool)


class _Connection(PrimaryConnection):
    """One that is lost when the run is elsewhere."""

    def connect_to(self, address: Address) -> None:
        try:
            super().connect_to(address)
        except (redis.ConnectionError, redis.TimeoutError):
            self.connection_pool.sentinel_manager.forget()
            raise

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except _NOT_HERE as error:
            self.connection_pool.sentinel_manager.forget()
            self.disconnect()
            raise _elsewhere(error) from error


class _AsyncConnection(AsyncPrimaryConnection):
    """The same for asyncio."""

    async def connect_to(self, address: Address) -> None:
        try:
            await super().connect_to(address)
        except (redis.ConnectionError, redis.TimeoutError):
            self.connection_pool.sentinel_manager.forget()
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except _NOT_HERE as error:
            self.connection_pool.sentinel_manager.forget()
            await self.disconnect()
            raise _elsewhere(error) from error


class _Nodes:
    """The nodes of a cluster that are known, those that answered last first."""

    def __init__(self, nodes: Sequence[Address], tag: str, access: dict[str, Any]) -> None:
        self._given = tuple(nodes)
        self._known: tuple[Address, ...] = ()
        self.found: Address | None = None
        """The primary, as it was last said; None: to be asked."""
        self._slot = key_slot(tag.encode())
        self.options = {
            "socket_timeout": _ASK_TIMEOUT_S,
            "socket_connect_timeout": _ASK_TIMEOUT_S,
            "protocol": 2,
            **access,
        }

    def forget(self) -> None:
        """The next connection asks again."""
        self.found = None

    def to_ask(self) -> Iterator[Address]:
        """Each once."""
        return iter(dict.fromkeys((*self._known, *self._given)))

    def read(self, asked: Address, answer: Any) -> Address | None:
        """The primary of the slot, by a node's answer; None: it knows of none."""
        found = None
        known = []
        for first, last, primary, *replicas in answer:
            known += [_address(node, asked) for node in (primary, *replicas)]
            if first <= self._slot <= last:
                found = _address(primary, asked)
        if found is not None:
            self._known = tuple(dict.fromkeys((asked, *known)))
        self.found = found
        return found

    def nobody(self, reasons: Sequence[str]) -> redis.ConnectionError:
        """The error where no node names a primary."""
        return redis.ConnectionError(
            f"no node of the cluster names a primary of slot {self._slot}: {'; '.join(reasons)}"
        )


class _Owners(_Nodes):
    """Says where the primary is, as redis-py's pool asks a Sentinel."""

    def discover_master(self, service_name: str) -> Address:
        """Its address.

        Raises:
            redis.ConnectionError: no node answers, or none knows one.
        """
        if self.found is not None:
            return self.found
        reasons = []
        for node in self.to_ask():
            client = redis.Redis(*node, **self.options)
            try:
                found = self.read(node, client.execute_command(*_COMMAND))
            except redis.RedisError as error:
                reasons.append(_why(node, error))
                continue
            finally:
                client.close()
            if found is not None:
                return found
            reasons.append(f"{_named(node)} knows of none")
        raise self.nobody(reasons)


class _AsyncOwners(_Nodes):
    """The same for asyncio."""

    async def discover_master(self, service_name: str) -> Address:
        """As `_Owners.discover_master`."""
        if self.found is not None:
            return self.found
        reasons = []
        for node in self.to_ask():
            client = redis.asyncio.Redis(host=node[0], port=node[1], **self.options)
            try:
                answer: Any = await client.execute_command(*_COMMAND)
                found = self.read(node, answer)
            except redis.RedisError as error:
                reasons.append(_why(node, error))
                continue
            finally:
                await client.aclose()
            if found is not None:
                return found
            reasons.append(f"{_named(node)} knows of none")
        raise self.nobody(reasons)


def _address(node: Sequence[Any], asked: Address) -> Address:
    """Of a node in an answer; one without a host is that which was asked."""
    host = (node[0] or b"").decode()
    return (asked[0] if host in ("", "?") else host), int(node[1])


def _named(node: Address) -> str:
    return f"{node[0]}:{node[1]}"


def _why(node: Address, error: redis.RedisError) -> str:
    """Why a node does not say who the primary is; raises what asking others cannot change."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        raise error
    if isinstance(error, redis.ResponseError):
        raise redis.ResponseError(
            f"{_named(node)} is no node of a cluster ({error}); begin buffer.redis_url with "
            "redis://, or name nodes of a cluster"
        ) from error
    return str(error)


def _elsewhere(error: Exception) -> redis.ConnectionError:
    return redis.ConnectionError(f"this node of the cluster does not own the run now: {error}")
