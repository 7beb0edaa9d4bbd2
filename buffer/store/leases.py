"""Reads leased groups for the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import redis

from outloop.buffer.errors import UNREADABLE, OutloopError, RecordError
from outloop.buffer.records import Group
from outloop.buffer.store.episodes import EPISODE_FIELDS, Fields, Stored, trajectory_from

LeaseRow = tuple[str, int, int, str, Sequence[str], int]
"""group_id, slot, size, task_id, episode ids, age limit: as the script take packs it."""
_BYTES_AT_ONCE = 2 * 2**20
"""About how much is read in one round trip and held before it is decoded."""
_MIN_GROUP_BYTES = 2**16


def leased_groups(
    client: redis.Redis, prefix: str, rows: Sequence[LeaseRow], fields: Fields
) -> Iterator[tuple[str, Group | OutloopError]]:
    """(group_id, the group or what is wrong with it), in the order of `rows`.

    Args:
        fields: EPISODE_FIELDS of every episode in turn.

    Raises:
        redis.RedisError: the episodes could not be read.
    """
    first, num_groups = 0, 1
    headers = iter(_batched(fields, len(EPISODE_FIELDS)))
    while first < len(rows):
        part = rows[first : first + num_groups]
        stored = _read(client, prefix, part)
        stored.reverse()
        for row in part:
            # Collect the group's answers before decoding: an error must not leave some for the
            # next group. Popped, so that the next group's arrays take the memory of these bytes.
            episodes = [(episode_id, next(headers), stored.pop()) for episode_id in row[4]]
            try:
                yield row[0], _group_from(row, episodes)
            except UNREADABLE as error:
                yield row[0], error
        first += num_groups
        num_bytes = sum(len(turn) for *_, records in episodes for turn in records)
        num_groups = max(1, _BYTES_AT_ONCE // max(num_bytes, _MIN_GROUP_BYTES))


def _read(client: redis.Redis, prefix: str, rows: Sequence[LeaseRow]) -> list[Stored]:
    """The stored turns of every episode, in turn."""
    ids = [episode_id for row in rows for episode_id in row[4]]
    with client.pipeline(transaction=False) as pipeline:
        for episode_id in ids:
            pipeline.lrange(f"{prefix}episode:{episode_id}:turns", 0, -1)
        found: list[Any] = pipeline.execute()
    return found


def _batched(fields: Fields, size: int) -> Iterator[Fields]:
    for first in range(0, len(fields), size):
        yield fields[first : first + size]


def _group_from(row: LeaseRow, episodes: Sequence[tuple[str, Fields, Stored]]) -> Group:
    group_id, slot, size, task_id, *_ = row
    trajectories = [trajectory_from(*episode) for episode in episodes]
    if any(trajectory.episode.reward is None for trajectory in trajectories):
        raise RecordError(f"group_id={group_id}: an episode lacks its reward")
    trajectories.sort(key=lambda trajectory: trajectory.episode.attempt)
    return Group(
        group_id=group_id,
        slot=slot,
        task_id=task_id,
        group_size=size,
        trajectories=tuple(trajectories),
    )
