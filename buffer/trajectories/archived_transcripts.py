"""Episodes of the archive as text, for a person to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from outloop.buffer.trajectories.folder import part_paths, read_manifest
from outloop.buffer.trajectories.tables import refusals_of
from outloop.buffer.transcripts import Transcript, TurnText, is_failure

_TRANSCRIPT = (
    "episode_id", "task_id", "purpose", "outcome", "failure_kind", "reward", "error", "output"
)  # fmt: skip
_READ = (*_TRANSCRIPT, "refusals")
_TURN_TEXT = ("episode_id", "prompt_text", "output_text", "finish_reason", "version_spans")


def read_archived_transcripts(
    folder: Path, *, failed: bool = False, limit: int | None = None
) -> list[Transcript]:
    """Closed episodes of the archive as text, in the order in which they ended.

    Args:
        failed: only those that failed.
        limit: the newest so many; None: all.

    Raises:
        SchemaMismatch: written by another release.
    """
    found: list[Transcript] = []
    for part in reversed(read_manifest(folder).parts):
        episodes, turns = part_paths(folder, part)
        # Parts written before refusals were recorded lack the column.
        columns = [name for name in _READ if name in pq.read_schema(episodes).names]
        rows = pq.read_table(episodes, columns=columns).to_pylist()
        wanted = [row for row in reversed(rows) if row["outcome"] is not None]
        if failed:
            wanted = [row for row in wanted if is_failure(row["outcome"], row["failure_kind"])]
        if limit is not None:
            wanted = wanted[: limit - len(found)]
        if not wanted:
            continue
        ids = [row["episode_id"] for row in wanted]
        texts: dict[str, list[TurnText]] = {one: [] for one in ids}
        table = pq.read_table(turns, columns=list(_TURN_TEXT), filters=[("episode_id", "in", ids)])
        for turn in table.to_pylist():
            texts[turn["episode_id"]].append(
                TurnText(
                    prompt=turn["prompt_text"],
                    output=turn["output_text"],
                    finish_reason=turn["finish_reason"],
                    policy_versions=tuple(sorted(set(turn["version_spans"][::3]))),
                )
            )
        found += [_transcript(row, texts[row["episode_id"]]) for row in wanted]
        if len(found) == limit:
            break
    return found[::-1]


def _transcript(row: dict[str, Any], turns: list[TurnText]) -> Transcript:
    refusals = refusals_of(row)
    return Transcript(
        **{name: row[name] for name in _TRANSCRIPT},
        turns=tuple(turns),
        refused=refusals.counts,
        last_refusal=refusals.last,
    )


def archived_ids(folder: Path) -> set[str]:
    """Ids of the closed episodes of the archive.

    Raises:
        SchemaMismatch: written by another release.
    """
    found: set[str] = set()
    for part in read_manifest(folder).parts:
        path, _ = part_paths(folder, part)
        table = pq.read_table(path, columns=["episode_id"], filters=[("outcome", "!=", "")])
        found.update(table[0].to_pylist())
    return found
