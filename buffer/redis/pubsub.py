"""What the processes of a run tell each other and nobody keeps.

Owns: messages over Redis's publish and subscribe, the subscription and its renewal. Does not own:
what messages mean. Invariant: all who listen to a name hear its messages in one order; a message
that nobody listened to is lost, so whoever sends one must do without its being heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import redis.asyncio
import structlog

from outloop.buffer.errors import BufferUnavailable
from outloop.buffer.redis.client import translated

_SILENCE_S = 15.0
"""After so long without a word the connection is asked whether it is still there."""
_AGAIN_S = 1.0
_log = structlog.get_logger()


class Channel:
    """Messages of one run; part of the async face."""

    def __init__(self, client: redis.asyncio.Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._is_listening = asyncio.Event()

    async def publish(self, name: str, message: bytes) -> int:
        """Tell all who listen to `name`; returns how many they are.

        Raises:
            BufferUnavailable: Redis did not take it.
        """
        with translated(f"telling {name!r}"):
            return int(await self._client.publish(f"{self._prefix}{name}", message))

    async def num_listening(self, name: str) -> int:
        """How many listen to `name`.

        Raises:
            BufferUnavailable: Redis does not say.
        """
        with translated(f"counting who listens to {name!r}"):
            ((_, number),) = await self._client.pubsub_numsub(f"{self._prefix}{name}")
        return int(number)

    async def is_listening(self, timeout_s: float) -> bool:
        """True as soon as listen() hears what is published, False when it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._is_listening.wait()
        except TimeoutError:
            return False

    async def listen(self, hear: Mapping[str, Callable[[bytes], None]]) -> None:
        """Hand on every message by its name, until cancelled; a lost connection is made again.

        To be called once.
        """
        told = ""
        while True:
            try:
                with translated(f"listening to {', '.join(hear)}"):
                    await self._listen(hear)
            except BufferUnavailable as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("channel_lost", error=told)
            finally:
                self._is_listening.clear()
            await asyncio.sleep(_AGAIN_S)

    async def _listen(self, hear: Mapping[str, Callable[[bytes], None]]) -> None:
        by_name = {f"{self._prefix}{name}".encode(): one for name, one in hear.items()}
        pool: Any = self._client.connection_pool
        connection = pool.make_connection()
        try:
            await pool.ensure_connection(connection)
            await connection.send_command("SUBSCRIBE", *by_name)
            for _ in by_name:
                await connection.read_response()
            self._is_listening.set()
            while True:
                said = await connection.read_response(timeout=_SILENCE_S)
                if said is None:
                    await connection.send_command("PING")
                    said = await connection.read_response()
                if said[0] == b"message":
                    by_name[said[1]](said[2])
        finally:
            await connection.disconnect(nowait=True)
