"""What the page asks of one run's folder.

Only files are read: metrics.jsonl, events.jsonl and the trajectory archive. Neither Redis nor the
run's keys are needed, and settings are not shown.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psutil
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from outloop.buffer.errors import NotFound
from outloop.buffer.events import read_events
from outloop.buffer.telemetry import read_metrics
from outloop.buffer.trajectories.folder import FOLDER, MANIFEST, read_manifest
from outloop.buffer.trajectories.query import connect
from outloop.buffer.trajectories.trained import read_trained
from outloop.buffer.trajectories.vocabulary import VOCABULARY
from outloop.view.lanes import lanes

LISTED = (
    "episode_id, group_id, task_id, slot, attempt, purpose, eval_name, fate, reason, "
    "trained_version, outcome, failure_kind, reward, opened_at, closed_at, ended_at, num_turns, "
    "num_branches, num_tokens, num_output_tokens, num_trained_tokens, min_version, max_version, "
    "error"
)
"""Columns of a listing: all but the long texts."""
_LISTED_CHARS = 2000
"""Of the first prompt's end and of the last answer, of which a listing shows a few words."""
_SORTS = {
    "ended": "ended_at",
    "reward": "reward",
    "tokens": "num_output_tokens",
    "turns": "num_turns",
    "version": "max_version",
    "duration": "closed_at - opened_at",
}
_TURN_TEXTS = (
    "turn_index, turn_id, parent_turn_id, choice_index, branch_cause, finish_reason, mask_reason, "
    "sampling, started_at, finished_at, prompt_text, output_text, version_spans, loss_spans, "
    "len(prompt_ids) AS num_prompt_tokens, len(output_ids) AS num_output_tokens, "
    "list_avg(behavior_logprobs) AS mean_logprob"
)
_TURN_TOKENS = (
    "turn_index, turn_id, parent_turn_id, prompt_ids, output_ids, behavior_logprobs, "
    "version_spans, loss_spans, mask_reason, finish_reason, branch_cause"
)


_MAX_VERSIONS, _PER_VERSION = 24, 8
"""Columns of a task's view, and attempts in each."""
_SHARED_CHARS, _DIFFERENT_CHARS = 60, 400
"""Of an attempt's text: before and after the place where it parts from another."""


