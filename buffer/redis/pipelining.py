"""Script calls that share round trips."""

from __future__ import annotations

import asyncio
from typing import Any

import redis

from outloop.buffer.redis.scripts import (
    Argument,
    AsyncScripts,
    check_copies,
    load_script,
    wait_command,
)

_MAX_BATCH = 256
_GIVEN_UP = redis.ConnectionError("the connection was closed")
_Call = tuple[str, tuple[Argument, ...], "asyncio.Future[Any]"]


class PipelinedScripts(AsyncScripts):
    """AsyncScripts that send concurrent calls together, in the order in which they were made.

    Calls made while one pipeline is in flight are collected for the next. Each call gets its own
    answer; one that fails does not fail the others.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: list[_Call] = []
        self._sending: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Fail the calls that wait."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        for *_, answer in self._waiting:
            _settle(answer, _GIVEN_UP)
        self._waiting.clear()

    async def execute(self, name: str, arguments: tuple[Argument, ...]) -> Any:
        """As AsyncScripts.execute."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, arguments, answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        try:
            return await answer
        except redis.exceptions.NoScriptError:
            return await super().execute(name, arguments)

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
            error: Exception = _GIVEN_UP
            answers: list[Any] | None = None
            try:
                async with self._client.pipeline(transaction=False) as pipeline:
                    for name, arguments, _ in batch:
                        pipeline.evalsha(load_script(name).sha1, 1, *arguments)
                    if self._min_replicas:
                        pipeline.execute_command(*wait_command(self._min_replicas))
                    answers = await pipeline.execute(raise_on_error=False)
                if self._min_replicas:
                    _refuse_without_copies(answers, self._min_replicas)
            except redis.RedisError as broken:
                error = broken
            finally:
                for index, (_, _, future) in enumerate(batch):
                    _settle(future, error if answers is None else answers[index])


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
