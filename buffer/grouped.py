"""Script calls that share round trips.

Owns: gathering calls while an earlier group is under way, handing each its own answer, and the
connection for that. Does not own: what scripts do, errors of one call (scripts). Invariant: a call
returns only after Redis answered it; a call that fails does not fail its neighbours; a connection
with answers that nobody read is not used again.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import hiredis
import redis.asyncio

from outloop.buffer.connect import SOCKET_TIMEOUT_S
from outloop.buffer.scripts import Argument, AsyncScripts, load_script

_MAX_GROUP = 256


@dataclass(frozen=True, slots=True)
class _Call:
    """One call that waits for its answer."""

    sha1: str
    words: tuple[Argument, ...]
    answer: asyncio.Future[Any]


class GroupedScripts(AsyncScripts):
    """AsyncScripts whose concurrent calls go out together, in the order in which they were made.

    Most of what a small command costs is its round trip: a connection taken, deadlines, a write, a
    read. Under load a group pays for them once; on an idle client a call goes out at once. One
    connection is kept for them, and one deadline holds for a group: a pool's bookkeeping and a
    deadline for each read cost more than the commands.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: list[_Call] = []
        self._sender: asyncio.Task[None] | None = None
        self._connection: Any = None

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)

    async def execute(self, name: str, words: tuple[Argument, ...]) -> Any:
        """As AsyncScripts.execute."""
        call = _Call(load_script(name).sha1, words, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        answer = await call.answer
        if isinstance(answer, redis.exceptions.NoScriptError):
            return await super().execute(name, words)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _send(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:_MAX_GROUP], self._waiting[_MAX_GROUP:]
            try:
                answers = await self._answers(group)
            except redis.RedisError as error:
                # Each call says what it was for.
                answers = [error] * len(group)
            except BaseException:
                for call in group:
                    call.answer.cancel()
                raise
            for call, answer in zip(group, answers, strict=True):
                if not call.answer.done():
                    call.answer.set_result(answer)

    async def _answers(self, group: list[_Call]) -> list[Any]:
        pool = self._client.connection_pool
        if self._connection is None:
            self._connection = pool.make_connection()
            self._connection.socket_timeout = None
        connection = self._connection
        commands = [_packed(call) for call in group]
        try:
            async with asyncio.timeout(SOCKET_TIMEOUT_S):
                await pool.ensure_connection(connection)
                await connection.send_packed_command(commands, check_health=False)
                return [await _read(connection) for _ in group]
        except TimeoutError:
            await connection.disconnect(nowait=True)
            raise redis.TimeoutError(f"no answer within {SOCKET_TIMEOUT_S:.0f} s") from None
        except BaseException:
            await connection.disconnect(nowait=True)
            raise


def _packed(call: _Call) -> bytes:
    words: Any = ("EVALSHA", call.sha1, 1, *call.words)
    return hiredis.pack_command(words)


async def _read(connection: Any) -> Any:
    """The next answer, or the error that it is."""
    try:
        return await connection.read_response(timeout=math.inf)
    except redis.ResponseError as error:
        return error
