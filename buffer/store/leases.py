"""Leased groups on their way to the trainer.

Owns: reading the episodes of leased groups and making records of them while later ones are under
way. Does not own: leases (reader, scripts), bytes (codec). Invariant: a group that is damaged or of
another release is told by name and does not disturb those after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import redis

from outloop.buffer.codec import records_codec
from outloop.buffer.errors import UNREADABLE, OutloopError, RecordError
from outloop.buffer.records import Group, Turn
from outloop.buffer.redis.client import replies
from outloop.buffer.store.episodes import EPISODE_FIELDS, Fields, trajectory_of, turns_from

LeaseRow = tuple[str, int, int, str, Sequence[str]]
"""group_id, slot, size, task_id, episode ids: as the script take packs it."""
_Stored = tuple[str, Fields, Sequence[bytes]]
"""episode_id, what its hash holds, records of its turns."""
_AT_ONCE_BYTES = 2**18
"""Turns are decoded many at once, but while the processor's cache still holds them."""


def leased_groups(
    client: redis.Redis, prefix: str, rows: Sequence[LeaseRow]
) -> Iterator[tuple[str, Group | OutloopError]]:
    """(group_id, the group or what is wrong with it), in the order of `rows`.

    Raises:
        redis.RedisError: the episodes could not be read.
    """
    requests = [
        (
            ("HMGET", f"{prefix}episode:{episode_id}", *EPISODE_FIELDS),
            ("LRANGE", f"{prefix}episode:{episode_id}:turns", "0", "-1"),
        )
        for row in rows
        for episode_id in row[4]
    ]
    with records_codec.many_at_once(), closing(replies(client, requests)) as stored:
        for row in rows:
            answers = itertools.islice(stored, len(row[4]))
            try:
                yield row[0], _group_from(row, answers)
            except UNREADABLE as error:
                for _ in answers:
                    pass
                yield row[0], error


def _group_from(row: LeaseRow, answers: Iterator[list[Any]]) -> Group:
    group_id, slot, size, task_id, episode_ids = row
    trajectories = [
        trajectory_of(episode_id, fields, turns)
        for episode_id, fields, turns in _episodes(episode_ids, answers)
    ]
    trajectories.sort(key=lambda trajectory: trajectory.episode.attempt)
    if any(trajectory.episode.reward is None for trajectory in trajectories):
        raise RecordError(f"group_id={group_id}: an episode lacks its reward")
    return Group(
        group_id=group_id,
        slot=slot,
        task_id=task_id,
        group_size=size,
        trajectories=tuple(trajectories),
    )


def _episodes(
    episode_ids: Sequence[str], answers: Iterator[list[Any]]
) -> Iterator[tuple[str, Fields, list[Turn]]]:
    """Each episode with its stored fields and its turns."""
    waiting: list[_Stored] = []
    num_bytes = 0
    for episode_id, (fields, records) in zip(episode_ids, answers, strict=True):
        waiting.append((episode_id, fields, records))
        num_bytes += sum(map(len, records))
        if num_bytes >= _AT_ONCE_BYTES:
            yield from _decoded(waiting)
            waiting, num_bytes = [], 0
    yield from _decoded(waiting)


def _decoded(episodes: Sequence[_Stored]) -> Iterator[tuple[str, Fields, list[Turn]]]:
    try:
        turns = iter(
            records_codec.decode_turns([record for *_, records in episodes for record in records])
        )
    except UNREADABLE:
        for episode_id, _, records in episodes:
            turns_from(episode_id, records)
        raise
    for episode_id, fields, records in episodes:
        yield episode_id, fields, list(itertools.islice(turns, len(records)))
