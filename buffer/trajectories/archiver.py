"""The part that moves ended episodes from Redis into files.

It may be killed at any point, and the run goes on without it. An episode is in the archive once:
its entry is acknowledged after the manifest names its part, and a new archiver passes over entries
whose episodes the newest parts hold already.
"""

from __future__ import annotations

import threading

import pyarrow.parquet as pq
import structlog

from outloop.buffer.errors import BufferUnavailable
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import wait_for_redis
from outloop.buffer.run import Run
from outloop.buffer.settings.trajectories import TrajectorySettings
from outloop.buffer.trajectories.ended import Entry
from outloop.buffer.trajectories.folder import FOLDER, Folder, Part, part_paths, writing
from outloop.buffer.trajectories.queue import TrajectoryQueue
from outloop.buffer.trajectories.tables import (
    Decoder,
    is_kept,
    merge_files,
    tables_of,
    write_tables,
)
from outloop.buffer.trajectories.trained import remove_trained_before
from outloop.buffer.trajectories.vocabulary import load_tokenizer, write_vocabulary

_MAX_EPISODES = 512
_MAX_TOKENS = 2_000_000
"""Of one part, before parts are merged."""
_MERGED_PARTS = 8
"""So many neighbours of one level become one part of the next."""
_MAX_MERGED_BYTES = 64 * 2**20
_TRAINED_S = 3600.0
"""From an update to the archiving of what it trained, at most: the time between two checkpoints."""
_log = structlog.get_logger()


def archive_run(run: Run, *, stop: threading.Event) -> None:
    """Archive what ends in `run` until `stop`, then once more.

    Raises:
        Conflict: another archiver writes the folder.
    """
    settings = run.settings.trajectories
    tokenizer = load_tokenizer(run.settings.model.path)
    with writing(run.dir / FOLDER) as folder:
        write_vocabulary(folder.folder, tokenizer)
        wait_for_redis(run.redis_url, run.settings.buffer.outage_s, who="archiver")
        reader = BufferReader.connect(run)
        try:
            archiver = Archiver(reader.trajectories, folder, settings, Decoder(tokenizer))
            archiver.open()
            is_last = False
            while not is_last:
                is_last = stop.wait(settings.flush_s)
                archiver.try_flush()
        finally:
            reader.close()


class Archiver:
    """Moves entries of the queue into parts of the folder."""

    def __init__(
        self,
        queue: TrajectoryQueue,
        folder: Folder,
        settings: TrajectorySettings,
        decode: Decoder,
    ) -> None:
        self._queue = queue
        self._folder = folder
        self._settings = settings
        self._decode = decode
        self._known: set[str] = set()
        """Episodes of parts that may be newer than the queue's head."""
        self._next: int | None = None
        """The entry after the last one that was acknowledged; -1: not known, None: not open."""

    def open(self) -> None:
        """Have ended episodes wait for this archiver."""
        self._queue.open(self._settings.max_waiting_tokens)
        self._next = -1

    def try_flush(self) -> None:
        """`flush`; while Redis is away, or the disk is full, nothing happens."""
        try:
            if self._next is None:
                self.open()
            self.flush()
        except (BufferUnavailable, OSError) as error:
            _log.warning("archive_waits", reason=str(error))

    def flush(self) -> int:
        """Archive everything that waits; how many entries that were."""
        total = 0
        while True:
            first, entries = self._queue.read(max_episodes=_MAX_EPISODES, max_tokens=_MAX_TOKENS)
            if self._next is None or self._next < 0 or first < self._next:
                # An archiver died before it could acknowledge, or Redis lost its last second.
                self._learn_episodes_since(first)
            if not entries:
                return total
            last = first + len(entries) - 1
            new = [entry for entry in entries if entry.episode_id not in self._known]
            self._write(new, first, last)
            self._queue.acknowledge(last + 1)
            self._next = last + 1
            self._known.difference_update(entry.episode_id for entry in entries)
            total += len(entries)

    def _learn_episodes_since(self, first: int) -> None:
        for part in self._folder.manifest.parts:
            if part.last >= first:
                path, _ = part_paths(self._folder.folder, part)
                self._known.update(pq.read_table(path, columns=["episode_id"])[0].to_pylist())
        self._next = first

    def _write(self, entries: list[Entry], first: int, last: int) -> None:
        share = self._settings.share
        ended = [one for one in self._queue.load(entries) if is_kept(one, share)]
        if not ended:
            return
        episodes, turns = tables_of(ended, self._decode)
        name = self._folder.new_name(first)
        num_bytes = self._folder.write_files(name, lambda e, t: write_tables(episodes, turns, e, t))
        times = [one.entry.ended_at_ms / 1000 for one in ended]
        part = Part(
            name=name,
            first=first,
            last=last,
            num_episodes=len(ended),
            num_tokens=sum(one.entry.num_tokens for one in ended),
            num_bytes=num_bytes,
            first_ended_at=min(times),
            last_ended_at=max(times),
        )
        parts = [*self._folder.manifest.parts, part]
        self._retain(parts)
        while self._merge(list(self._folder.manifest.parts)):
            pass

    def _retain(self, parts: list[Part]) -> None:
        """Commit the newest parts that the settings allow; one at least."""
        settings, kept = self._settings, list[Part]()
        num_episodes, num_bytes = 0, 0
        for part in reversed(parts):
            num_episodes += part.num_episodes
            num_bytes += part.num_bytes
            is_over = num_bytes > settings.max_mb * 1e6 or (
                settings.max_episodes is not None and num_episodes > settings.max_episodes
            )
            if kept and is_over:
                break
            kept.append(part)
        removed = parts[: len(parts) - len(kept)]
        self._folder.commit(kept[::-1], num_removed=sum(part.num_episodes for part in removed))
        if removed:
            # An update is published before its episodes are archived.
            remove_trained_before(self._folder.folder, kept[-1].first_ended_at - _TRAINED_S)

    def _merge(self, parts: list[Part]) -> bool:
        """Merge the newest neighbours of one level, if they are enough; True if that was done."""
        tail: list[Part] = []
        for part in reversed(parts):
            if tail and part.level != tail[0].level:
                break
            tail.insert(0, part)
        tail = tail[-_MERGED_PARTS:]
        if len(tail) < _MERGED_PARTS or sum(p.num_bytes for p in tail) > _MAX_MERGED_BYTES:
            return False
        paths = [part_paths(self._folder.folder, part) for part in tail]
        name = self._folder.new_name(tail[0].first)
        merged = Part(
            name=name,
            first=min(part.first for part in tail),
            last=max(part.last for part in tail),
            level=tail[0].level + 1,
            num_episodes=sum(part.num_episodes for part in tail),
            num_tokens=sum(part.num_tokens for part in tail),
            num_bytes=self._folder.write_files(
                name, lambda episodes, turns: merge_files(paths, episodes, turns)
            ),
            first_ended_at=min(part.first_ended_at for part in tail),
            last_ended_at=max(part.last_ended_at for part in tail),
        )
        where = parts.index(tail[0])
        self._folder.commit([*parts[:where], merged, *parts[where + len(tail) :]])
        return True
