"""The state transitions of the buffer: one Lua script each; its header is its contract.

A script is called by its hash. If Redis does not know it, nothing was executed, and the script is
sent.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NoReturn

import redis
import redis.asyncio

from outloop.buffer.errors import (
    BufferLost,
    Conflict,
    FenceExpired,
    Gone,
    NotFound,
    OutloopError,
    TooManyReplaced,
)
from outloop.buffer.redis.client import translated
from outloop.buffer.redis.outage import Continuity, Patience

Argument = bytes | str | int | float
Clock = Callable[[], float]
"""Unix seconds, for tests. Without one, scripts use the clock of Redis, the same for all."""


class Abandoned(Gone):
    """A turn of a version that a rollback abandoned; the caller gives up its attempt."""


_REPLICAS_TIMEOUT_MS = 1000
_REFUSALS: dict[str, type[OutloopError]] = {
    "abandoned": Abandoned,
    "not_found": NotFound,
    "gone": Gone,
    "conflict": Conflict,
    "fence": FenceExpired,
    "replaced": TooManyReplaced,
}
_PARTS: dict[str, tuple[str, ...]] = {
    "init_run": (),
    "append_turn": ("core",),
    "note_refusal": ("core",),
    "put_fields": ("core",),
}
"""Scripts that do not have both core.lua and lifecycle.lua in front, and which they have."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script, with the Lua files in front of it."""

    name: str
    text: str
    sha1: str


@functools.cache
def load_script(name: str) -> Script:
    """The script `name`.lua of this package, checkout or wheel."""
    text = "".join(map(_read, (*_PARTS.get(name, ("core", "lifecycle")), name)))
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return files(__name__).joinpath(f"{name}.lua").read_text(encoding="ascii")


def refuse(code: str, sentence: str, what: str) -> NoReturn:
    """Raise the error for a script's refusal of `what`."""
    if code == "empty":
        raise BufferLost(
            f"{what}: the run's data is not in this Redis (its meta key is missing); it was "
            "emptied or is another server than the run was started with. Restore its data folder, "
            "or start the run again to resume from the last checkpoint"
        )
    raise _REFUSALS[code](f"{what}: {sentence}")


def refusal(code: str, sentence: str, what: str) -> OutloopError | None:
    """The error for one answer among several of a script, or None if it is `ok`."""
    return None if code == "ok" else _REFUSALS[code](f"{what}: {sentence}")


class SyncScripts:
    """The scripts of one run, through a blocking client."""

    def __init__(
        self,
        client: redis.Redis,
        meta_key: str,
        clock: Clock | None = None,
        *,
        min_replicas: int = 0,
        continuity: Continuity | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`min_replicas`: so many have what a script wrote before its call returns. `continuity`:
        counts the calls. `patience`: the client's own, which sees no errors inside a pipeline."""
        self._client = client
        self._meta_key = meta_key
        self._clock = clock
        self._min_replicas = min_replicas
        self._continuity = continuity
        self._patience = patience

    def call(self, name: str, *args: Argument, what: str, is_counted: bool = True) -> list[Any]:
        """What the script returns after its `ok`; `is_counted`: its loss would be one.

        Raises:
            BufferUnavailable: Redis did not execute it, or does not hold the run.
            NotFound, Gone, Conflict, FenceExpired, TooManyReplaced: as the script's header says.
        """
        script = load_script(name)
        with translated(what):
            arguments = (self._meta_key, _now_ms(self._clock), *args)
            continuity = self._continuity if is_counted else None
            try:
                answer = self._execute(("EVALSHA", script.sha1, 1, *arguments), continuity)
            except redis.exceptions.NoScriptError:
                answer = self._execute(("EVAL", script.text, 1, *arguments), continuity)
        return _unpack(answer, what)

    def _execute(self, command: tuple[Argument, ...], continuity: Continuity | None) -> Any:
        if self._patience is None:
            return self._send(command, continuity)
        return self._patience.call_with_retry(
            lambda: self._send(command, continuity), lambda error: None
        )

    def _send(self, command: tuple[Argument, ...], continuity: Continuity | None) -> Any:
        if not self._min_replicas and continuity is None:
            return self._client.execute_command(*command)
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command(*command)
            if continuity is not None:
                pipeline.execute_command(*continuity.count_command)
            if self._min_replicas:
                pipeline.execute_command(*wait_command(self._min_replicas))
            answer, *others = pipeline.execute(raise_on_error=False)
        if continuity is not None:
            continuity.note(others[0])
        if isinstance(answer, Exception):
            raise answer
        if self._min_replicas:
            check_copies(others[-1], self._min_replicas)
        return answer


class AsyncScripts:
    """The scripts of one run, through an asyncio client; see SyncScripts."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        meta_key: str,
        clock: Clock | None = None,
        *,
        min_replicas: int = 0,
    ) -> None:
        self._client = client
        self._meta_key = meta_key
        self._clock = clock
        self._min_replicas = min_replicas

    async def call(self, name: str, *args: Argument, what: str) -> list[Any]:
        """As SyncScripts.call."""
        try:
            answer = await self.execute(name, (self._meta_key, _now_ms(self._clock), *args))
        except redis.RedisError:
            with translated(what):
                raise
        return _unpack(answer, what)

    async def execute(self, name: str, arguments: tuple[Argument, ...]) -> Any:
        """The script's own answer; raises redis-py's errors."""
        script = load_script(name)
        try:
            return await self._run("EVALSHA", script.sha1, arguments)
        except redis.exceptions.NoScriptError:
            return await self._run("EVAL", script.text, arguments)

    async def _run(self, command: str, script: str, arguments: tuple[Argument, ...]) -> Any:
        if not self._min_replicas:
            return await self._client.execute_command(command, script, 1, *arguments)
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command(command, script, 1, *arguments)
            pipeline.execute_command(*wait_command(self._min_replicas))
            answer, copies = await pipeline.execute(raise_on_error=False)
        if isinstance(answer, Exception):
            raise answer
        check_copies(copies, self._min_replicas)
        return answer


def wait_command(min_replicas: int) -> tuple[Argument, ...]:
    """The command after which `min_replicas` have what its connection wrote before."""
    return ("WAIT", min_replicas, _REPLICAS_TIMEOUT_MS)


def check_copies(copies: Any, min_replicas: int) -> None:
    """Raise redis-py's error if the answer to `wait_command` is not enough.

    What was written is there all the same: a caller that repeats itself is answered as before.
    """
    if isinstance(copies, Exception):
        raise copies
    if copies < min_replicas:
        raise redis.RedisError(
            f"not enough good replicas: {copies} of buffer.min_replicas={min_replicas} have it"
        )


def _now_ms(clock: Clock | None) -> int:
    return 0 if clock is None else int(clock() * 1000)


def _unpack(answer: list[Any], what: str) -> list[Any]:
    code = answer[0].decode()
    if code != "ok":
        refuse(code, answer[1].decode(errors="replace"), what)
    return answer[1:]
