"""Assigns tasks to the train, validation and test splits by the hash of their content.

A content is in the same split in every run and in every source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Task
from outloop.buffer.settings.env import EnvSettings


def content_hash(content: object) -> str:
    """SHA-256 of JSON-able content, the same for key order, spacing and Unicode composition."""
    text = json.dumps(_normalised(content), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def split_of(content: object, shares: Mapping[str, float]) -> str:
    """The split of `content`, which depends on its hash and the shares only.

    `shares` are relative sizes in a fixed order, e.g. {"train": 8, "validation": 1, "test": 1}.
    """
    if not shares or min(shares.values()) < 0 or sum(shares.values()) <= 0:
        raise SettingsError(
            f"shares={dict(shares)}; non-negative sizes with a sum above 0 are allowed"
        )
    point = int(content_hash(content)[:13], 16) / 16**13 * sum(shares.values())
    for name, share in shares.items():
        point -= share
        if point < 0:
            return name
    return list(shares)[-1]


def split_sources(
    lists: dict[str, tuple[Task, ...]], env: EnvSettings
) -> tuple[dict[str, tuple[Task, ...]], dict[str, tuple[Task, ...]]]:
    """The training split of each source, and the other splits of all sources together, by name.

    Of several sources the other splits have a task of each in turn, so that the first of them are
    of all; these tasks name their source.
    """
    shares: dict[str, float] = {
        name: env.split.get(name, 0.0) if env.split else 0.0
        for name in ("train", "validation", "test")
    }
    parts: dict[str, dict[str, list[Task]]] = {name: {} for name in shares}
    for name, some in lists.items():
        for task in some:
            chosen = split_of(task.payload, shares)
            parts[chosen].setdefault(name, []).append(task)
    for name in lists:
        if name not in parts["train"]:
            raise SettingsError(
                f"env.split={env.split} leaves no training task of env.tasks {name!r}, which has "
                f"{len(lists[name])}; give more tasks, or a larger train share"
            )
    held_out = {split: _in_turn(parts[split], len(lists)) for split in ("validation", "test")}
    return {name: tuple(some) for name, some in parts["train"].items()}, held_out


def _in_turn(parts: Mapping[str, Sequence[Task]], num_sources: int) -> tuple[Task, ...]:
    """A task of each source, another of each, and so on, each task once."""
    found: dict[str, Task] = {}
    for row in zip_longest(*parts.values()):
        for name, task in zip(parts, row, strict=True):
            if task is not None and task.task_id not in found:
                source = name if num_sources > 1 else ""
                found[task.task_id] = dataclasses.replace(task, source=source)
    return tuple(found.values())


def refuse_no_choice(held_out: Mapping[str, tuple[Task, ...]], env: EnvSettings) -> None:
    """Refuse to choose checkpoints without tasks of both splits.

    Raises:
        SettingsError: which split has none.
    """
    for split, some in held_out.items():
        if not some:
            raise SettingsError(
                f"eval.chooses_checkpoint=true: env.split={env.split} leaves no task for {split}; "
                "give more tasks, or a larger share of it"
            )


def _normalised(content: object) -> object:
    if isinstance(content, str):
        return " ".join(unicodedata.normalize("NFC", content).split())
    if isinstance(content, Mapping):
        return {str(key): _normalised(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_normalised(value) for value in content]
    if isinstance(content, float) and math.isfinite(content) and content.is_integer():
        return int(content)
    return content
