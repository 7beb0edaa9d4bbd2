"""Clients of Redis, made in one place with every option of redis-py set on purpose.

No client retries a command by itself, since a retried write may be applied twice, but for a
blocking one that is given `outage.Patience`. Exceptions of redis-py become BufferUnavailable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from outloop.buffer.errors import (
    BufferUnavailable,
    DeadlineExceeded,
    SettingsError,
    WritesRefused,
)
from outloop.buffer.redis.cluster import connect_owner, connect_owner_async
from outloop.buffer.redis.primary import AsyncPrimaryConnection, PrimaryConnection
from outloop.buffer.redis.refused_writes import refused_write

SOCKET_TIMEOUT_S = 30.0
"""Longest wait for the answer to one command; blocking commands must wait much less."""
CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""Per process and event loop; further commands wait for a free connection."""
MAX_SENTINEL_CONNECTIONS = 1024
"""The same where sentinels or a cluster name the primary; further commands fail."""
_POLL_S = 0.005
SENTINEL_SCHEME = "sentinel://"
CLUSTER_SCHEME = "redis+cluster://"
_SENTINEL_PORT = 26379
_REDIS_PORT = 6379
_SENTINEL_OPTIONS = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}
"""A sentinel that is away must not hold up the others' answers."""


def connect_sync(
    url: str,
    *,
    timeout_s: float = SOCKET_TIMEOUT_S,
    retry: Retry | None = None,
    on_connect: Callable[[Any], None] | None = None,
) -> redis.Redis:
    """A blocking client for `url` (redis://, rediss://, unix://, sentinel:// or redis+cluster://);
    connects at the first command.

    Args:
        timeout_s: longest wait for the answer to one command.
        retry: what repeats a command that failed; None: nothing does.
        on_connect: prepares each new connection, which it is given.

    Raises:
        SettingsError: the URL cannot be read.
    """
    again = {"retry": retry or Retry(NoBackoff(), 0), "redis_connect_func": on_connect}
    if url.startswith(SENTINEL_SCHEME):
        sentinels, group, options = _read_sentinel_url(url, timeout_s)
        manager = redis.Sentinel(sentinels, sentinel_kwargs=_SENTINEL_OPTIONS, **options)
        kinds: Any = {"redis_class": _SentinelRedis, "connection_class": PrimaryConnection}
        return manager.master_for(group, **kinds, **again)
    if url.startswith(CLUSTER_SCHEME):
        nodes, tag, access = _read_cluster_url(url)
        return connect_owner(nodes, tag, access, **_primary_options(timeout_s), **again)
    try:
        pool = redis.BlockingConnectionPool.from_url(url, **again, **_options(timeout_s))
    except ValueError as error:
        raise _bad_url(url, error) from error
    return redis.Redis.from_pool(pool)


def connect_async(url: str, *, timeout_s: float = SOCKET_TIMEOUT_S) -> redis.asyncio.Redis:
    """An asyncio client for `url`; belongs to the event loop that uses it first.

    Raises:
        SettingsError: the URL cannot be read.
    """
    if url.startswith(SENTINEL_SCHEME):
        sentinels, group, options = _read_sentinel_url(url, timeout_s)
        manager = redis.asyncio.Sentinel(sentinels, sentinel_kwargs=_SENTINEL_OPTIONS, **options)
        kinds: Any = {
            "redis_class": _AsyncSentinelRedis,
            "connection_class": AsyncPrimaryConnection,
        }
        return manager.master_for(group, **kinds, retry=AsyncRetry(NoBackoff(), 0))
    if url.startswith(CLUSTER_SCHEME):
        nodes, tag, access = _read_cluster_url(url)
        return connect_owner_async(
            nodes, tag, access, retry=AsyncRetry(NoBackoff(), 0), **_primary_options(timeout_s)
        )
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, retry=AsyncRetry(NoBackoff(), 0), **_options(timeout_s)
        )
    except ValueError as error:
        raise _bad_url(url, error) from error
    return redis.asyncio.Redis.from_pool(pool)


class _SentinelRedis(redis.Redis):
    """A client that closes its connections to the sentinels too."""

    def close(self) -> None:
        """Close all connections."""
        super().close()
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            sentinel.close()


class _AsyncSentinelRedis(redis.asyncio.Redis):
    """A client that closes its connections to the sentinels too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close all connections."""
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        await pool.sentinel_manager.aclose()


def of_run(url: str, tag: str) -> str:
    """`url`, of a cluster with the hash tag of the run's keys, by which its primary is found."""
    if not url.startswith(CLUSTER_SCHEME):
        return url
    return f"{url.partition('?')[0]}?tag={quote(tag, safe='')}"


