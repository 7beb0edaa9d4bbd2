"""Good groups that are trained again: which, how often, with what, and after a restart."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fakes.memory_buffer import FAST, Setup
from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, build_settings
from outloop.engine.train.algorithms.group_replay import KeptGroups
from outloop.engine.train.checkpoint.checkpoint_format import KEPT
from outloop.engine.train.data.batch_builder import Batch, Credit
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch

MakeRun = Callable[..., Setup]
MakeSamples = Callable[..., list[Sample]]
MakeBatch = Callable[..., Batch]
CORRECTED = {"proximal": "recompute", "correction": "token_tis"}
REPLAYS = {"replay_share": 0.25, "group_size": 8}


def settings(*, seed: int = 0, trainer: Any = None, **buffer: Any) -> Settings:
    """Settings that replay."""
    return Settings(
        run={"seed": seed},
        model={"path": "m"},
        buffer={"replay_share": 0.25} | buffer,
        trainer=CORRECTED | (trainer or {}),
    )


@pytest.fixture
def make_batch(make_samples: MakeSamples) -> MakeBatch:
    """A step's fresh groups by best reward: `make_batch({"a": 1.0}, advantage=0.5)`."""

    def make(rewards: dict[str, float], *, advantage: float = 0.5) -> Batch:
        made = iter(make_samples(2 * len(rewards), seed=len(rewards)))
        rows = [
            dataclasses.replace(
                sample := next(made),
                group_id=name,
                advantages=np.full(sample.num_tokens, advantage, np.float32),
            )
            for name in rewards
            for _ in range(2)
        ]
        return Batch(
            rows=TrainBatch.of(rows),
            trained=tuple((2 * place, 2 * place + 1) for place in range(len(rewards))),
            group_ids=tuple(rewards),
            best_rewards=tuple(rewards.values()),
            dropped=(),
            credit=Credit(advantage="grpo", rewards=(), teaches=(), rows={}),
            metrics={},
        )

    return make


def names(rows: TrainBatch, members: Sequence[int]) -> list[str]:
    """Groups in order, each once."""
    return list(dict.fromkeys(rows.group_ids[row] for row in members))


def replayed(kept: KeptGroups, batch: Batch, *, step: int) -> list[str]:
    """The groups that join one update of `batch`."""
    rows, (mixed,), metrics = kept.mix(batch.rows, batch.updates(1), step=step)
    found = names(rows, mixed)[len(batch.group_ids) :]
    assert metrics["train/replayed_groups"] == len(found)
    return found


def test_the_share_bounds_every_update(make_batch: MakeBatch) -> None:
    """As many as fit and no more, each once, whatever the number of updates."""
    for share in (0.1, 0.25, 0.3, 0.49):
        kept = KeptGroups(settings(replay_share=share))
        kept.offer(make_batch({f"old{i}": 1.0 for i in range(40)}), step=1)
        fresh = make_batch({f"new{i}": 1.0 for i in range(21)})
        rows, mixed, metrics = kept.mix(fresh.rows, fresh.updates(2), step=2)
        old = [[n for n in names(rows, members) if n.startswith("old")] for members in mixed]
        for members, found in zip(mixed, old, strict=True):
            num = len(names(rows, members))
            assert len(found) <= share * num + 1e-9
            assert len(found) + 1 > share * (num + 1) + 1e-9
        every = [*old[0], *old[1]]
        assert len(every) == len(set(every)) == metrics["train/replayed_groups"]
        assert metrics["train/replay_age"] == 1


def test_the_choice_follows_from_seed_and_step(make_batch: MakeBatch) -> None:
    """The same again for the same; another for another step or seed."""
    fresh = make_batch({f"new{i}": 1.0 for i in range(12)})

    def choice(seed: int, step: int) -> list[str]:
        kept = KeptGroups(settings(seed=seed))
        kept.offer(make_batch({f"old{i}": 1.0 for i in range(30)}), step=1)
        return replayed(kept, fresh, step=step)

    assert len(choice(0, 2)) == 4
    assert choice(0, 2) == choice(0, 2)
    assert len({tuple(choice(seed, step)) for seed in (0, 1) for step in (2, 3, 4)}) == 6


