"""Large records on their way into Redis.

Owns: the keys under which records wait for the script that keeps them, for how long, and reading
them again. Does not own: the script (put_trajectories) or bytes (codec). Invariant: a record is
staged by a plain SET, because a script would copy it twice more; what no script kept expires.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import redis
import redis.asyncio

from outloop.buffer.connect import translated
from outloop.buffer.scripts import Argument, AsyncScripts, SyncScripts

_STAGED_MS = 600_000
_CHUNK = 64
_Words = tuple[Argument, ...]


class _Staged:
    """Records under a token of their own."""

    def __init__(self, prefix: str, records: Sequence[bytes]) -> None:
        self.token = uuid.uuid4().hex
        self._prefix = prefix
        self._records = records

    def fill(self, pipeline: Any) -> None:
        """The commands that stage them."""
        start = f"{self._prefix}staged:{self.token}:"
        for index, record in enumerate(self._records):
            pipeline.set(f"{start}{index}", record, px=_STAGED_MS)

    def words(self, key: str, final: bool) -> _Words:
        """What the script is told."""
        return key, int(final), self.token, len(self._records)


def put_sync(
    client: redis.Redis,
    prefix: str,
    scripts: SyncScripts,
    records: Sequence[bytes],
    *,
    key: str,
    final: bool,
) -> None:
    """Store `records` for supervised training, once per key.

    Raises:
        BufferUnavailable: Redis is unreachable or full; nothing was stored.
        Gone: they waited too long between staging and storing.
    """
    staged = _Staged(prefix, records)
    what = "storing trajectories"
    with translated(what), client.pipeline(transaction=False) as pipeline:
        staged.fill(pipeline)
        pipeline.execute()
    scripts.call("put_trajectories", *staged.words(key, final), what=what)


async def put_async(
    client: redis.asyncio.Redis,
    prefix: str,
    scripts: AsyncScripts,
    records: Sequence[bytes],
    *,
    key: str,
    final: bool,
) -> None:
    """As put_sync."""
    staged = _Staged(prefix, records)
    what = "storing trajectories"
    with translated(what):
        async with client.pipeline(transaction=False) as pipeline:
            staged.fill(pipeline)
            await pipeline.execute()
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
