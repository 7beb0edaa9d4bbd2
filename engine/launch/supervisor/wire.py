"""What launcher and supervisor say to each other, over a Unix socket of the run's owner.

Each message is its length in four bytes and msgpack. The launcher asks and the supervisor answers,
one by one.
"""

from __future__ import annotations

import socket

import msgspec

from outloop.engine.launch.processes import Fsync

_LENGTH_BYTES = 4


class PartFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A part that the supervisor started."""

    pid: int
    exit_code: int | None
    log_path: str
    age_s: float


class RedisFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The run's own Redis."""

    pid: int
    exit_code: int | None
    url: str


class Lead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a launcher; `digest` of its settings. Answered by `Led`, or not at all
    where the parts were started with other settings: the supervisor stops them and ends."""

    digest: str


class StartPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `PartFacts`; a part of that name has ended."""

    name: str
    command: tuple[str, ...]
    log_path: str
    environment: dict[str, str]
    stop_order: int
    stop_timeout_s: float


class LookAtPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `PartFacts`."""

    name: str


class StopPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `PartFacts` when it has ended."""

    name: str
    timeout_s: float


class ReadLastWords(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by a text."""

    name: str
    num_lines: int


class StartRedis(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `RedisFacts`, once it answers."""

    data_dir: str
    fsync: Fsync
    max_memory_mb: int


class StartRedisAgain(msgspec.Struct, frozen=True, tag=True):
    """After it ended by itself; answered by `RedisFacts` at once."""


class LookAtRedis(msgspec.Struct, frozen=True, tag=True):
    """Answered by `RedisFacts`."""


class StopRedis(msgspec.Struct, frozen=True, tag=True):
    """Answered by None when it has ended."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Stop what is left, and end. Answered by the end of the connection."""


Request = (
    Lead
    | StartPart
    | LookAtPart
    | StopPart
    | ReadLastWords
    | StartRedis
    | StartRedisAgain
    | LookAtRedis
    | StopRedis
    | End
)


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for, or why it could not be done."""

    part: PartFacts | None = None
    redis: RedisFacts | None = None
    parts: dict[str, PartFacts] | None = None
    """Of `Lead`: every part that was started."""
    text: str | None = None
    refused: str | None = None
    """A sentence; the settings are wrong."""
    failed: str | None = None
    """A sentence; something else is."""


_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def send(connection: socket.socket, message: Request | Answer) -> None:
    """Send it whole.

    Raises:
        OSError: the other side is gone, or takes nothing.
    """
    data = _encoder.encode(message)
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def read_request(connection: socket.socket) -> Request | None:
    """The next one; None: the launcher is gone, or none.

    Raises:
        TimeoutError: it did not come within the connection's time limit.
    """
    data = _read(connection)
    try:
        return None if data is None else _requests.decode(data)
    except msgspec.MsgspecError:
        return None


def read_answer(connection: socket.socket) -> Answer | None:
    """The next one; None: the supervisor is gone.

    Raises:
        TimeoutError: it did not come within the connection's time limit.
    """
    data = _read(connection)
    return None if data is None else _answers.decode(data)


def _read(connection: socket.socket) -> bytes | None:
    head = _read_exactly(connection, _LENGTH_BYTES)
    return None if head is None else _read_exactly(connection, int.from_bytes(head, "big"))


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    found = bytearray()
    while len(found) < num_bytes:
        try:
            piece = connection.recv(num_bytes - len(found))
        except ConnectionError:
            return None
        if not piece:
            return None
        found += piece
    return bytes(found)
