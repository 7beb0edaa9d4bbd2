"""Clients of Redis, made in one place.

Owns: every option of the redis-py clients, and the translation of its errors. Does not own: keys
or scripts. Invariant: no client retries a command by itself (a retried write may be applied
twice), and no redis-py exception leaves this package untranslated.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hiredis
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from outloop.buffer.errors import BufferUnavailable, SettingsError

SOCKET_TIMEOUT_S = 30.0
"""Longest silence of the server in one command; blocking commands must ask for much less."""
CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""Per process and event loop; further commands wait for a free connection."""
_MAX_WINDOW = 64
_WINDOW_BYTES = 2**17
"""About so much is under way while what came before is decoded, or while more is encoded."""

_LARGE_PIECE_BYTES = 6144
"""From this mean size on, handing pieces to the socket one by one costs less than joining them."""

Word = bytes | tuple[Sequence[Any], int]
"""One word of a command; a large one in pieces, bytes and arrays, and their number of bytes."""

_ADVICE = (
    (
        "maxmemory",
        "; it is full: raise buffer.max_memory_mb (or the server's maxmemory), or let the trainer "
        "catch up. Nothing was evicted",
    ),
    ("MISCONF", "; it cannot write to its disk: free space where its data folder is"),
    (
        "good replicas",
        "; its replicas are missing: bring them back, or lower its min-replicas-to-write",
    ),
    ("read only replica", "; point buffer.redis_url at the primary"),
    ("no permissions", "; give its user the rights that docs/buffer-keys.md lists"),
)
"""What the error's text holds, and what to do then."""


def connect_sync(url: str) -> redis.Redis:
    """A blocking client for `url` (redis://, rediss:// or unix://); connects at the first command.

    Raises:
        SettingsError: the URL cannot be read.
    """
    try:
        pool = redis.BlockingConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **_options())
    except ValueError as error:
        raise _bad_url(url, error) from error
    return redis.Redis.from_pool(pool)


def connect_async(url: str) -> redis.asyncio.Redis:
    """An asyncio client for `url`; belongs to the event loop that uses it first.

    Raises:
        SettingsError: the URL cannot be read.
    """
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, retry=AsyncRetry(NoBackoff(), 0), **_options()
        )
    except ValueError as error:
        raise _bad_url(url, error) from error
    return redis.asyncio.Redis.from_pool(pool)


def replies(
    client: redis.Redis, requests: Sequence[Sequence[tuple[Any, ...]]]
) -> Generator[list[list[Any]]]:
    """The answers to the commands of each request, lists, in order, while later ones are on
    their way.

    Whoever reads them slowly, because he decodes what he got, does so while the server works. A
    server answers all it was asked before it writes anything, so it is asked for a little at a
    time: it would keep its reader waiting otherwise, and then be kept waiting by him. What the
    last command of a request gives is taken to be the most of it.

    Raises:
        redis.RedisError: as a pipeline would; an answer that is an error, at its place.
    """
    pool = client.connection_pool
    connection = pool.get_connection()
    asked = num_unread = 0
    num_bytes = 1
    try:
        line = _Line(connection)
        for number, request in enumerate(requests):
            # Bytes of an answer so far: about so many more may be under way.
            window = _WINDOW_BYTES * max(number, 1) // num_bytes if number else 1
            window = min(max(window, 1), _MAX_WINDOW)
            if asked < len(requests) and num_unread <= window:
                some = requests[asked : number + 2 * window]
                num_unread += len(some)
                asked += len(some)
                line.send([hiredis.pack_command(words) for one in some for words in one])
            answers: list[list[Any]] = [line.receive() for _ in request]
            num_unread -= 1
            num_bytes += sum(map(len, answers[-1]))
            yield answers
    finally:
        if num_unread:
            # Its next user must not get these answers.
            connection.disconnect()
        pool.release(connection)


