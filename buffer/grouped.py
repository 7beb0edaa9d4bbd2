"""Script calls that share round trips.

Owns: gathering calls while an earlier group is under way, and handing each its own answer. Does not
own: what scripts do, errors of one call (scripts). Invariant: a call returns only after Redis
answered it; a call that fails does not fail its neighbours.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import redis

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
    read. Under load a group pays for them once; on an idle client a call goes out at once.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: list[_Call] = []
        self._sender: asyncio.Task[None] | None = None

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
        async with self._client.pipeline(transaction=False) as pipeline:
            for call in group:
                pipeline.evalsha(call.sha1, 1, *call.words)
            return await pipeline.execute(raise_on_error=False)
