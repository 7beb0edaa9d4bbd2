"""Episodes as Redis stores them, read back as records.

Damaged data raises RecordError or SchemaMismatch, nothing else; the sentence names the episode and
the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis
import redis.asyncio

from outloop.buffer.codec import records_codec
from outloop.buffer.errors import UNREADABLE, RecordError, SchemaMismatch
from outloop.buffer.records import OpenEpisode, Trajectory, Turn, check_turns
from outloop.buffer.redis.client import translated

EPISODE_FIELDS = ("opening", "closure", "reward", "closed", "refusals")
"""The fields to read from an episode's hash, in this order."""
_OPEN_EPISODE_FIELDS = (*EPISODE_FIELDS, "resumes")
"""The same for an episode that may be open."""
Fields = Sequence[bytes | None]
Stored = Sequence[bytes]
"""The turns of an episode as they are stored."""


async def load_async(
    client: redis.asyncio.Redis, prefix: str, episode_id: str
) -> OpenEpisode | None:
    """The episode as it is now; None if unknown.

    `recorded` holds the turns of the episodes that it resumes and that it has not replayed.
    """
    name = f"{prefix}episode:{episode_id}"
    with translated(f"loading episode_id={episode_id}"):
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.hmget(name, list(_OPEN_EPISODE_FIELDS))
            pipeline.lrange(f"{name}:turns", 0, -1)
            fields, own = await pipeline.execute()
        earlier: list[Stored] = []
        source: Any = fields[5]
        while source is not None:
            earlier_id = source.decode()
            name = f"{prefix}episode:{earlier_id}"
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.lrange(f"{name}:turns", 0, -1)
                pipeline.hget(name, "resumes")
                listed, source = await pipeline.execute()
            earlier.append(listed)
    return open_episode_from(fields, own, earlier)


def load_sync(client: redis.Redis, prefix: str, episode_id: str) -> OpenEpisode | None:
    """The episode as it is now, without turns of other episodes; None if unknown."""
    name = f"{prefix}episode:{episode_id}"
    what = f"loading episode_id={episode_id}"
    with translated(what), client.pipeline(transaction=True) as pipeline:
        pipeline.hmget(name, list(_OPEN_EPISODE_FIELDS))
        pipeline.lrange(f"{name}:turns", 0, -1)
        fields, own = pipeline.execute()
    return open_episode_from(fields, own)


def read_stored(
    client: redis.Redis,
    prefix: str,
    episode_ids: Sequence[str],
    fields: Sequence[str],
) -> list[tuple[Fields, Stored]]:
    """Some fields of each episode's hash, and its turns; all episodes are read together."""
    with client.pipeline(transaction=False) as pipeline:
        for episode_id in episode_ids:
            name = f"{prefix}episode:{episode_id}"
            pipeline.hmget(name, list(fields))
            pipeline.lrange(f"{name}:turns", 0, -1)
        answers = pipeline.execute()
    return list(zip(answers[::2], answers[1::2], strict=True))


def open_episode_from(
    fields: Fields, turns: Stored, earlier: Sequence[Stored] = ()
) -> OpenEpisode | None:
    """The episode from its stored fields; None without an opening.

    Args:
        fields: EPISODE_FIELDS, resumes.
        earlier: the turns of the episodes that it resumes, the newest episode first.
    """
    if fields[0] is None:
        return None
    closure = None if fields[1] is None else records_codec.decode_closure(fields[1])
    opening = records_codec.decode_opening(fields[0])
    own = tuple(_turns_from(opening.episode_id, turns))
    return OpenEpisode(
        opening=opening,
        turns=own,
        is_closed=closure is not None,
        outcome=None if closure is None else closure.outcome,
        reward=None if fields[2] is None else records_codec.decode_reward(fields[2]),
        failure_kind=None if closure is None else closure.failure_kind,
        error="" if closure is None else closure.error,
        output="" if closure is None else closure.output,
        refusals=records_codec.decode_refusals(fields[4]),
        resumes=None if fields[5] is None else fields[5].decode(),
        recorded=_recorded(own, earlier),
    )


def trajectory_from(episode_id: str, fields: Fields, turns: Stored) -> Trajectory:
    """The closed episode with its turns, from its EPISODE_FIELDS and its turns as they are stored.

    Raises:
        RecordError: it is not closed, or a record is damaged or belongs to another episode.
        SchemaMismatch: a record was written by another release.
    """
    opening, closure, reward, closed_at_ms, refusals = fields
    if opening is None or closure is None or closed_at_ms is None:
        raise RecordError(f"episode_id={episode_id} lacks its opening or its closure")
    decoded = _turns_from(episode_id, turns)
    check_turns(episode_id, decoded)
    closed_at = _seconds(closed_at_ms, episode_id)
    try:
        episode = records_codec.decode_episode(
            episode_id, opening, closure, reward, refusals, closed_at
        )
    except UNREADABLE:
        with named(f"episode_id={episode_id}"):
            raise
    return Trajectory(episode=episode, turns=tuple(decoded))


@contextmanager
def named(what: str) -> Iterator[None]:
    """Put `what` before the sentence of an error about unreadable bytes."""
    try:
        yield
    except RecordError as error:
        raise RecordError(f"{what}: {error}") from error
    except SchemaMismatch as error:
        raise SchemaMismatch(f"{what}: {error}") from error


def _turns_from(episode_id: str, records: Stored) -> list[Turn]:
    turns: list[Turn] = []
    try:
        for record in records:
            turns.append(records_codec.decode_turn(record))
    except UNREADABLE:
        with named(f"episode_id={episode_id}, turns[{len(turns)}]"):
            raise
    return turns


def _recorded(own: Sequence[Turn], earlier: Sequence[Stored]) -> tuple[Turn, ...]:
    """The turns of `earlier` that `own` lacks, each once.

    A turn that cannot be read any more, and what came after it on its branch, is left out: it is
    generated again.
    """
    known = {turn.turn_id for turn in own}
    found: list[Turn] = []
    for records in earlier:
        for record in records:
            with suppress(*UNREADABLE):
                turn = records_codec.decode_turn(record)
                parent = turn.parent_turn_id
                if turn.turn_id not in known and (parent is None or parent in known):
                    known.add(turn.turn_id)
                    found.append(turn)
    return tuple(found)


def _seconds(unix_ms: bytes, episode_id: str) -> float:
    try:
        return int(unix_ms) / 1000
    except (ValueError, OverflowError) as error:
        raise RecordError(
            f"episode_id={episode_id}: closed={unix_ms[:40]!r}; Unix milliseconds are allowed"
        ) from error
