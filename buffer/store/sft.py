"""Large records on their way into Redis.

Owns: the keys under which records wait for the script that keeps them, for how long, and reading
them again. Does not own: the script (put_trajectories) or bytes (codec). Invariant: a record is
staged by a plain SET, because a script would copy it twice more; what no script kept expires.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import redis
import redis.asyncio

from outloop.buffer.redis.client import Word, send, translated
from outloop.buffer.redis.scripts import Argument, AsyncScripts, SyncScripts

_STAGED_MS = 600_000
_CHUNK = 64
_Words = tuple[Argument, ...]


class _Staged:
    """Records under a token of their own."""

    def __init__(self, prefix: str, records: Iterable[Word]) -> None:
        self._token = uuid.uuid4().hex
        self._prefix = prefix
        self._records = records
        self._number = 0

    def commands(self) -> Iterator[tuple[Word, ...]]:
        """What stages them, one by one."""
        start = f"{self._prefix}staged:{self._token}:".encode()
        lasts_ms = b"%d" % _STAGED_MS
        for record in self._records:
            yield b"SET", b"%b%d" % (start, self._number), record, b"PX", lasts_ms
            self._number += 1

    def words(self, key: str, final: bool) -> _Words:
        """What the script is told once all are staged."""
        return key, int(final), self._token, self._number


def put_sync(
    client: redis.Redis,
    prefix: str,
    scripts: SyncScripts,
    records: Iterable[bytes],
    *,
    key: str,
    final: bool,
) -> None:
    """Store `records` for supervised training, once per key; they may be made one by one.

    Raises:
        BufferUnavailable: Redis is unreachable or full; nothing was stored.
        Gone: they waited too long between staging and storing.
    """
    staged = _Staged(prefix, records)
    what = "storing trajectories"
    with translated(what), client.pipeline(transaction=False) as pipeline:
        for command in staged.commands():
            pipeline.execute_command(*command)
        pipeline.execute()
    scripts.call("put_trajectories", *staged.words(key, final), what=what)


async def put_async(
    client: redis.asyncio.Redis,
    prefix: str,
    scripts: AsyncScripts,
    records: Iterable[Word],
    *,
    key: str,
    final: bool,
) -> None:
    """As put_sync, of records in parts."""
    staged = _Staged(prefix, records)
    what = "storing trajectories"
    with translated(what):
        await send(client, staged.commands())
    await scripts.call("put_trajectories", *staged.words(key, final), what=what)


def sft_records(client: redis.Redis, prefix: str) -> Iterator[bytes]:
    """Everything stored for supervised training, in the order of arrival, read a few at a time."""
    start = 0
    while True:
        names = [f"{prefix}sft:{start + index}" for index in range(_CHUNK)]
        with translated("reading trajectories"):
            found: Any = client.mget(names)
        records = [record for record in found if record is not None]
        yield from records
        start += _CHUNK
        if len(records) < _CHUNK:
            return
