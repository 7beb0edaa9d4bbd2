"""Leased groups on their way to the trainer.

Owns: reading the turns of leased groups and making records of them while later ones are under
way. Does not own: leases (reader, scripts), bytes (codec). Invariant: a group that is damaged or of
another release is told by name and does not disturb those after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import redis

from outloop.buffer import codec
from outloop.buffer.connect import replies
from outloop.buffer.errors import UNREADABLE, OutloopError, RecordError
from outloop.buffer.records import Group, Turn
from outloop.buffer.stored import trajectory_of, turns_from

LeaseRow = tuple[str, int, int, str, Sequence[str]]
"""group_id, slot, size, task_id, episode ids: as the script take packs it."""
_AT_ONCE_BYTES = 2**18
"""Turns are decoded many at once, but while the processor's cache still holds them."""


def leased_groups(
    client: redis.Redis, prefix: str, rows: Sequence[LeaseRow], facts: Sequence[Any]
) -> Iterator[tuple[str, Group | OutloopError]]:
    """(group_id, the group or what is wrong with it), in the order of `rows`.

    Args:
        facts: opening, closure, reward and time of closing of each episode, in order.

    Raises:
        redis.RedisError: the turns could not be read.
    """
    commands = [
        ("LRANGE", f"{prefix}episode:{episode_id}:turns", "0", "-1")
        for row in rows
        for episode_id in row[4]
    ]
    at = 0
    with codec.many_at_once(), closing(replies(client, commands)) as stored:
        for row in rows:
            fields = [facts[at + 4 * i : at + 4 * i + 4] for i in range(len(row[4]))]
            at += 4 * len(row[4])
            answers = itertools.islice(stored, len(row[4]))
            try:
                yield row[0], _group_from(row, fields, answers)
            except UNREADABLE as error:
                for _ in answers:
                    pass
                yield row[0], error


def _group_from(row: LeaseRow, fields: Sequence[Any], answers: Iterator[list[bytes]]) -> Group:
    group_id, slot, size, task_id, episode_ids = row
    trajectories = [
        trajectory_of(episode_id, facts, turns)
        for episode_id, facts, turns in zip(
            episode_ids, fields, _turns(episode_ids, answers), strict=True
        )
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


def _turns(episode_ids: Sequence[str], answers: Iterator[list[bytes]]) -> Iterator[list[Turn]]:
    """The turns of each episode."""
    waiting: list[tuple[str, list[bytes]]] = []
    num_bytes = 0
    for episode_id, answer in zip(episode_ids, answers, strict=True):
        waiting.append((episode_id, answer))
        num_bytes += sum(map(len, answer))
        if num_bytes >= _AT_ONCE_BYTES:
            yield from _decoded(waiting)
            waiting, num_bytes = [], 0
    yield from _decoded(waiting)


def _decoded(episodes: Sequence[tuple[str, Sequence[bytes]]]) -> Iterator[list[Turn]]:
    try:
        turns = iter(codec.decode_turns([record for _, some in episodes for record in some]))
    except UNREADABLE:
        for episode_id, some in episodes:
            turns_from(episode_id, some)
        raise
    for _, some in episodes:
        yield list(itertools.islice(turns, len(some)))
