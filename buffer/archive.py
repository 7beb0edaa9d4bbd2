"""A run's trajectories, to and from files.

The episodes of a group are read together or not at all, also while the run goes on. A file with a
bad line is not imported at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
import structlog

from outloop.buffer.codec import records_codec
from outloop.buffer.codec.jsonl import format_line, read_lines
from outloop.buffer.errors import UNREADABLE, OutloopError, RecordError, SettingsError
from outloop.buffer.records import Trajectory
from outloop.buffer.redis.client import translated
from outloop.buffer.redis.scripts import SyncScripts
from outloop.buffer.store.episodes import EPISODE_FIELDS, open_episode_from, trajectory_from
from outloop.buffer.store.sft import put_sync, sft_records
from outloop.buffer.whole_file import whole_file

_CHUNK = 64
_SCAN_COUNT = 1000
_CHUNK_BYTES = 8 * 2**20
_MAX_NAMED_LINES = 10

_log = structlog.get_logger()


class Archive:
    """Reads and writes the trajectories of one run."""

    def __init__(self, client: redis.Redis, prefix: str, scripts: SyncScripts) -> None:
        self._client = client
        self._prefix = prefix
        self._scripts = scripts

    def trajectories(self) -> Iterator[Trajectory | OutloopError]:
        """Every scored episode that Redis holds: of live groups by slot, evaluations, dead letters,
        evaluation episodes that nobody claimed, then those for SFT; an error in the place of a
        damaged one, or one of another release.

        What a checkpoint contains was freed and is not among them.
        """
        seen: set[str] = set()
        for name in self._lists():
            yield from self._episodes_of(name, seen)
        yield from self._unclaimed(seen)
        for record in sft_records(self._client, self._prefix):
            try:
                yield records_codec.decode_trajectory(record)
            except UNREADABLE as error:
                yield error

    def episode_ids(self) -> Iterator[str]:
        """Of every scored episode that Redis holds, and of the last 64 that failed."""
        for name in (f"{self._prefix}failed", *self._lists()):
            with translated("listing episodes"):
                ids: Any = self._client.lrange(name, 0, -1)
            yield from (episode_id.decode() for episode_id in ids)

    def write(self, path: Path) -> tuple[int, int]:
        """Write all trajectories to `path` as JSONL; (number written, damaged ones left out).

        `path` appears only when it is complete.

        Raises:
            SettingsError: it cannot be written.
        """
        num_written = num_damaged = 0
        try:
            with whole_file(path) as writing, writing.open("wb") as file:
                for item in self.trajectories():
                    if isinstance(item, Trajectory):
                        file.write(format_line(item))
                        num_written += 1
                    else:
                        _log.warning("trajectory_left_out", error=str(item))
                        num_damaged += 1
        except OSError as error:
            raise SettingsError(f"path={str(path)!r} cannot be written: {error}") from error
        return num_written, num_damaged

    def read(self, path: Path, *, skip_bad: bool = False, final: bool = False) -> tuple[int, int]:
        """Store the trajectories of a JSONL file for SFT; (number stored, lines left out).

        The same file again changes nothing.

        Args:
            final: no more trajectories for SFT will come.

        Raises:
            RecordError: lines are not trajectories for SFT and `skip_bad` is off; names them.
            BufferUnavailable: Redis is full; what was stored before stays.
        """
        bad = [(number, item) for number, item in _rows(path) if isinstance(item, Exception)]
        if bad and not skip_bad:
            named = "; ".join(f"line {number}: {error}" for number, error in bad[:_MAX_NAMED_LINES])
            more = f"; and {len(bad) - _MAX_NAMED_LINES} more" * (len(bad) > _MAX_NAMED_LINES)
            raise RecordError(
                f"path={str(path)!r} has {len(bad)} bad lines, nothing was imported; correct them "
                f"or leave them out with --skip-bad: {named}{more}"
            )
        for number, error in bad:
            _log.warning("line_left_out", line=number, error=str(error))
        num_stored = 0
        for records in _chunks(item for _, item in _rows(path) if isinstance(item, Trajectory)):
            self._store_for_sft(records, final=False)
            num_stored += len(records)
        if final:
            self._store_for_sft([], final=True)
        return num_stored, len(bad)

    def _store_for_sft(self, records: list[bytes], *, final: bool) -> None:
        key = "import:" + hashlib.sha256(b"".join(records)).hexdigest()
        put_sync(self._client, self._prefix, self._scripts, records, key=key, final=final)

    def _lists(self) -> list[str]:
        """Names of the lists of episode ids."""
        with (
            translated("listing trajectories"),
            self._client.pipeline(transaction=True) as pipeline,
        ):
            pipeline.zrange(f"{self._prefix}groups", 0, -1)
            pipeline.lrange(f"{self._prefix}evals", 0, -1)
            pipeline.lrange(f"{self._prefix}dead", 0, -1)
            found = pipeline.execute()
        groups, evals, dead = ([name.decode() for name in names] for names in found)
        return [
            *(f"{self._prefix}group:{group}:episodes" for group in groups),
            *(f"{self._prefix}eval:{name}:episodes" for name in evals),
            *(f"{self._prefix}dead:{group}:episodes" for group in dead),
        ]

    def _episodes_of(self, name: str, seen: set[str]) -> Iterator[Trajectory | OutloopError]:
        with translated("reading trajectories"):
            ids: Any = self._client.lrange(name, 0, -1)
            with self._client.pipeline(transaction=True) as pipeline:
                for episode_id in ids:
                    episode = f"{self._prefix}episode:{episode_id.decode()}"
                    pipeline.hmget(episode, list(EPISODE_FIELDS))
                    pipeline.lrange(f"{episode}:turns", 0, -1)
                pipeline.exists(name)
                *answers, is_there = pipeline.execute()
            names = [episode_id.decode() for episode_id in ids]
        if not is_there:
            # The group was acknowledged or dropped meanwhile; its turns may be gone.
            return
        seen.update(names)
        for episode_id, fields, turns in zip(names, answers[::2], answers[1::2], strict=True):
            try:
                yield trajectory_from(episode_id, fields, turns)
            except UNREADABLE as error:
                yield error

    def _unclaimed(self, seen: set[str]) -> Iterator[Trajectory | OutloopError]:
        """Closed evaluation episodes that were opened by hand: they are in no list."""
        pattern = f"{self._prefix}episode:*"
        with translated("listing evaluation episodes"):
            names: Any = self._client.scan_iter(pattern, count=_SCAN_COUNT, _type="hash")
            for name in names:
                episode_id = name.decode().removeprefix(pattern[:-1])
                if episode_id in seen:
                    continue
                with self._client.pipeline(transaction=True) as pipeline:
                    pipeline.hmget(name, list(EPISODE_FIELDS))
                    pipeline.lrange(f"{pattern[:-1]}{episode_id}:turns", 0, -1)
                    fields, turns = pipeline.execute()
                try:
                    episode = open_episode_from([*fields, None], turns)
                    if episode is None or not episode.is_closed:
                        continue
                    if episode.opening.purpose == "eval" and not episode.opening.eval_name:
                        yield trajectory_from(episode_id, fields, turns)
                except UNREADABLE as error:
                    yield error


def _rows(path: Path) -> Iterator[tuple[int, Trajectory | OutloopError]]:
    """The trajectories for SFT of a file by line, and what is wrong with the other lines."""
    for number, item in read_lines(path):
        if isinstance(item, Trajectory) and item.episode.purpose != "sft":
            yield (
                number,
                RecordError(
                    f"purpose={item.episode.purpose!r}; 'sft' is allowed. To train a policy on the "
                    "episodes of a file, give it to `outloop train-recorded`"
                ),
            )
        else:
            yield number, item


def _chunks(trajectories: Iterator[Trajectory]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    num_bytes = 0
    for trajectory in trajectories:
        record = records_codec.encode_trajectory(trajectory)
        chunk.append(record)
        num_bytes += len(record)
        if len(chunk) >= _CHUNK or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
