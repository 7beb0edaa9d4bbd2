"""Clients of Redis, made in one place with every option of redis-py set on purpose.

No client retries a command by itself, since a retried write may be applied twice, but for a
blocking one that is given `outage.Patience`. Exceptions of redis-py become BufferUnavailable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

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
from outloop.buffer.redis.refused_writes import refused_write

SOCKET_TIMEOUT_S = 30.0
"""Longest wait for the answer to one command; blocking commands must wait much less."""
CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""Per process and event loop; further commands wait for a free connection."""
MAX_SENTINEL_CONNECTIONS = 1024
"""The same where sentinels name the primary; further commands fail."""
_POLL_S = 0.005
SENTINEL_SCHEME = "sentinel://"
_SENTINEL_PORT = 26379
_SENTINEL_OPTIONS = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}
"""A sentinel that is away must not hold up the others' answers."""


def connect_sync(
    url: str,
    *,
    timeout_s: float = SOCKET_TIMEOUT_S,
    retry: Retry | None = None,
    on_connect: Callable[[Any], None] | None = None,
) -> redis.Redis:
    """A blocking client for `url` (redis://, rediss://, unix:// or sentinel://); connects at the
    first command.

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
        return manager.master_for(group, redis_class=_SentinelRedis, **again)
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
        return manager.master_for(
            group, redis_class=_AsyncSentinelRedis, retry=AsyncRetry(NoBackoff(), 0)
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


def _read_sentinel_url(
    url: str, timeout_s: float
) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """Addresses of the sentinels, the name of the group they watch, and options of its primary."""
    parts = urlsplit(url)
    access, _, hosts = parts.netloc.rpartition("@")
    user, _, password = access.partition(":")
    words = parts.path.strip("/").split("/")
    try:
        sentinels = []
        for host in hosts.split(","):
            name, colon, port = host.rpartition(":")
            sentinels.append((name, int(port)) if colon else (port, _SENTINEL_PORT))
        group, database = words if len(words) == 2 else (*words, "0")
        options = {**_options(timeout_s), "db": int(database)}
        if not group or not all(name for name, _ in sentinels):
            raise ValueError("a host or the name of the group is missing")
    except ValueError as error:
        raise _bad_url(url, error) from error
    # Its pool does not wait for a free connection.
    del options["timeout"]
    options["max_connections"] = MAX_SENTINEL_CONNECTIONS
    if password:
        options["password"] = unquote(password)
    if user:
        options["username"] = unquote(user)
    return sentinels, group, options


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
        "redis://host:port/db, rediss://host:port/db, unix:///path/to/socket or "
        "sentinel://host:port,host:port/group/db are allowed"
    )
