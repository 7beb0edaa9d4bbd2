"""Reading one episode as it stands.

Owns: which keys an episode is read from, those of the lost episodes that it resumes included. Does
not own: bytes of a field (codec, stored). Invariant: an episode that is being written is read whole
up to some turn, never with a hole.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio

from outloop.buffer.records import OpenEpisode
from outloop.buffer.redis.client import translated
from outloop.buffer.store.episodes import OPEN_EPISODE_FIELDS, open_episode_from


async def load_async(
    client: redis.asyncio.Redis, prefix: str, episode_id: str
) -> OpenEpisode | None:
    """The episode, with what those that it resumes recorded and it has not asked for yet."""
    name = f"{prefix}episode:{episode_id}"
    with translated(f"loading episode_id={episode_id}"):
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.hmget(name, list(OPEN_EPISODE_FIELDS))
            pipeline.lrange(f"{name}:turns", 0, -1)
            fields, turns = await pipeline.execute()
        earlier: list[Any] = []
        source: Any = fields[4]
        while source is not None:
            name = f"{prefix}episode:{source.decode()}"
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.lrange(f"{name}:turns", 0, -1)
                pipeline.hget(name, "resumes")
                recorded, source = await pipeline.execute()
            earlier.append(recorded)
    return open_episode_from(fields, turns, earlier)


def load_sync(client: redis.Redis, prefix: str, episode_id: str) -> OpenEpisode | None:
    """The episode and its own turns."""
    name = f"{prefix}episode:{episode_id}"
    with (
        translated(f"loading episode_id={episode_id}"),
        client.pipeline(transaction=True) as pipeline,
    ):
        pipeline.hmget(name, list(OPEN_EPISODE_FIELDS))
        pipeline.lrange(f"{name}:turns", 0, -1)
        fields, turns = pipeline.execute()
    return open_episode_from(fields, turns)
