"""Commands and script calls that share round trips."""

from __future__ import annotations

import asyncio
from typing import Any

import redis
import redis.asyncio

from outloop.buffer.redis.scripts import (
    Argument,
    AsyncScripts,
    Clock,
    check_copies,
    load_script,
    wait_command,
)

_MAX_BATCH = 256
_GIVEN_UP = redis.ConnectionError("the connection was closed")
_Call = tuple[tuple[Argument, ...], "asyncio.Future[Any]"]


class PipelinedCommands:
    """Sends concurrent commands together, in the order in which they were given.

    Those given while one pipeline is in flight are collected for the next. Each gets its own
    answer; one that fails does not fail the others.
    """

    def __init__(self, client: redis.asyncio.Redis, min_replicas: int) -> None:
        """`min_replicas`: so many have what a command wrote before it is answered."""
        self._client = client
        self._min_replicas = min_replicas
        self._waiting: list[_Call] = []
        self._sending: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Fail the commands that wait."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        for *_, answer in self._waiting:
            _settle(answer, _GIVEN_UP)
        self._waiting.clear()

    async def execute(self, command: tuple[Argument, ...]) -> Any:
        """The answer to a command; raises redis-py's errors."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
            error: Exception = _GIVEN_UP
            answers: list[Any] | None = None
            try:
                async with self._client.pipeline(transaction=False) as pipeline:
                    for command, _ in batch:
                        pipeline.execute_command(*command)
                    if self._min_replicas:
                        pipeline.execute_command(*wait_command(self._min_replicas))
                    answers = await pipeline.execute(raise_on_error=False)
                if self._min_replicas:
                    _refuse_without_copies(answers, self._min_replicas)
            except redis.RedisError as broken:
                error = broken
            finally:
                for index, (_, future) in enumerate(batch):
                    _settle(future, error if answers is None else answers[index])


class PipelinedScripts(AsyncScripts):
    """AsyncScripts that send concurrent calls as PipelinedCommands."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        meta_key: str,
        clock: Clock | None = None,
        *,
        min_replicas: int = 0,
    ) -> None:
        super().__init__(client, meta_key, clock, min_replicas=min_replicas)
        self._commands = PipelinedCommands(client, min_replicas)

    async def close(self) -> None:
        """Fail the calls that wait."""
        await self._commands.close()

    async def execute(self, name: str, arguments: tuple[Argument, ...]) -> Any:
        """As AsyncScripts.execute."""
        try:
            return await self._commands.execute(("EVALSHA", load_script(name).sha1, 1, *arguments))
        except redis.exceptions.NoScriptError:
            return await super().execute(name, arguments)


def _refuse_without_copies(answers: list[Any], min_replicas: int) -> None:
    """Take the answer to the last command, and make every call's answer its error if it is one."""
    try:
        check_copies(answers.pop(), min_replicas)
    except redis.RedisError as error:
        answers[:] = [error] * len(answers)


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    """Give the answer, or raise the error that it is, in the caller if it still waits."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
