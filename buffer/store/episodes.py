"""Episodes as they are stored, back as records.

Owns: which fields of an episode's hash make which record. Does not own: bytes of a field (codec) or
reading them (reader, writer). Invariant: damaged data raises RecordError or SchemaMismatch, nothing
else; the sentence names the episode and the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from outloop.buffer.codec import records_codec
from outloop.buffer.errors import UNREADABLE, RecordError, SchemaMismatch
from outloop.buffer.records import OpenEpisode, Reward, Trajectory, Turn

EPISODE_FIELDS = ("opening", "closure", "reward", "closed")
"""What to read from an episode's hash, in this order."""
OPEN_EPISODE_FIELDS = (*EPISODE_FIELDS, "resumes")
"""The same for an episode that may be open."""
Fields = Sequence[bytes | None]


def open_episode_from(
    fields: Fields, turns: Sequence[bytes], earlier: Sequence[Sequence[bytes]] = ()
) -> OpenEpisode | None:
    """The episode as it stands; None without an opening.

    Args:
        fields: OPEN_EPISODE_FIELDS.
        earlier: the turns of those that it resumes, the newest episode first.
    """
    if fields[0] is None:
        return None
    closure = None if fields[1] is None else records_codec.decode_closure(fields[1])
    opening = records_codec.decode_opening(fields[0])
    own = tuple(turns_from(opening.episode_id, turns))
    return OpenEpisode(
        opening=opening,
        turns=own,
        is_closed=closure is not None,
        outcome=None if closure is None else closure.outcome,
        reward=_reward(fields),
        failure_kind=None if closure is None else closure.failure_kind,
        error="" if closure is None else closure.error,
        output="" if closure is None else closure.output,
        resumes=None if fields[4] is None else fields[4].decode(),
        recorded=_recorded(own, earlier),
    )


def trajectory_from(episode_id: str, fields: Fields, turns: Sequence[bytes]) -> Trajectory:
    """The closed episode with its turns.

    Raises:
        RecordError: it is not closed, or a record is damaged or belongs to another episode.
        SchemaMismatch: a record was written by another release.
    """
    return trajectory_of(episode_id, fields, turns_from(episode_id, turns))


def trajectory_of(episode_id: str, fields: Fields, turns: Sequence[Turn]) -> Trajectory:
    """As trajectory_from, with turns that are decoded already."""
    opening, closure, reward, closed_at_ms = fields
    if opening is None or closure is None or closed_at_ms is None:
        raise RecordError(f"episode_id={episode_id} lacks its opening or its closure")
    check_turns(episode_id, turns)
    closed_at = _seconds(closed_at_ms, episode_id)
    try:
        episode = records_codec.decode_episode(episode_id, opening, closure, reward, closed_at)
    except UNREADABLE:
        with named(f"episode_id={episode_id}"):
            raise
    return Trajectory(episode=episode, turns=tuple(turns))


def turns_from(episode_id: str, records: Sequence[bytes]) -> list[Turn]:
    """The turns of an episode, decoded all at once.

    Raises:
        RecordError, SchemaMismatch: one cannot be read; says which.
    """
    try:
        return records_codec.decode_turns(records)
    except UNREADABLE:
        for number, record in enumerate(records):
            with named(f"episode_id={episode_id}, turns[{number}]"):
                records_codec.decode_turn(record)
        raise


def check_turns(episode_id: str, turns: Sequence[Turn]) -> None:
    """Refuse turns that do not make one episode.

    Raises:
        RecordError: a turn is of another episode, or its parent does not come before it.
    """
    known: set[str] = set()
    for turn in turns:
        parent = turn.parent_turn_id
        if turn.episode_id != episode_id or (parent is not None and parent not in known):
            raise RecordError(
                f"episode_id={episode_id}: turn {turn.turn_id} has episode_id={turn.episode_id}, "
                f"parent_turn_id={parent}; its own episode and an earlier turn are allowed"
            )
        known.add(turn.turn_id)


def _recorded(own: Sequence[Turn], earlier: Sequence[Sequence[bytes]]) -> tuple[Turn, ...]:
    """The turns of `earlier` that `own` lacks, each once.

    What cannot be read any more, and what came after it on its branch, was not recorded: it is
    drawn anew.
    """
    known = {turn.turn_id for turn in own}
    found: list[Turn] = []
    for records in earlier:
        for turn in _readable(records):
            parent = turn.parent_turn_id
            if turn.turn_id not in known and (parent is None or parent in known):
                known.add(turn.turn_id)
                found.append(turn)
    return tuple(found)


def _readable(records: Sequence[bytes]) -> Iterator[Turn]:
    try:
        yield from records_codec.decode_turns(records)
    except UNREADABLE:
        for record in records:
            with suppress(*UNREADABLE):
                yield records_codec.decode_turn(record)


@contextmanager
def named(what: str) -> Iterator[None]:
    """Inside, an error about bytes that cannot be read begins with `what`."""
    try:
        yield
    except RecordError as error:
        raise RecordError(f"{what}: {error}") from error
    except SchemaMismatch as error:
        raise SchemaMismatch(f"{what}: {error}") from error


def _seconds(unix_ms: bytes, episode_id: str) -> float:
    try:
        return int(unix_ms) / 1000
    except (ValueError, OverflowError) as error:
        raise RecordError(
            f"episode_id={episode_id}: closed={unix_ms[:40]!r}; Unix milliseconds are allowed"
        ) from error


def _reward(fields: Fields) -> Reward | None:
    return None if fields[2] is None else records_codec.decode_reward(fields[2])