def test_the_worst_then_the_oldest_make_room(make_batch: MakeBatch) -> None:
    """Only with signal, only good enough, at most replay_size, none beyond its age."""
    kept = KeptGroups(
        settings(replay_share=0.45, replay_size=3, replay_max_age=3, replay_min_reward=0.5)
    )
    fresh = make_batch({f"new{i}": 1.0 for i in range(12)})
    kept.offer(make_batch({"equal": 1.0}, advantage=0.0), step=1)
    kept.offer(make_batch({"bad": 0.4, "fair": 0.5, "good": 0.9}), step=1)
    assert set(replayed(kept, fresh, step=2)) == {"fair", "good"}
    kept.offer(make_batch({"later": 0.9, "better": 1.0}), step=2)
    assert set(replayed(kept, fresh, step=4)) == {"good", "later", "better"}
    assert set(replayed(kept, fresh, step=5)) == {"later", "better"}
    kept.offer(make_batch({"last": 0.9, "least": 0.9}), step=3)
    assert set(replayed(kept, fresh, step=4)) == {"better", "last", "least"}


def test_nothing_is_kept_or_replayed_by_default(make_batch: MakeBatch, tmp_path: Path) -> None:
    """Updates stay what they were, checkpoints get no file, one that is there is not read."""
    kept = KeptGroups(Settings(model={"path": "m"}))
    kept.offer(make_batch({"old": 1.0}), step=1)
    new = make_batch({"new": 1.0})
    (tmp_path / KEPT).write_bytes(b"rubbish")
    kept.restore(tmp_path)
    rows, updates, metrics = kept.mix(new.rows, new.updates(1), step=2)
    assert rows is new.rows
    assert (updates, metrics) == (new.updates(1), {})
    assert kept.encode() == b""


@pytest.mark.parametrize(
    ("buffer", "trainer", "sentence"),
    [
        ({}, {"correction": "none"}, 'trainer.correction="none" trains what older weights drew'),
        ({}, {"correction": "none", "proximal": "behavior"}, "set trainer.correction"),
        ({}, {"mode": "sft", "correction": "none", "proximal": "behavior"}, "trainer.num_epochs"),
        ({}, {"groups_per_step": 4, "num_updates_per_take": 2}, "0.334 or more, below 0.5"),
        ({"replay_share": 0.5}, {}, "buffer.replay_share=0.5: input should be less than 0.5"),
        ({"replay_size": 0}, {}, "buffer.replay_size=0"),
        ({"replay_max_age": 0}, {}, "buffer.replay_max_age=0"),
    ],
)
def test_settings_that_would_mislead_are_refused(
    buffer: dict[str, Any], trainer: dict[str, Any], sentence: str
) -> None:
    """Without off-policy correction, in SFT, for less than one group, out of bounds."""
    tree = {
        "model": {"path": "m"},
        "buffer": {"replay_share": 0.3} | buffer,
        "trainer": CORRECTED | trainer,
    }
    with pytest.raises(SettingsError) as caught:
        build_settings(tree, source="run.toml")
    assert sentence in str(caught.value)


def test_a_checkpoint_gives_back_what_was_kept(make_batch: MakeBatch, tmp_path: Path) -> None:
    """The same groups, bit by bit, chosen alike; what could not be trained now is left out."""
    first, second = KeptGroups(settings()), KeptGroups(settings())
    old, fresh = (
        make_batch({"a": 1.0, "b": 0.5, "c": 1.0}),
        make_batch({"x": 1.0, "y": 1.0, "z": 1}),
    )
    first.offer(old, step=1)
    (tmp_path / KEPT).write_bytes(first.encode())
    second.restore(tmp_path)
    now, (members,), _ = first.mix(fresh.rows, fresh.updates(1), step=2)
    then, _, _ = second.mix(fresh.rows, fresh.updates(1), step=2)
    assert len(now) == len(members) == 8
    assert now.encode() == then.encode()
    assert second.encode() == first.encode()
    for changed in ({"max_microbatch_tokens": 3}, {"kl": "k3"}):
        third = KeptGroups(settings(trainer=changed))
        third.restore(tmp_path)
        assert replayed(third, fresh, step=2) == []
    KeptGroups(settings()).restore(tmp_path / "without")


def test_another_releases_groups_are_refused(make_batch: MakeBatch, tmp_path: Path) -> None:
    """So are damaged ones; the sentence says how to go on."""
    kept = KeptGroups(settings())
    kept.offer(make_batch({"a": 1.0}), step=1)
    tree = msgspec.msgpack.decode(kept.encode())
    for data, sentence in (
        (msgspec.msgpack.encode(tree | {"schema": 1}), "has schema=1"),
        (msgspec.msgpack.encode(tree | {"columns": ["ids"]}), r"columns \['ids'\]"),
        (kept.encode()[:-9], "is damaged"),
        (b"rubbish", "is damaged"),
    ):
        (tmp_path / KEPT).write_bytes(data)
        with pytest.raises(SettingsError, match=sentence) as caught:
            kept.restore(tmp_path)
        assert "buffer.replay_share = 0" in str(caught.value)


