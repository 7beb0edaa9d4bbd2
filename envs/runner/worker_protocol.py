"""Messages between a runner and its worker processes.

A frame is four bytes of length and one message in MessagePack. Keys of single episodes are the only
keys in them.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from outloop.buffer.errors import OutloopError
from outloop.envs.rollout.episode_result import EpisodeResult
from outloop.envs.rollout.rollout_function import Kind
from outloop.envs.runner.router_client import OpenedClaim

_HEADER = struct.Struct("<I")


class Job(msgspec.Struct, frozen=True):
    """One episode to play."""

    number: int
    """Above 0; identifies the episode in the shared marker."""
    opened: OpenedClaim
    deadline: float
    """Unix seconds."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker: its settings."""

    env: str
    """EnvSettings as JSON."""
    hidden: tuple[str, ...]
    """Files and folders that agent programs must not see."""
    max_episodes: int
    log_level: str


class Play(msgspec.Struct, frozen=True, tag=True):
    """To a worker: play these; several jobs are one batch of a batch function."""

    jobs: tuple[Job, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To a worker: cancel all episodes, tear down and end."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a worker: it can play."""

    kind: Kind
    max_episodes: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From a worker: the user's code cannot be used; it ends."""

    sentence: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """From a worker: an episode has ended."""

    number: int
    ending: EpisodeResult


class Played(msgspec.Struct, frozen=True, tag=True):
    """From a worker: the function that played a batch returned."""


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """From a worker: the number of its threads in blocking calls past their deadline."""

    num_threads: int


ToWorker = Begin | Play | Stop
FromWorker = Ready | Refused | Ended | Played | Stuck
_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    """The bytes of a message.

    Raises:
        OutloopError: it holds what MessagePack cannot, for example an integer above 64 bits.
    """
    try:
        data = _encoder.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        name = type(message).__name__
        raise OutloopError(
            f"a message of the type {name} between a runner and its worker process cannot be "
            f"encoded: {error}"
        ) from error
    return _HEADER.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The bytes of the next message; None if the other side closed the socket."""
    try:
        (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
