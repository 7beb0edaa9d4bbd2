"""Rows that a reward model scores: preferred and rejected conversations, or scored episodes.

What is scored is a whole branch: the last of an episode, up to its last token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Trajectory
from outloop.engine.train.data.samples import Sample, build_samples, with_one_more
from outloop.engine.train.data.train_batch import TrainBatch

PAIR, REWARD = "pair", "reward"
"""Keys of a conversation's metadata: rows of one pair are compared; the reward says which is
better, and is the target of a regression."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Rows that are compared with each other."""

    name: str
    rows: tuple[Sample, ...]
    targets: tuple[float, ...]

    @property
    def differs(self) -> bool:
        """True if some row is better than another."""
        return len(set(self.targets)) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRows:
    """What one update, or one evaluation, scores."""

    batch: TrainBatch
    """One trained token a row, the one that would follow its last: its predictor is the row."""
    targets: list[float]
    sets: list[int]


def comparisons(trajectories: Iterable[Trajectory]) -> list[Comparison]:
    """By pair, or by group; conversations that belong to neither are sets of their own.

    Raises:
        SettingsError: a trajectory has no reward, or one that is no number.
    """
    found: dict[str, list[tuple[Sample, float]]] = {}
    for trajectory in trajectories:
        episode = trajectory.episode
        samples = build_samples(trajectory)
        if not samples:
            continue
        name = episode.metadata.get(PAIR) or episode.group_id or episode.episode_id
        found.setdefault(name, []).append((samples[-1], _target_of(trajectory)))
    return [
        Comparison(
            name=name,
            rows=tuple(row for row, _ in members),
            targets=tuple(target for _, target in members),
        )
        for name, members in found.items()
    ]


def _target_of(trajectory: Trajectory) -> float:
    episode = trajectory.episode
    if episode.reward is not None:
        return episode.reward.value
    text = episode.metadata.get(REWARD, "")
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise SettingsError(
            f"episode_id={episode.episode_id}: reward={text!r} is no finite number; give rows "
            '{"chosen", "rejected"} or {"messages", "reward"} in env.conversations, or recorded '
            "episodes with rewards"
        )
    return found


def is_held_out(name: str, share: float) -> bool:
    """Whether a comparison is never trained: by hash of its name, so that no order moves one."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def scored_rows(chosen: Sequence[Comparison]) -> ScoredRows:
    """The rows of some comparisons, each with the place of its score."""
    rows = [_ending(row) for one in chosen for row in one.rows]
    return ScoredRows(
        batch=TrainBatch.of(rows),
        targets=[target for one in chosen for target in one.targets],
        sets=[index for index, one in enumerate(chosen) for _ in one.rows],
    )


def _ending(row: Sample) -> Sample:
    longer = with_one_more(row)
    is_last = np.arange(longer.num_tokens) == longer.num_tokens - 1
    return dataclasses.replace(longer, loss_mask=is_last)