def ports_of(url: str) -> list[int]:
    """The ports that `url` names, each once; of a cluster's other nodes it says nothing."""
    if url.startswith(SENTINEL_SCHEME):
        return sorted({_REDIS_PORT, *(port for _, port in _read_hosts(url, _SENTINEL_PORT))})
    return sorted({port for _, port in _read_hosts(url, _REDIS_PORT)})


def _read_hosts(url: str, default_port: int) -> list[tuple[str, int]]:
    """The hosts of a URL that may name several.

    Raises:
        SettingsError: it cannot be read.
    """
    hosts = []
    try:
        for host in urlsplit(url).netloc.rpartition("@")[2].split(","):
            name, colon, port = host.rpartition(":")
            hosts.append((name, int(port)) if colon else (port, default_port))
        if not all(name for name, _ in hosts):
            raise ValueError("a host is missing")
    except ValueError as error:
        raise _bad_url(url, error) from error
    return hosts


def _read_access(url: str) -> dict[str, str]:
    """User and password."""
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    given = {"username": unquote(user), "password": unquote(password)}
    return {name: word for name, word in given.items() if word}


def _read_sentinel_url(
    url: str, timeout_s: float
) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """Addresses of the sentinels, the name of the group they watch, and options of its primary."""
    sentinels = _read_hosts(url, _SENTINEL_PORT)
    words = urlsplit(url).path.strip("/").split("/")
    try:
        group, database = words if len(words) == 2 else (*words, "0")
        options = {**_primary_options(timeout_s), "db": int(database)}
        if not group:
            raise ValueError("the name of the group is missing")
    except ValueError as error:
        raise _bad_url(url, error) from error
    return sentinels, group, options | _read_access(url)


def _read_cluster_url(url: str) -> tuple[list[tuple[str, int]], str, dict[str, str]]:
    """Addresses of some nodes, the hash tag whose primary is meant, user and password."""
    parts = urlsplit(url)
    if parts.path.strip("/") not in ("", "0"):
        raise _bad_url(url, ValueError("a cluster has database 0 alone"))
    tag = parse_qs(parts.query).get("tag", [""])[0]
    return _read_hosts(url, _REDIS_PORT), tag, _read_access(url)


def _primary_options(timeout_s: float) -> dict[str, Any]:
    """As `_options`, for a pool that does not wait for a free connection."""
    options = _options(timeout_s)
    del options["timeout"]
    return options | {"max_connections": MAX_SENTINEL_CONNECTIONS}


def wait_for_redis(
    url: str,
    timeout_s: float,
    *,
    who: str = "launcher",
    peer: str = "Redis",
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the server at `url` has loaded its data and answers.

    Args:
        who: waits, for the error.
        peer: the server's name, for the error.
        check: called before each try; what it raises ends the wait.

    Raises:
        DeadlineExceeded: it did not within `timeout_s`.
        BufferUnavailable: it refuses us.
    """
    client = connect_sync(url)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            check()
            try:
                client.ping()
            except redis.AuthenticationError as error:
                raise BufferUnavailable(f"Redis refuses the password: {error}") from error
            except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
                # Not listening yet, or still loading its data.
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        who=who, phase="start", peer=peer, after_s=timeout_s
                    ) from None
                time.sleep(_POLL_S)
            else:
                return
    finally:
        client.close()


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn redis-py's errors into BufferUnavailable: `what` failed, and why."""
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise BufferUnavailable(
            f"{what}: Redis refused the credentials of buffer.redis_url ({error})"
        ) from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise BufferUnavailable(
            f"{what}: Redis did not answer ({type(error).__name__}: {error}); "
            "check that it runs and that buffer.redis_url is right"
        ) from error
    except redis.RedisError as error:
        sentence = f"{what}: Redis refused ({type(error).__name__}: {error})"
        if "no permissions" in str(error):
            sentence += "; give its user the rights that docs/buffer-keys.md lists"
        why = refused_write(error)
        if why is None:
            raise BufferUnavailable(sentence) from error
        raise WritesRefused(f"{sentence}; {why}") from error


def _options(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": 0,
        "protocol": 2,
        "legacy_responses": False,
        "decode_responses": False,
        "max_connections": MAX_CONNECTIONS,
        "timeout": SOCKET_TIMEOUT_S,
    }


def _bad_url(url: str, error: ValueError) -> SettingsError:
    # A URL may hold a password: only its scheme is repeated.
    return SettingsError(
        f"buffer.redis_url with scheme={url.partition(':')[0]!r} cannot be read ({error}); "
        "redis://host:port/db, rediss://host:port/db, unix:///path/to/socket, "
        "sentinel://host:port,host:port/group/db or redis+cluster://host:port,host:port are allowed"
    )