def is_equal(one: Sample, other: Sample) -> bool:
    """Every field, bit by bit."""
    return TrainBatch.of([one]).encode() == TrainBatch.of([other]).encode()


def names_of(samples: Sequence[Sample]) -> list[str]:
    """Groups in order, each once."""
    return list(dict.fromkeys(sample.group_id for sample in samples))


def watch(made: Setup) -> list[tuple[Sample, ...]]:
    """What every update of the run is given, from now on."""
    given: list[tuple[Sample, ...]] = []
    update = made.lead.update

    def update_watched(rows: Sequence[int], **arguments: Any) -> Any:
        given.append(tuple(made.lead.batch.row(row) for row in rows))
        return update(rows, **arguments)

    made.lead.update = update_watched
    return given


def test_a_replayed_group_is_trained_with_its_own_logprobs(setup: MakeRun) -> None:
    """Its ids, logprobs, versions and advantages of the first time; proximal and weight of now.
    It fills no slot, is in no mark, and staleness is measured without it."""
    made = setup(
        trainer=FAST | CORRECTED | {"num_steps": 5, "checkpoint_every": 2, "correction_cap": 1.5},
        buffer=REPLAYS | {"max_staleness": 0, "replay_max_age": 3},
    )
    given = watch(made)
    rows = made.train()
    first: dict[tuple[str, str], Sample] = {}
    num_replayed = []
    for row, samples in zip(rows, given, strict=True):
        again = [s for s in samples if (s.group_id, s.episode_id) in first]
        num_replayed.append(len(names_of(again)))
        assert row["train/replayed_groups"] == num_replayed[-1]
        assert row["train/staleness_max"] == 0
        for sample in again:
            then = first[sample.group_id, sample.episode_id]
            assert sample.behavior_logprobs is not None
            assert sample.proximal_logprobs is not None
            assert sample.correction is not None
            undone = {"proximal_logprobs": None, "correction": None}
            assert is_equal(
                dataclasses.replace(sample, **undone), dataclasses.replace(then, **undone)
            )
            ratio = np.exp(sample.proximal_logprobs - sample.behavior_logprobs)[sample.loss_mask]
            assert np.allclose(sample.correction[sample.loss_mask], np.minimum(ratio, 1.5))
            assert not np.array_equal(sample.proximal_logprobs, then.proximal_logprobs)
        assert 1 <= row["train/replay_age"] <= 3 if again else row["train/replay_age"] is None
        first = {(s.group_id, s.episode_id): s for s in samples} | first
    assert num_replayed[0] == 0
    assert min(num_replayed[1:]) >= 1
    assert len(rows) == 5
    marked = [name for mark in made.buffer.marks for name in mark.group_ids]
    assert len(marked) == len(set(marked))
    assert set(marked) == {name for name, _ in first}
    num_dropped = sum(kind == "drop" for kind, _ in made.events)
    assert len(marked) == 5 * 8 - num_dropped


def test_a_restart_replays_what_would_have_been_replayed(setup: MakeRun) -> None:
    """From the same checkpoint the same groups, of the same age, though versions were skipped."""
    chosen = {
        "trainer": FAST | CORRECTED | {"num_steps": 3, "checkpoint_every": 2},
        "buffer": REPLAYS | {"replay_max_age": 1},
    }
    made = setup(**chosen)
    given = watch(made)
    rows = made.train()
    shutil.rmtree(made.run.dir / "checkpoints" / "step_3")
    again = setup(**chosen)
    again.buffer.highest, again.buffer.next_slot = 9, 16
    given_again = watch(again)
    rows_again = again.train()

    def of_before(samples: Sequence[Sample]) -> list[Sample]:
        return [sample for sample in samples if int(sample.group_id[1:]) < 16]

    expected, found = of_before(given[2]), of_before(given_again[0])
    assert rows[-1]["train/replayed_groups"] == rows_again[-1]["train/replayed_groups"] > 0
    assert rows_again[-1]["train/replay_age"] == 1
    assert len(expected) == len(found) > 0
    assert all(map(is_equal, expected, found))
    assert not {name for mark in again.buffer.marks for name in mark.group_ids} & set(
        names_of(found)
    )
