"""Good groups, kept to be trained again.

Owns: which trained groups are kept and for how long, which of them join an update, their form in
a checkpoint. Does not own: slots, leases and acknowledgement (a replayed group has none), the
checkpoint's folder (saving). Invariant: a replayed group has the ids, logprobs, versions and
advantages that it was first trained with; settings, step and kept groups decide the choice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from pathlib import Path

import msgspec
import numpy as np

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.train.checkpoint.checkpoint_format import KEPT
from outloop.engine.train.data.batch_builder import Batch
from outloop.engine.train.data.train_batch import TrainBatch, joined

_SCHEMA = 2


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    step: int
    """Of the loop, in which it was trained first."""
    best_reward: float
    rows: bytes
    """A `TrainBatch`."""


class _Head(msgspec.Struct, frozen=True):
    schema: int
    columns: list[str]


class _File(_Head, frozen=True):
    groups: list[_Kept]


class KeptGroups:
    """The kept groups of one run; without buffer.replay_share nothing is kept or replayed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._share = settings.buffer.replay_share
        self._kept: list[_Kept] = []

    def mix(
        self, fresh: TrainBatch, updates: list[list[int]], *, step: int
    ) -> tuple[TrainBatch, list[list[int]], dict[str, float]]:
        """The rows of a step with replayed groups behind the fresh ones, which of them each update
        trains, and the metrics of it.

        At most replay_share of the groups of each update are replayed, each group once in a step.
        Fresh groups make no room for them: the update grows. Where replayed rows bring reference
        logprobs along, those of fresh rows are zero until they are computed.
        """
        if not self._share:
            return fresh, updates, {}
        settings = self._settings.buffer
        young = [kept for kept in self._kept if step - kept.step <= settings.replay_max_age]
        left = iter(sorted(young, key=lambda kept: self._draw(kept, step)))
        parts, num_rows = [fresh], len(fresh)
        mixed: list[list[int]] = []
        replayed: list[_Kept] = []
        for rows in updates:
            num_fresh = len({fresh.group_ids[row] for row in rows})
            chosen = list(itertools.islice(left, settings.num_replayed(num_fresh)))
            replayed += chosen
            mixed.append(list(rows))
            for kept in chosen:
                parts.append(TrainBatch.decode(kept.rows))
                mixed[-1] += range(num_rows, num_rows + len(parts[-1]))
                num_rows += len(parts[-1])
        if len(parts) > 1 and parts[1].reference_logprobs is not None:
            zeros = np.zeros(fresh.token_ids.shape, np.float32)
            parts[0] = fresh.with_columns(reference_logprobs=zeros)
        ages = [step - kept.step for kept in replayed]
        return (
            joined(parts),
            mixed,
            {
                "train/replayed_groups": len(replayed),
                "train/replay_age": sum(ages) / len(ages) if ages else float("nan"),
                "train/kept_groups": len(self._kept),
            },
        )

    def offer(self, batch: Batch, *, step: int) -> None:
        """Keep what is good of a step's fresh groups; too old ones, then the worst, make room.

        Groups without signal or below replay_min_reward are not kept. The better group is the one
        whose best episode has the higher reward; of equal ones, the one trained later.
        """
        if not self._share:
            return
        settings = self._settings.buffer
        for group_id, members, reward in zip(
            batch.group_ids, batch.trained, batch.best_rewards, strict=True
        ):
            is_good = settings.replay_min_reward is None or reward >= settings.replay_min_reward
            rows = batch.rows.select(members)
            if is_good and rows.advantages.any():
                self._kept.append(_Kept(group_id, step, reward, rows.encode()))
        young = [kept for kept in self._kept if step - kept.step < settings.replay_max_age]
        young.sort(key=lambda kept: (-kept.best_reward, -kept.step))
        self._kept = young[: settings.replay_size]

    def encode(self) -> bytes:
        """What a checkpoint holds of them; empty if nothing is ever kept."""
        if not self._share:
            return b""
        file = _File(schema=_SCHEMA, columns=_columns(), groups=self._kept)
        return msgspec.msgpack.encode(file)

    def restore(self, folder: Path) -> None:
        """Go on with the groups of a checkpoint; none, if it was written without replay.

        Groups that these settings could not train are left out.

        Raises:
            SettingsError: another release wrote them, or the file is damaged.
        """
        path = folder / KEPT
        if not self._share or not path.is_file():
            return
        data = path.read_bytes()
        remedy = "Set buffer.replay_share = 0 to go on without what was kept"
        try:
            head = msgspec.msgpack.decode(data, type=_Head)
            if (head.schema, head.columns) != (_SCHEMA, _columns()):
                raise SettingsError(
                    f"path={str(path)!r} has schema={head.schema} and columns {head.columns}; "
                    f"this release reads schema {_SCHEMA} with {_columns()}. {remedy}, or go "
                    "on with the release that wrote it"
                )
            groups = msgspec.msgpack.decode(data, type=_File).groups
        except msgspec.DecodeError as error:
            raise SettingsError(f"path={str(path)!r} is damaged: {error}. {remedy}") from error
        self._kept = [kept for kept in groups if self._can_be_trained(kept)]

    def _draw(self, kept: _Kept, step: int) -> bytes:
        """Orders the kept groups of a step at random, alike in every release and restart."""
        text = f"{self._settings.run.seed} {step} {kept.group_id}"
        return hashlib.sha256(text.encode()).digest()

    def _can_be_trained(self, kept: _Kept) -> bool:
        trainer = self._settings.trainer
        rows = TrainBatch.decode(kept.rows)
        has_reference = rows.reference_logprobs is not None
        return max(rows.lengths) <= trainer.max_microbatch_tokens and (
            has_reference == (trainer.kl != "none")
        )


def _columns() -> list[str]:
    return [item.name for item in dataclasses.fields(TrainBatch)]
