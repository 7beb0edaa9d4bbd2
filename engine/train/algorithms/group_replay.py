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

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.train.checkpoint.checkpoint_format import KEPT
from outloop.engine.train.data.batch_builder import Batch
from outloop.engine.train.data.sample_codec import decode_samples, encode_samples
from outloop.engine.train.data.samples import Sample

_SCHEMA = 1


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    step: int
    """Of the loop, in which it was trained first."""
    best_reward: float
    samples: bytes


class _Head(msgspec.Struct, frozen=True):
    schema: int
    sample_fields: list[str]


class _File(_Head, frozen=True):
    groups: list[_Kept]


class KeptGroups:
    """The kept groups of one run; without buffer.replay_share nothing is kept or replayed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._share = settings.buffer.replay_share
        self._kept: list[_Kept] = []

    def mix(
        self, updates: list[list[Sample]], *, step: int
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """The updates of a step with replayed groups behind the fresh ones, and the metrics of it.

        At most replay_share of the groups of each update are replayed, each group once in a step.
        Fresh groups make no room for them: the update grows.
        """
        if not self._share:
            return updates, {}
        settings = self._settings.buffer
        young = [kept for kept in self._kept if step - kept.step <= settings.replay_max_age]
        left = iter(sorted(young, key=lambda kept: self._draw(kept, step)))
        mixed: list[list[Sample]] = []
        replayed: list[_Kept] = []
        for samples in updates:
            num_fresh = len({sample.group_id for sample in samples})
            chosen = list(itertools.islice(left, settings.num_replayed(num_fresh)))
            replayed += chosen
            mixed.append([*samples, *(s for kept in chosen for s in decode_samples(kept.samples))])
        ages = [step - kept.step for kept in replayed]
        return mixed, {
            "train/replayed_groups": len(replayed),
            "train/replay_age": sum(ages) / len(ages) if ages else float("nan"),
            "train/kept_groups": len(self._kept),
        }

    def offer(self, batch: Batch, *, step: int) -> None:
        """Keep what is good of a step's fresh groups; too old ones, then the worst, make room.

        Groups without signal or below replay_min_reward are not kept. The better group is the one
        whose best episode has the higher reward; of equal ones, the one trained later.
        """
        if not self._share:
            return
        settings = self._settings.buffer
        for group_id, samples, reward in zip(
            batch.group_ids, batch.samples, batch.best_rewards, strict=True
        ):
            is_good = settings.replay_min_reward is None or reward >= settings.replay_min_reward
            if is_good and any(sample.advantage for sample in samples):
                self._kept.append(_Kept(group_id, step, reward, encode_samples(samples)))
        young = [kept for kept in self._kept if step - kept.step < settings.replay_max_age]
        young.sort(key=lambda kept: (-kept.best_reward, -kept.step))
        self._kept = young[: settings.replay_size]

    def encode(self) -> bytes:
        """What a checkpoint holds of them; empty if nothing is ever kept."""
        if not self._share:
            return b""
        file = _File(schema=_SCHEMA, sample_fields=_sample_fields(), groups=self._kept)
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
            if (head.schema, head.sample_fields) != (_SCHEMA, _sample_fields()):
                raise SettingsError(
                    f"path={str(path)!r} has schema={head.schema} and fields {head.sample_fields}; "
                    f"this release reads schema {_SCHEMA} with {_sample_fields()}. {remedy}, or go "
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
        return all(
            sample.num_tokens <= trainer.max_microbatch_tokens
            and (trainer.kl == "none" or sample.reference_logprobs is not None)
            for sample in decode_samples(kept.samples)
        )


def _sample_fields() -> list[str]:
    return [item.name for item in dataclasses.fields(Sample)]