class EpisodeFilter(BaseModel):
    """Which episodes are listed; None and "" ask for nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = ""
    """Somewhere in what was asked and answered, whatever its case, or in the error or output."""
    task: str = ""
    group: str = ""
    outcome: str = ""
    fate: str = ""
    purpose: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_version: int | None = None
    max_version: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    sort: str = "ended"
    descending: bool = True
    offset: int = Field(0, ge=0)
    limit: int = Field(50, ge=1, le=500)

    def sql(self) -> tuple[str, list[Any]]:
        """(condition, its parameters)."""
        conditions: list[str] = ["true"]
        parameters: list[Any] = []

        def add(condition: str, value: Any) -> None:
            conditions.append(condition)
            parameters.extend([value] * condition.count("?"))

        for column, name in (
            ("task_id", "task"),
            ("group_id", "group"),
            ("outcome", "outcome"),
            ("purpose", "purpose"),
        ):
            if getattr(self, name):
                add(f"{column} = ?", getattr(self, name))
        if self.fate:
            fate, _, reason = self.fate.partition("/")
            add("fate = ?", fate)
            if reason:
                add("reason = ?", reason)
        for column, low, high in (
            ("reward", self.min_reward, self.max_reward),
            ("max_version", self.min_version, self.max_version),
            ("num_output_tokens", self.min_tokens, self.max_tokens),
        ):
            if low is not None:
                add(f"{column} >= ?", low)
            if high is not None:
                add(f"{column} <= ?", high)
        if self.text:
            searched = ("text", "error", "output", "episode_id")
            found = " OR ".join(f"regexp_matches({column}, ?, 'i')" for column in searched)
            add(f"({found})", re.escape(self.text))
        return " AND ".join(conditions), parameters


@dataclass
class RunFolder:
    """One run as its folder shows it; may be used from several threads."""

    path: Path
    name: str
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _connection: duckdb.DuckDBPyConnection | None = None
    _seen: int = -1
    _vocabulary: list[str] | None = None
    _kept: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)
    """SQL -> state of the archive, rows."""

    @property
    def is_live(self) -> bool:
        """A launcher on this machine leads it."""
        try:
            named = json.loads((self.path / "launcher.json").read_text())
            return bool(psutil.Process(named["pid"]).create_time() == named["created"])
        except (OSError, ValueError, KeyError, psutil.Error):
            return False

    def summary(self) -> dict[str, Any]:
        """What the list of runs shows."""
        rows = [row for row in read_metrics(self.path) if "train/loss" in row]
        manifest = read_manifest(self.path / FOLDER)
        last = rows[-1] if rows else {}
        return {
            "name": self.name,
            "is_live": self.is_live,
            "num_steps": last.get("step", 0),
            "reward": last.get("train/reward_mean"),
            "num_episodes": sum(part.num_episodes for part in manifest.parts),
            "num_removed": manifest.num_removed,
            "num_bytes": sum(part.num_bytes for part in manifest.parts),
        }

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return read_metrics(self.path)

    def events(self) -> list[dict[str, Any]]:
        """The rows of events.jsonl."""
        return read_events(self.path)

    def lanes(self, last_s: float | None) -> dict[str, Any]:
        """What each part was doing in the last `last_s` seconds; None: in the whole run."""
        steps = {row["step"]: row for row in self.metrics() if "train/loss" in row}
        rows = [steps[step] for step in sorted(steps)]
        # When the update of a version began: its step's end, less what came behind it.
        began = {
            row["train/policy_version"]: row["time"]
            - sum(row.get(name) or 0.0 for name in ("train/update_s", "publish/duration_s"))
            for row in rows
            if row.get("train/policy_version") is not None
        }
        episodes = self._kept_rows(
            "SELECT opened_at, closed_at, trained_version FROM episodes WHERE closed_at IS NOT NULL"
        )
        turns = self._kept_rows("SELECT started_at, finished_at FROM turns")
        taken = [
            (one["closed_at"], began[one["trained_version"]])
            for one in episodes
            if began.get(one["trained_version"], 0.0) > one["closed_at"]
        ]
        return lanes(
            _intervals([(one["started_at"], one["finished_at"]) for one in turns]),
            _intervals([(one["opened_at"], one["closed_at"]) for one in episodes]),
            _intervals(taken),
            rows,
            last_s,
        )

    def fates(self) -> list[dict[str, Any]]:
        """How many episodes there are of each purpose, fate, reason and outcome."""
        return self._kept_rows(
            "SELECT purpose, fate, reason, outcome, count(*) AS number, avg(reward) AS reward "
            "FROM episodes GROUP BY ALL ORDER BY purpose DESC, number DESC"
        )

    def components(self) -> list[dict[str, Any]]:
        """Means of the named parts of rewards, by the newest version of an episode."""
        return self._kept_rows(
            "SELECT max_version AS version, name, avg(value) AS mean, count(*) AS number FROM ("
            "SELECT max_version, unnest(json_keys(reward_components)) AS name, "
            "CAST(json_extract(reward_components, '$.\"' || name || '\"') AS DOUBLE) AS value "
            "FROM episodes WHERE purpose = 'train' AND reward_components <> '{}') "
            "GROUP BY ALL ORDER BY version, name"
        )

    def episodes(self, wanted: EpisodeFilter) -> dict[str, Any]:
        """A page of the listing, and how many episodes fit in all.

        `asked` and `answered`: the end of the first prompt and the beginning of the last answer.
        """
        condition, parameters = wanted.sql()
        order = _SORTS.get(wanted.sort, "ended_at")
        direction = "DESC" if wanted.descending else "ASC"
        # Texts are searched once, and the other columns are read for one page alone.
        page = self._rows(
            "SELECT episode_id, count(*) OVER () AS total, avg(reward) OVER () AS mean_reward FROM "
            f"(SELECT episode_id, reward, {order} AS key FROM episodes WHERE {condition}) "
            f"ORDER BY key {direction} NULLS LAST, episode_id LIMIT ? OFFSET ?",
            [*parameters, wanted.limit, wanted.offset],
        )
        ids = [row["episode_id"] for row in page]
        found = self._rows(
            f"SELECT {LISTED} FROM episodes WHERE episode_id IN ({_marks(ids)})", ids
        )
        by_id = {row["episode_id"]: row for row in found}
        for row in self._rows(
            "SELECT episode_id, right(arg_min(prompt_text, turn_index), ?) AS asked, "
            "left(arg_max(output_text, turn_index), ?) AS answered FROM turns "
            f"WHERE episode_id IN ({_marks(ids)}) GROUP BY episode_id",
            [_LISTED_CHARS, _LISTED_CHARS, *ids],
        ):
            by_id[row["episode_id"]] |= row
        return {
            "total": page[0]["total"] if page else 0,
            "mean_reward": page[0]["mean_reward"] if page else None,
            "episodes": [by_id[one] for one in ids if one in by_id],
        }

    def episode(self, episode_id: str) -> dict[str, Any]:
        """An episode with the texts of its turns, and its neighbours in its group.

        Raises:
            NotFound: the archive does not hold it.
        """
        found = self._whole("episode_id = ?", episode_id)
        if not found:
            raise NotFound(f"episode_id={episode_id} is not in the archive of run {self.name}")
        (row,) = found
        row["group"] = (
            self._rows(
                f"SELECT {LISTED} FROM episodes WHERE group_id = ? ORDER BY attempt, ended_at",
                [row["group_id"]],
            )
            if row["group_id"]
            else []
        )
        return row

    def group(self, group_id: str) -> list[dict[str, Any]]:
        """Every attempt of a group, with the texts of its turns.

        Raises:
            NotFound: the archive holds none.
        """
        found = self._whole("group_id = ?", group_id)
        if not found:
            raise NotFound(f"group_id={group_id} is not in the archive of run {self.name}")
        return found

    def task(self, task_id: str, *, before: int | None = None) -> dict[str, Any]:
        """Attempts at a task by policy version, each with where its text parts from the one before.

        `versions`: all of them, oldest first. `shown`: the newest _MAX_VERSIONS of them, older
        than `before` if that is given. `attempts`: the newest _PER_VERSION of each of those.
        `num_chars`: how long the policy's text is; `num_shared`: how much of it is that of the last
        attempt of the version before; `shared_end`, `differs`: around where they part.

        Raises:
            NotFound: the archive holds no attempt at it.
        """
        versions = self._rows(
            "SELECT max_version AS version, count(*) AS number, avg(reward) AS mean_reward "
            "FROM episodes "
            "WHERE task_id = ? GROUP BY max_version ORDER BY max_version NULLS FIRST",
            [task_id],
        )
        if not versions:
            raise NotFound(f"task_id={task_id} is not in the archive of run {self.name}")
        known = [row["version"] for row in versions]
        older = [one for one in known if before is None or one is None or one < before]
        shown = (older or known)[-_MAX_VERSIONS:]
        attempts = self._rows(
            f"SELECT {LISTED} FROM episodes WHERE task_id = ? AND "
            f"coalesce(max_version, -1) IN ({_marks(shown)}) "
            "QUALIFY row_number() OVER (PARTITION BY max_version ORDER BY ended_at DESC) <= ? "
            "ORDER BY max_version NULLS FIRST, ended_at",
            [task_id, *(-1 if one is None else one for one in shown), _PER_VERSION],
        )
        ids = [row["episode_id"] for row in attempts]
        texts = dict.fromkeys(ids, "")
        for turn in self._rows(
            f"SELECT episode_id, output_text FROM turns WHERE episode_id IN ({_marks(ids)}) "
            "ORDER BY turn_index",
            ids,
        ):
            texts[turn["episode_id"]] += turn["output_text"]
        _add_differences(attempts, texts)
        first = self._rows(
            "SELECT prompt_text FROM turns WHERE episode_id = ? ORDER BY turn_index LIMIT 1",
            ids[-1:],
        )
        return {
            "task_id": task_id,
            "versions": versions,
            "shown": shown,
            "attempts": attempts,
            "prompt": first[0]["prompt_text"] if first else None,
        }

    def tokens(self, episode_id: str) -> dict[str, Any]:
        """The token columns of an episode's turns, and the texts of the ids in them."""
        turns = self._turns(_TURN_TOKENS, episode_id)
        self._add_advantages(episode_id, turns)
        if not turns:
            raise NotFound(f"episode_id={episode_id} has no turns in the archive")
        used = {one for turn in turns for one in (*turn["prompt_ids"], *turn["output_ids"])}
        words = self._words()
        return {
            "turns": turns,
            "texts": {one: words[one] for one in sorted(used) if one < len(words)},
        }

    def _whole(self, condition: str, value: str) -> list[dict[str, Any]]:
        """Episodes with the texts of their turns."""
        found = self._rows(
            f"SELECT * EXCLUDE (text) FROM episodes WHERE {condition} ORDER BY attempt, ended_at",
            [value],
        )
        ids = [row["episode_id"] for row in found]
        turns: dict[str, list[dict[str, Any]]] = {one: [] for one in ids}
        for turn in self._rows(
            f"SELECT episode_id, {_TURN_TEXTS} FROM turns WHERE episode_id IN ({_marks(ids)}) "
            "ORDER BY turn_index",
            ids,
        ):
            turns[turn["episode_id"]].append(turn)
        for row in found:
            for name in ("reward_components", "reward_turns", "reward_branches", "metadata"):
                row[name] = json.loads(row[name])
            row["turns"] = turns[row["episode_id"]]
        return found

    def _add_advantages(self, episode_id: str, turns: list[dict[str, Any]]) -> None:
        """`advantages` and `policy_logprobs` of each turn's output: None for a token that no update
        trained."""
        for turn in turns:
            turn["advantages"] = turn["policy_logprobs"] = None
        found = self._rows(
            "SELECT trained_version FROM episodes WHERE episode_id = ?", [episode_id]
        )
        version = found[0]["trained_version"] if found else None
        if version is None:
            return
        paths = _branches(turns)
        for row in read_trained(self.path / FOLDER, version, episode_id):
            at = 0
            for turn in paths[row["branch"]]:
                at += len(turn["prompt_ids"])
                length = len(turn["output_ids"])
                for name in ("advantages", "policy_logprobs"):
                    column = row.get(name)
                    own = turn[name] or [None] * length
                    for index in range(length):
                        if column is not None and row["trained"][at + index]:
                            own[index] = column[at + index]
                    turn[name] = own
                at += length

    def _turns(self, columns: str, episode_id: str) -> list[dict[str, Any]]:
        return self._rows(
            f"SELECT {columns} FROM turns WHERE episode_id = ? ORDER BY turn_index", [episode_id]
        )

    def _words(self) -> list[str]:
        path = self.path / FOLDER / VOCABULARY
        with self._lock:
            if self._vocabulary is None and path.exists():
                self._vocabulary = pq.read_table(path, columns=["text"])[0].to_pylist()
            return self._vocabulary or []

    def _kept_rows(self, sql: str) -> list[dict[str, Any]]:
        """Rows of a query over everything; asked once for each state of the archive."""
        seen = self._state()
        if self._kept.get(sql, (None, []))[0] != seen:
            self._kept[sql] = (seen, self._rows(sql))
        return self._kept[sql][1]

    def _state(self) -> int:
        try:
            return (self.path / FOLDER / MANIFEST).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _rows(self, sql: str, parameters: list[Any] | None = None) -> list[dict[str, Any]]:
        cursor = self._cursor()
        try:
            cursor.execute(sql, parameters or [])
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        finally:
            cursor.close()

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        """A cursor over the archive as its manifest is now."""
        folder = self.path / FOLDER
        with self._lock:
            seen = self._state()
            if self._connection is None or seen != self._seen:
                # A cursor of the old connection goes on until it is closed.
                self._connection, self._seen = connect(folder), seen
            return self._connection.cursor()


