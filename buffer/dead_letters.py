"""Dead letters: groups that were dropped because something is wrong with them.

The script that drops a group writes its dead letter. Their number is bounded. A dead letter can be
read even if its records are damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis

from outloop.buffer.codec import records_codec
from outloop.buffer.errors import UNREADABLE, NotFound
from outloop.buffer.records import DropReason, Trajectory
from outloop.buffer.redis.client import translated
from outloop.buffer.redis.scripts import SyncScripts
from outloop.buffer.store.episodes import EPISODE_FIELDS, Stored, read_stored, trajectory_from


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A group that was dropped as failed or malformed."""

    group_id: str
    slot: int | None
    """None: the run has started over since, and plays the slot again anyway."""
    task_id: str
    """Empty: no episode was opened."""
    reason: DropReason
    error: str
    last_failure: str
    """How the last attempt without a result was closed; empty if there was none."""
    dropped_at: float
    """Unix seconds."""
    group_size: int
    num_scored: int
    num_lost: int
    num_replaced: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetterEpisode:
    """One scored episode of a dead letter."""

    episode_id: str
    trajectory: Trajectory | None
    """None: its records are damaged."""
    error: str
    """What is wrong with its records."""
    num_bytes: int
    """Size of its stored turns."""
    records: Mapping[str, bytes]
    """Stored bytes by name: opening, closure, reward and turn-NUMBER, those that exist."""


class DeadLetters:
    """The dead letters of one run."""

    def __init__(self, client: redis.Redis, prefix: str, scripts: SyncScripts) -> None:
        self._client = client
        self._prefix = prefix
        self._scripts = scripts

    def list_all(self) -> tuple[DeadLetter, ...]:
        """Every dead letter, oldest first; the last 256 are kept."""
        with translated("listing dead letters"):
            ids: Any = self._client.lrange(f"{self._prefix}dead", 0, -1)
            with self._client.pipeline(transaction=False) as pipeline:
                for group_id in ids:
                    pipeline.hgetall(self._key(group_id.decode()))
                rows = pipeline.execute()
        return tuple(
            _dead_letter_from(group_id.decode(), fields)
            for group_id, fields in zip(ids, rows, strict=True)
            if fields
        )

    def read(self, group_id: str) -> tuple[DeadLetter, tuple[DeadLetterEpisode, ...]]:
        """A dead letter with its scored episodes; only the newest 16 still have them.

        Raises:
            NotFound: no such dead letter.
        """
        name = self._key(group_id)
        with translated(f"reading dead letter group_id={group_id}"):
            fields: Any = self._client.hgetall(name)
            if not fields:
                raise NotFound(f"no dead letter group_id={group_id}; list them first")
            ids: Any = self._client.lrange(f"{name}:episodes", 0, -1)
            names = [episode_id.decode() for episode_id in ids]
            found = read_stored(self._client, self._prefix, names, EPISODE_FIELDS)
        episodes = [_episode_from(name, *of) for name, of in zip(names, found, strict=True)]
        return _dead_letter_from(group_id, fields), tuple(episodes)

    def requeue(self, group_id: str) -> None:
        """Play the group's slot again, before new slots, and delete the dead letter.

        Raises:
            NotFound: no such dead letter.
            Conflict: its slot is played again anyway.
        """
        what = f"requeueing dead letter group_id={group_id}"
        self._scripts.call("resolve_dead_letter", group_id, 1, what=what)

    def discard(self, group_id: str) -> None:
        """Delete the dead letter and its episodes; its slot is not played again.

        Raises:
            NotFound: no such dead letter.
        """
        what = f"dropping dead letter group_id={group_id}"
        self._scripts.call("resolve_dead_letter", group_id, 0, what=what)

    def _key(self, group_id: str) -> str:
        return f"{self._prefix}dead:{group_id}"


def _dead_letter_from(group_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    text = {name.decode(): value for name, value in fields.items()}
    return DeadLetter(
        group_id=group_id,
        slot=int(text["slot"]) if text["slot"] else None,
        task_id=text["task_id"].decode(errors="replace"),
        reason=cast(DropReason, text["reason"].decode()),
        error=text["sentence"].decode(errors="replace"),
        last_failure=_failure(text["last_closure"]),
        dropped_at=int(text["at"]) / 1000,
        group_size=int(text["size"]),
        num_scored=int(text["scored"]),
        num_lost=int(text["lost"]),
        num_replaced=int(text["replaced"]),
    )


def _failure(closure: bytes) -> str:
    if not closure:
        return ""
    try:
        ending = records_codec.decode_closure(closure)
    except UNREADABLE as error:
        return str(error)
    return f"{ending.failure_kind or ending.outcome}: {ending.error}"


def _episode_from(episode_id: str, fields: Any, turns: Stored) -> DeadLetterEpisode:
    records = {
        **dict(zip(EPISODE_FIELDS[:3], fields, strict=False)),
        **{f"turn-{number}": record for number, record in enumerate(turns)},
    }
    trajectory, sentence = None, ""
    try:
        trajectory = trajectory_from(episode_id, fields, turns)
    except UNREADABLE as error:
        sentence = str(error)
    return DeadLetterEpisode(
        episode_id=episode_id,
        trajectory=trajectory,
        error=sentence,
        num_bytes=sum(len(record) for record in turns),
        records={name: data for name, data in records.items() if data is not None},
    )
