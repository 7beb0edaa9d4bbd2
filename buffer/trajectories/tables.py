"""Ended episodes as rows of two tables: one row for an episode, one for each of its turns.

Token columns stand apart from texts, so that a search reads no tokens and a listing neither. Every
id, logprob and span of a turn is in its row as it was recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from outloop.buffer.records import (
    NO_REFUSALS,
    Refusals,
    Reward,
    TokenReward,
    Turn,
    facts_of,
    turn_with,
)
from outloop.buffer.trajectories.ended import EndedEpisode

EPISODES: pa.Schema = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("slot", pa.int64()),
        ("group_size", pa.int32()),
        ("attempt", pa.int32()),
        ("purpose", pa.string()),
        ("eval_name", pa.string()),
        ("fate", pa.string()),
        ("reason", pa.string()),
        ("trained_version", pa.int64()),
        ("outcome", pa.string()),
        ("failure_kind", pa.string()),
        ("reward", pa.float64()),
        ("reward_components", pa.string()),
        ("reward_turns", pa.string()),
        ("reward_branches", pa.string()),
        ("reward_tokens", pa.string()),
        ("reward_answer", pa.string()),
        ("metadata", pa.string()),
        ("opened_at", pa.float64()),
        ("closed_at", pa.float64()),
        ("ended_at", pa.float64()),
        ("num_turns", pa.int32()),
        ("num_branches", pa.int32()),
        ("num_tokens", pa.int64()),
        ("num_output_tokens", pa.int64()),
        ("num_trained_tokens", pa.int64()),
        ("min_version", pa.int64()),
        ("max_version", pa.int64()),
        ("resumes", pa.string()),
        ("error", pa.string()),
        ("output", pa.string()),
        ("refusals", pa.string()),
        ("text", pa.large_string()),
    ]
)
"""`refusals`: a `Refusals` as JSON. `text`: what the turns added, prompts and outputs in the order
of recording, to be searched."""
TURNS: pa.Schema = pa.schema(
    [
        ("episode_id", pa.string()),
        ("turn_index", pa.int32()),
        ("turn_id", pa.string()),
        ("parent_turn_id", pa.string()),
        ("choice_index", pa.int32()),
        ("branch_cause", pa.string()),
        ("finish_reason", pa.string()),
        ("mask_reason", pa.string()),
        ("retry_key", pa.string()),
        ("sampling", pa.string()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("prompt_text", pa.large_string()),
        ("output_text", pa.large_string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("version_spans", pa.list_(pa.int64())),
        ("loss_spans", pa.list_(pa.int32())),
    ]
)
"""`version_spans`: policy_version, start, end of each span behind each other; `loss_spans`: start,
end of each."""
_EPISODE_ROWS = 4096
_TURN_ROWS = 256
"""Rows of a row group; one episode's turns are found by the statistics of their groups."""
_GROUP_BYTES = 8 * 2**20
"""Of a row group in memory, about, where rows are merged: four thousand long episodes would be
hundreds of MB."""
_OPTIONS: dict[str, Any] = {"compression": "zstd", "use_dictionary": False}


class Decoder:
    """Token ids as text, by the policy's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: of the package tokenizers; None: texts are empty."""
        self._tokenizer = tokenizer

    def __call__(self, ids: np.ndarray[Any, Any]) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return str(text).encode("utf-8", "replace").decode()


def is_kept(ended: EndedEpisode, share: float) -> bool:
    """Whether the archive keeps it: evaluations always, of the groups a share by their ids."""
    if ended.episode.opening.purpose != "train" or share >= 1.0:
        return True
    name = ended.episode.opening.group_id or ended.entry.episode_id
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def tables_of(ended: Iterable[EndedEpisode], decode: Decoder) -> tuple[pa.Table, pa.Table]:
    """(episodes, turns) with the columns of EPISODES and TURNS."""
    episodes: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for one in ended:
        rows = [
            _turn_row(index, turn, decode(turn.prompt_ids), decode(turn.output_ids))
            for index, turn in enumerate(one.episode.turns)
        ]
        turns += rows
        episodes.append(_episode_row(one, rows))
    return (
        pa.Table.from_pylist(episodes, schema=EPISODES),
        pa.Table.from_pylist(turns, schema=TURNS),
    )