def _intervals(pairs: list[tuple[float, float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(pairs, np.float64).reshape(-1, 2)


def _marks(values: list[Any]) -> str:
    return ", ".join("?" for _ in values) or "NULL"


def _add_differences(attempts: list[dict[str, Any]], texts: dict[str, str]) -> None:
    """Say of each attempt, in the order of versions, where its text parts from the last."""
    previous, last = "", ""
    version: int | None = None
    for index, row in enumerate(attempts):
        text = texts[row["episode_id"]]
        if index and row["max_version"] != version:
            previous = last
        version, last = row["max_version"], text
        shared = _num_shared(previous, text)
        row["num_chars"], row["num_shared"] = len(text), shared
        row["shared_end"] = text[max(0, shared - _SHARED_CHARS) : shared]
        row["differs"] = text[shared : shared + _DIFFERENT_CHARS]


def _num_shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _branches(turns: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The paths of `Trajectory.branches()`."""
    by_id = {turn["turn_id"]: turn for turn in turns}
    parents = {turn["parent_turn_id"] for turn in turns}
    paths = []
    for leaf in turns:
        if leaf["turn_id"] in parents:
            continue
        path = [leaf]
        while path[-1]["parent_turn_id"] is not None:
            path.append(by_id[path[-1]["parent_turn_id"]])
        paths.append(path[::-1])
    return paths
