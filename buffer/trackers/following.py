"""What is new in a run's folder since a place: rows of metrics.jsonl, and ended episodes.

A place is kept in a file, so that a tracker goes on where it was. It is saved after what it passes
was taken: what was under way when a tracker was killed is given to it once more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from outloop.buffer import json_lines
from outloop.buffer.trackers.tracker import SeenEpisode, SeenTurn
from outloop.buffer.trajectories.folder import FOLDER, part_paths, read_manifest
from outloop.buffer.whole_file import whole_file

_MAX_ROWS = 200
"""Of one batch, so that a place is saved now and then."""
_EPISODES = (
    "episode_id", "task_id", "group_id", "attempt", "purpose", "fate", "reason", "outcome",
    "reward", "reward_components", "max_version", "num_output_tokens", "error", "text",
    "opened_at", "closed_at", "ended_at",
)  # fmt: skip
_TURNS = (
    "episode_id", "turn_id", "parent_turn_id", "prompt_text", "output_text", "prompt_ids",
    "output_ids", "version_spans", "finish_reason", "branch_cause", "sampling", "started_at",
    "finished_at",
)  # fmt: skip


class Place(msgspec.Struct, kw_only=True):
    """How far a tracker is."""

    offset: int = 0
    """Bytes of metrics.jsonl."""
    ended_at: float = -math.inf
    """Of the last episode."""
    at_ended: list[str] = []
    """Episodes with that very time."""


class MetricRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of metrics.jsonl."""

    step: int
    time: float
    """Unix seconds."""
    values: dict[str, float]
    """Finite ones."""


class Following:
    """Reads what is new in a run's folder."""

    def __init__(self, run_dir: Path, place_file: Path) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._archive = run_dir / FOLDER
        self._place_file = place_file
        self.place = Place()
        if place_file.exists():
            self.place = msgspec.json.decode(place_file.read_bytes(), type=Place)

    def save(self) -> None:
        """Begin at this place the next time."""
        self._place_file.parent.mkdir(exist_ok=True)
        with whole_file(self._place_file) as writing:
            writing.write_bytes(msgspec.json.encode(self.place))

    def new_rows(self) -> list[MetricRow]:
        """The next complete rows of metrics; `place` is behind them afterwards."""
        if not self._metrics.exists():
            return []
        found: list[MetricRow] = []
        with self._metrics.open("rb") as file:
            file.seek(self.place.offset)
            for line in file:
                if not line.endswith(b"\n") or len(found) == _MAX_ROWS:
                    break
                self.place.offset += len(line)
                row = json_lines.parse_line(line)
                if row is None:
                    continue
                step, time = int(row.pop("step")), float(row.pop("time"))
                values = {name: float(value) for name, value in row.items() if value is not None}
                found.append(MetricRow(step=step, time=time, values=values))
        return found

    def new_episodes(self, *, with_turns: bool) -> Iterator[list[SeenEpisode]]:
        """Batches of episodes that were archived since; `place` is behind each when the next is
        asked for. Nothing without pyarrow.

        Raises:
            SchemaMismatch: the archive is of another release.
        """
        try:
            import pyarrow.parquet as pq
        except ImportError:
            return
        # The archive is in the order in which episodes ended, by one clock.
        for part in read_manifest(self._archive).parts:
            if part.last_ended_at < self.place.ended_at:
                continue
            paths = part_paths(self._archive, part)
            table = pq.read_table(paths[0], columns=list(_EPISODES))
            rows = [row for row in table.to_pylist() if self._is_new(row)]
            rows.sort(key=lambda row: row["ended_at"])
            turns: dict[str, list[SeenTurn]] = {}
            if with_turns and rows:
                wanted = {row["episode_id"] for row in rows}
                for row in pq.read_table(paths[1], columns=list(_TURNS)).to_pylist():
                    if row["episode_id"] in wanted:
                        turns.setdefault(row["episode_id"], []).append(_turn(row))
            for first in range(0, len(rows), _MAX_ROWS):
                batch = rows[first : first + _MAX_ROWS]
                yield [_episode(row, tuple(turns.get(row["episode_id"], ()))) for row in batch]
                self._pass(batch)

    def _is_new(self, row: dict[str, Any]) -> bool:
        if row["ended_at"] != self.place.ended_at:
            return bool(row["ended_at"] > self.place.ended_at)
        return row["episode_id"] not in self.place.at_ended

    def _pass(self, batch: list[dict[str, Any]]) -> None:
        last = batch[-1]["ended_at"]
        at_last = [row["episode_id"] for row in batch if row["ended_at"] == last]
        if last == self.place.ended_at:
            at_last = [*self.place.at_ended, *at_last]
        self.place.ended_at, self.place.at_ended = last, at_last


def _episode(row: dict[str, Any], turns: tuple[SeenTurn, ...]) -> SeenEpisode:
    return SeenEpisode(
        components=json.loads(row.pop("reward_components")),
        policy_version=row.pop("max_version"),
        turns=turns,
        **row,
    )


def _turn(row: dict[str, Any]) -> SeenTurn:
    spans = row["version_spans"]
    return SeenTurn(
        turn_id=row["turn_id"],
        parent_turn_id=row["parent_turn_id"],
        prompt_text=row["prompt_text"],
        output_text=row["output_text"],
        num_prompt_tokens=len(row["prompt_ids"]),
        num_output_tokens=len(row["output_ids"]),
        policy_version=spans[0] if spans else None,
        finish_reason=row["finish_reason"],
        branch_cause=row["branch_cause"],
        temperature=json.loads(row["sampling"])["temperature"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
    )