class _Line:
    """Commands and answers on the socket of a redis-py connection that waits for none.

    redis-py has no public way to its socket. Its own way to an answer takes more time than hiredis
    takes to read it.
    """

    def __init__(self, connection: Any) -> None:
        self._socket: socket.socket = connection._sock
        self._reader: Any = hiredis.Reader(
            protocolError=redis.InvalidResponse, replyError=redis.ResponseError
        )
        self._received = bytearray(_WINDOW_BYTES)

    def send(self, commands: Sequence[bytes]) -> None:
        """Send packed commands; raises as receive."""
        try:
            self._socket.sendall(b"".join(commands))
        except OSError as error:
            raise _lost(error) from error

    def receive(self) -> Any:
        """The next answer.

        Raises:
            redis.RedisError: the answer is an error, or there is none.
        """
        while (answer := self._reader.gets()) is False:
            try:
                number = self._socket.recv_into(self._received)
            except OSError as error:
                raise _lost(error) from error
            if number == 0:
                raise redis.ConnectionError("the server closed the connection")
            self._reader.feed(self._received, 0, number)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _lost(error: OSError) -> redis.RedisError:
    if isinstance(error, TimeoutError):
        return redis.TimeoutError("no answer within the socket's timeout")
    return redis.ConnectionError(str(error) or type(error).__name__)


async def send(client: redis.asyncio.Redis, commands: Iterable[Sequence[Word]]) -> None:
    """Have commands executed whose answers say no more than that they were.

    As a pipeline, but that commands are sent while later ones are made, and that a word in pieces
    is copied once at most on its way to the socket.

    Raises:
        redis.RedisError: one was refused; those before and after it were executed.
    """
    pool = client.connection_pool
    connection = await pool.get_connection()
    allowed_s, connection.socket_timeout = connection.socket_timeout, None
    refused: redis.RedisError | None = None
    num_unread = 0
    is_complete = False
    try:
        # One deadline, set anew with each step: the connection's own is a task for each.
        async with asyncio.timeout(SOCKET_TIMEOUT_S) as silence:
            clock = asyncio.get_running_loop().time
            for data, number in _windows(commands):
                num_unread += number
                await connection.send_packed_command(data, check_health=False)
                silence.reschedule(clock() + SOCKET_TIMEOUT_S)
            for _ in range(num_unread):
                try:
                    await connection.read_response(timeout=math.inf)
                except redis.ResponseError as error:
                    refused = refused or error
        is_complete = True
    except TimeoutError as error:
        raise redis.TimeoutError(f"no answer within {SOCKET_TIMEOUT_S} s") from error
    finally:
        connection.socket_timeout = allowed_s
        if not is_complete:
            # Its next user must not get the answers that are still to come.
            await connection.disconnect(nowait=True)
        await pool.release(connection)
    if refused is not None:
        raise refused


def _windows(
    commands: Iterable[Sequence[Word]],
) -> Iterator[tuple[bytes | list[bytes | memoryview], int]]:
    """(what goes over the wire, number of commands), part by part."""
    parts: list[Any] = []
    number = num_bytes = 0
    for command in commands:
        number += 1
        parts.append(b"*%d\r\n" % len(command))
        for word in command:
            if isinstance(word, bytes):
                parts.append(b"$%d\r\n%b\r\n" % (len(word), word))
            else:
                pieces, size = word
                parts.append(b"$%d\r\n" % size)
                parts += pieces
                parts.append(b"\r\n")
                num_bytes += size
        if num_bytes >= _WINDOW_BYTES:
            yield _packed(parts, num_bytes), number
            parts, number, num_bytes = [], 0, 0
    if number:
        yield _packed(parts, num_bytes), number


def _packed(parts: Sequence[Any], num_bytes: int) -> bytes | list[bytes | memoryview]:
    """One piece, or the large ones as they are: the kernel copies them anyway."""
    if num_bytes < _LARGE_PIECE_BYTES * len(parts):
        return b"".join(parts)
    return [part if isinstance(part, bytes) else part.data.cast("B") for part in parts if len(part)]


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn redis-py's errors into BufferUnavailable that says that `what` failed and why."""
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
        # Redis 6.2 wraps what a script ran into: only the text tells which error it was.
        text = str(error)
        advice = next((advice for sign, advice in _ADVICE if sign in text), "")
        raise BufferUnavailable(
            f"{what}: Redis refused ({type(error).__name__}: {text}){advice}"
        ) from error


def _options() -> dict[str, Any]:
    return {
        "socket_timeout": SOCKET_TIMEOUT_S,
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
        "redis://host:port/db, rediss://host:port/db or unix:///path/to/socket are allowed"
    )
