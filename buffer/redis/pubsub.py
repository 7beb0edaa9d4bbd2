"""Messages between the processes of a run, over Redis's publish and subscribe.

All listeners of a name get its messages in the same order. A message without a listener is lost, so
a sender must not depend on its arrival.
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
_AGAIN_S = 1.0
_log = structlog.get_logger()


class Channel:
    """Messages of one run."""

    def __init__(
        self, client: redis.asyncio.Redis, prefix: str, *, silence_s: float = _SILENCE_S
    ) -> None:
        """`silence_s`: after so long without a message the connection is checked by a ping."""
        self._silence_s = silence_s
        self._client = client
        self._prefix = prefix
        self._is_listening = asyncio.Event()

    async def publish(self, name: str, message: bytes) -> int:
        """Send to all listeners of `name`; returns their number.

        Raises:
            BufferUnavailable: Redis did not accept it.
        """
        with translated(f"publishing to {name!r}"):
            return int(await self._client.publish(f"{self._prefix}{name}", message))

    async def is_listening(self, timeout_s: float) -> bool:
        """True as soon as listen() receives messages, False when it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._is_listening.wait()
        except TimeoutError:
            return False

    async def listen(self, handlers: Mapping[str, Callable[[bytes], None]]) -> None:
        """Call the handler of each message's name, until cancelled; reconnects after a loss.

        To be called once.
        """
        reported = ""
        while True:
            try:
                with translated(f"listening to {', '.join(handlers)}"):
                    await self._listen(handlers)
            except BufferUnavailable as error:
                if str(error) != reported:
                    reported = str(error)
                    _log.warning("channel_lost", error=reported)
            finally:
                self._is_listening.clear()
            await asyncio.sleep(_AGAIN_S)

    async def _listen(self, handlers: Mapping[str, Callable[[bytes], None]]) -> None:
        by_name = {f"{self._prefix}{name}".encode(): handler for name, handler in handlers.items()}
        pool: Any = self._client.connection_pool
        connection = pool.make_connection()
        try:
            await pool.ensure_connection(connection)
            await connection.send_command("SUBSCRIBE", *by_name)
            for _ in by_name:
                await connection.read_response()
            self._is_listening.set()
            while True:
                message = await connection.read_response(timeout=self._silence_s)
                if message is None:
                    await connection.send_command("PING")
                    message = await connection.read_response()
                if message[0] == b"message":
                    by_name[message[1]](message[2])
        finally:
            await connection.disconnect(nowait=True)
