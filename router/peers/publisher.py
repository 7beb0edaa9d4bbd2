"""Telling the other router processes something, and reading what they tell.

Owns: the tasks that send messages while nobody waits for them, and what is logged of a message that
is lost or cannot be read. Does not own: what messages mean (peers, places), the connection
(channel). Invariant: nothing here raises for a message that was not sent or not understood.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import structlog

from outloop.buffer.errors import BufferUnavailable
from outloop.buffer.redis.pubsub import Channel

_Message = TypeVar("_Message")
_log = structlog.get_logger()


class Telling:
    """Messages of this process to the others."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Tell nobody anything any more."""
        for task in self._tasks:
            task.cancel()

    def tell(self, name: str, message: bytes) -> None:
        """Tell all who listen to `name`, soon."""
        self.start(self.send(name, message))

    async def send(self, name: str, message: bytes) -> None:
        """Tell all who listen to `name`, now."""
        try:
            await self._channel.publish(name, message)
        except BufferUnavailable as error:
            _log.warning("peer_not_told", name=name, error=str(error))

    def start(self, telling: Coroutine[Any, Any, None]) -> None:
        """Let it run until it is done, or all of this is closed."""
        task = asyncio.create_task(telling)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def understood(decode: Callable[[bytes], _Message], message: bytes) -> _Message | None:
    """What a message says; None: it cannot be read, which is logged."""
    try:
        return decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _log.warning("peer_not_understood", error=str(error))
        return None
