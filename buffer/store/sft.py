"""Trajectories for supervised training: staged by plain SETs, then stored by one script.

Passing the records to the script itself would copy each of them twice more, which costs half of the
speed. Staged records that no script stores expire.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import redis
import redis.asyncio

from outloop.buffer.redis.client import translated
from outloop.buffer.redis.scripts import AsyncScripts, SyncScripts

_STAGED_MS = 600_000
_CHUNK = 64
_CHUNK_BYTES = 8 * 2**20
_WHAT = "storing trajectories"


def put_sync(
    client: redis.Redis,
    prefix: str,
    scripts: SyncScripts,
    records: Iterable[bytes],
    *,
    key: str,
    final: bool,
) -> None:
    """Store `records` for supervised training, once per key; an iterator is read in chunks.

    Raises:
        BufferUnavailable: Redis is unreachable or full; nothing was stored.
        Gone: the staged records expired before they were stored.
    """
    token, number = uuid.uuid4().hex, 0
    with translated(_WHAT), client.pipeline(transaction=False) as pipeline:
        for chunk in _chunks(records):
            for record in chunk:
                pipeline.set(_staged(prefix, token, number), record, px=_STAGED_MS)
                number += 1
            pipeline.execute()
    scripts.call("put_trajectories", key, int(final), token, number, what=_WHAT)


async def put_async(
    client: redis.asyncio.Redis,
    prefix: str,
    scripts: AsyncScripts,
    records: Iterable[bytes],
    *,
    key: str,
    final: bool,
) -> None:
    """As put_sync."""
    token, number = uuid.uuid4().hex, 0
    with translated(_WHAT):
        async with client.pipeline(transaction=False) as pipeline:
            for chunk in _chunks(records):
                for record in chunk:
                    pipeline.set(_staged(prefix, token, number), record, px=_STAGED_MS)
                    number += 1
                await pipeline.execute()
    await scripts.call("put_trajectories", key, int(final), token, number, what=_WHAT)


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


def _staged(prefix: str, token: str, number: int) -> str:
    return f"{prefix}staged:{token}:{number}"


def _chunks(records: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Parts that are sent at once."""
    chunk: list[bytes] = []
    num_bytes = 0
    for record in records:
        chunk.append(record)
        num_bytes += len(record)
        if num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