def _episode_row(ended: EndedEpisode, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    entry, episode = ended.entry, ended.episode
    opening, reward = episode.opening, episode.reward
    versions = [
        span.policy_version
        for turn in episode.turns
        for span in turn.version_spans
        if span.end > span.start
    ]
    parents = {turn.parent_turn_id for turn in episode.turns}
    return {
        "episode_id": entry.episode_id,
        "group_id": opening.group_id,
        "task_id": opening.task_id,
        "slot": entry.slot if entry.slot >= 0 else None,
        "group_size": entry.group_size or None,
        "attempt": opening.attempt,
        "purpose": opening.purpose,
        "eval_name": opening.eval_name,
        "fate": entry.fate,
        "reason": entry.reason,
        "trained_version": entry.trained_version if entry.trained_version >= 0 else None,
        "outcome": episode.outcome,
        "failure_kind": episode.failure_kind,
        "reward": None if reward is None else reward.value,
        **{f"reward_{name}": text for name, text in _reward_parts(reward).items()},
        "metadata": json.dumps(opening.metadata),
        "opened_at": opening.opened_at,
        "closed_at": ended.closed_at,
        "ended_at": entry.ended_at_ms / 1000,
        "num_turns": len(episode.turns),
        "num_branches": sum(turn.turn_id not in parents for turn in episode.turns),
        "num_tokens": sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in episode.turns),
        "num_output_tokens": sum(len(turn.output_ids) for turn in episode.turns),
        "num_trained_tokens": sum(
            end - start for turn in episode.turns for start, end in turn.loss_spans
        ),
        "min_version": min(versions, default=None),
        "max_version": max(versions, default=None),
        "resumes": episode.resumes,
        "error": episode.error,
        "output": episode.output,
        "refusals": msgspec.json.encode(episode.refusals).decode(),
        "text": "".join(row["prompt_text"] + row["output_text"] for row in rows),
    }


def _reward_parts(reward: Reward | None) -> dict[str, str]:
    known = Reward(value=0.0) if reward is None else reward
    parts = {name: getattr(known, name) for name in ("components", "turns", "branches")}
    parts["tokens"] = [(s.turn_id, s.start, s.end, s.value) for s in known.tokens]
    return {name: json.dumps(part) for name, part in parts.items()} | {"answer": known.answer}


def _turn_row(index: int, turn: Turn, prompt_text: str, output_text: str) -> dict[str, Any]:
    return facts_of(turn) | {
        "turn_index": index,
        "sampling": msgspec.json.encode(turn.sampling).decode(),
        "prompt_text": prompt_text,
        "output_text": output_text,
        "prompt_ids": turn.prompt_ids,
        "output_ids": turn.output_ids,
        "behavior_logprobs": turn.behavior_logprobs,
        "version_spans": [
            number
            for span in turn.version_spans
            for number in (span.policy_version, span.start, span.end)
        ],
        "loss_spans": [number for span in turn.loss_spans for number in span],
    }


def write_tables(episodes: pa.Table, turns: pa.Table, to_episodes: Path, to_turns: Path) -> None:
    """Write the files of a part."""
    pq.write_table(turns, to_turns, row_group_size=_TURN_ROWS, **_OPTIONS)
    pq.write_table(episodes, to_episodes, row_group_size=_EPISODE_ROWS, **_OPTIONS)


def merge_files(parts: Sequence[tuple[Path, Path]], to_episodes: Path, to_turns: Path) -> None:
    """Write the files of a part with the rows of several, in order; `parts`: (episodes, turns).

    A row group is in memory at a time, however large the parts are, and groups of long texts have
    fewer rows.
    """
    _merge([turns for _, turns in parts], to_turns, num_rows=_TURN_ROWS)
    _merge([episodes for episodes, _ in parts], to_episodes, num_rows=_EPISODE_ROWS)
    pa.default_memory_pool().release_unused()


def _merge(paths: Sequence[Path], to: Path, *, num_rows: int) -> None:
    # Earlier releases wrote fewer columns.
    schema = pa.unify_schemas([pq.read_schema(path) for path in paths])
    with pq.ParquetWriter(to, schema, **_OPTIONS) as writer:
        waiting = schema.empty_table()
        for path in paths:
            with pq.ParquetFile(path) as file:
                for number in range(file.num_row_groups):
                    table = file.read_row_group(number)
                    waiting = pa.concat_tables([waiting, table], promote_options="default")
                    while waiting.num_rows >= num_rows or waiting.nbytes >= _GROUP_BYTES:
                        writer.write_table(waiting.slice(0, num_rows), row_group_size=num_rows)
                        waiting = waiting.slice(num_rows)
        if waiting.num_rows:
            writer.write_table(waiting, row_group_size=num_rows)


def turn_of(row: dict[str, Any]) -> Turn:
    """The turn of a row of TURNS, bit by bit as it was recorded."""
    facts = row | {
        "version_spans": _in_groups(row["version_spans"], 3),
        "loss_spans": _in_groups(row["loss_spans"], 2),
        "sampling": json.loads(row["sampling"]),
    }
    return turn_with(
        facts,
        prompt_ids=row["prompt_ids"],
        output_ids=row["output_ids"],
        behavior_logprobs=row["behavior_logprobs"],
    )


def reward_of(row: dict[str, Any]) -> Reward | None:
    """The reward of a row of EPISODES."""
    if row["reward"] is None:
        return None
    return Reward(
        value=row["reward"],
        components=json.loads(row["reward_components"]),
        turns=json.loads(row["reward_turns"]),
        branches=json.loads(row["reward_branches"]),
        tokens=tuple(TokenReward(*span) for span in json.loads(row.get("reward_tokens") or "[]")),
        # Parts written before answers were recorded lack the column.
        answer=row.get("reward_answer") or "",
    )


def refusals_of(row: dict[str, Any]) -> Refusals:
    """The refusals of a row of EPISODES."""
    # Parts written before refusals were recorded lack the column.
    text = row.get("refusals")
    return NO_REFUSALS if text is None else msgspec.json.decode(text, type=Refusals)


def _in_groups(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]
