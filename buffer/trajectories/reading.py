"""Reading the archive back as trajectories."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow.parquet as pq

from outloop.buffer.codec.jsonl import format_line
from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Episode, Trajectory
from outloop.buffer.trajectories.folder import part_paths, read_manifest
from outloop.buffer.trajectories.tables import refusals_of, reward_of, turn_of
from outloop.buffer.whole_file import whole_file

_FOUND_AGAIN = ("no_signal", "filtered", "overlong")


def write_jsonl(folder: Path, path: Path, episode_ids: Collection[str]) -> int:
    """Write those of `episode_ids` that were closed to `path`, a line each; how many they are.

    The lines are those of `outloop buffer export`. `path` appears when it is complete.

    Raises:
        SettingsError: it cannot be written.
    """
    number = 0
    try:
        with whole_file(path) as writing, writing.open("wb") as file:
            for trajectory in read_trajectories(folder, episode_ids):
                file.write(format_line(trajectory))
                number += 1
    except OSError as error:
        raise SettingsError(f"path={str(path)!r} cannot be written: {error}") from error
    return number


def taken_groups(folder: Path) -> dict[str, list[str]]:
    """Group -> its episodes, for the groups that the trainer saw in time, by slot: those that it
    trained, or left out for a reason that it finds again.

    Raises:
        SchemaMismatch: written by another release.
    """
    slots: dict[str, int] = {}
    episodes: dict[str, list[str]] = {}
    for part in read_manifest(folder).parts:
        path, _ = part_paths(folder, part)
        names = ["episode_id", "group_id", "slot", "fate", "reason"]
        for row in pq.read_table(path, columns=names).to_pylist():
            if row["fate"] == "trained" or row["reason"] in _FOUND_AGAIN:
                slots[row["group_id"]] = row["slot"]
                episodes.setdefault(row["group_id"], []).append(row["episode_id"])
    return {one: episodes[one] for one in sorted(slots, key=lambda one: (slots[one], one))}


def read_groups_of(
    folder: Path, group_ids: Collection[str]
) -> dict[str, tuple[int, list[Trajectory]]]:
    """Group -> (slot, the attempts that count in it, by number), for those that are there.

    Raises:
        SchemaMismatch: written by another release.
    """
    slots: dict[str, int] = {}
    counted: set[str] = set()
    for part in read_manifest(folder).parts:
        path, _ = part_paths(folder, part)
        for row in pq.read_table(
            path, columns=["episode_id", "group_id", "slot", "fate"]
        ).to_pylist():
            if row["group_id"] in group_ids and row["fate"] != "lost":
                slots[row["group_id"]] = row["slot"]
                counted.add(row["episode_id"])
    groups: dict[str, tuple[int, list[Trajectory]]] = {
        one: (slot, []) for one, slot in slots.items()
    }
    for trajectory in read_trajectories(folder, counted):
        groups[trajectory.episode.group_id or ""][1].append(trajectory)
    for _, trajectories in groups.values():
        trajectories.sort(key=lambda one: one.episode.attempt)
    return {one: group for one, group in groups.items() if group[1]}


def read_trajectories(
    folder: Path, episode_ids: Collection[str] | None = None
) -> Iterator[Trajectory]:
    """Closed episodes of the archive with their turns, in the order in which they ended.

    Args:
        episode_ids: only these; None: all.

    Raises:
        SchemaMismatch: written by another release.
    """
    for part in read_manifest(folder).parts:
        episodes, turns = (pq.read_table(path) for path in part_paths(folder, part))
        # An episode's turns stand behind each other.
        turns_of = _first_rows(turns["episode_id"].to_pylist())
        for row in episodes.to_pylist():
            if row["outcome"] is None:
                continue
            if episode_ids is not None and row["episode_id"] not in episode_ids:
                continue
            first = turns_of.get(row["episode_id"], 0)
            own = turns.slice(first, row["num_turns"])
            yield Trajectory(
                episode=msgspec.convert(
                    row
                    | {
                        "reward": reward_of(row),
                        "metadata": json.loads(row["metadata"]),
                        "refusals": refusals_of(row),
                    },
                    Episode,
                ),
                turns=tuple(turn_of(turn) for turn in own.to_pylist()),
            )


def _first_rows(episode_ids: Sequence[str]) -> dict[str, int]:
    first: dict[str, int] = {}
    for row, episode_id in enumerate(episode_ids):
        first.setdefault(episode_id, row)
    return first
