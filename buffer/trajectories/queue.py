"""The queue of ended episodes in Redis that wait to be archived.

Scripts enter an episode when its fate is decided (`lifecycle.lua`), once; its turns stay in Redis
until the archiver has acknowledged the entry, or until more than a limit of token ids wait: then
the oldest entries are given up, so that a dead archiver costs memory only up to that limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import redis
import structlog

from outloop.buffer.errors import UNREADABLE
from outloop.buffer.redis.client import translated
from outloop.buffer.redis.scripts import SyncScripts
from outloop.buffer.store.episodes import EPISODE_FIELDS, open_episode_from, read_stored
from outloop.buffer.trajectories.ended import EndedEpisode, Entry

_FIELDS = (*EPISODE_FIELDS, "resumes")
_log = structlog.get_logger()


class TrajectoryQueue:
    """The archiver's end of the queue of one run; one archiver uses it at a time."""

    def __init__(self, client: redis.Redis, prefix: str, scripts: SyncScripts) -> None:
        self._client = client
        self._prefix = prefix
        self._scripts = scripts

    def open(self, max_waiting_tokens: int) -> None:
        """From now on episodes that end wait to be archived, up to so many token ids."""
        with translated("opening the queue of the archive"):
            self._client.hset(f"{self._prefix}state", "archive_limit", max_waiting_tokens)

    def abandon(self) -> None:
        """No episode waits any more: what waits is freed, and nothing enters."""
        with translated("closing the queue of the archive"):
            self._client.hset(f"{self._prefix}state", "archive_limit", 0)
            first, _ = self._range(0)
            number: int = self._client.llen(f"{self._prefix}archive")
        self.acknowledge(first + number)

    def read(self, *, max_episodes: int, max_tokens: int, skip: int = 0) -> tuple[int, list[Entry]]:
        """(number of the first entry that waits, the oldest entries): one at least if any waits.

        Entries are numbered from 0 since the run began. `skip`: so many are passed over.
        """
        with translated("reading the queue of the archive"):
            first, packed = self._range(max_episodes, skip)
        entries: list[Entry] = []
        num_tokens = 0
        for data in packed:
            entry = msgspec.msgpack.decode(data, type=Entry)
            num_tokens += entry.num_tokens
            if entries and num_tokens > max_tokens:
                break
            entries.append(entry)
        return first + skip, entries

    def load(self, entries: Sequence[Entry]) -> Iterator[EndedEpisode]:
        """Their episodes, in order; one whose records cannot be read is logged and left out."""
        with translated("reading ended episodes"):
            ids = [entry.episode_id for entry in entries]
            found = read_stored(self._client, self._prefix, ids, _FIELDS)
        for entry, (fields, turns) in zip(entries, found, strict=True):
            try:
                episode = open_episode_from(fields, turns)
            except UNREADABLE as error:
                _log.error("episode_not_archived", episode_id=entry.episode_id, error=str(error))
                continue
            if episode is None:
                _log.error("episode_not_archived", episode_id=entry.episode_id, error="it is gone")
                continue
            closed_at = None if fields[3] is None else int(fields[3]) / 1000
            yield EndedEpisode(entry=entry, episode=episode, closed_at=closed_at)

    def acknowledge(self, next_entry: int) -> int:
        """Entries before `next_entry` are on disk: free what only they kept; how many wait still.

        Twice is once.
        """
        _, waiting = self._scripts.call(
            "archived", next_entry, what=f"acknowledging {next_entry} archived episodes"
        )
        return int(waiting)

    def _range(self, num: int, skip: int = 0) -> tuple[int, list[bytes]]:
        """(number of the oldest entry, entries), as of one moment."""
        pipeline: redis.client.Pipeline
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.hget(f"{self._prefix}state", "archive_head")
            pipeline.lrange(f"{self._prefix}archive", skip, skip + num - 1)
            answer: list[Any] = pipeline.execute()
        return int(answer[0] or 0), answer[1] if num else []
