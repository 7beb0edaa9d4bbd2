"""Checkpoints that are written while training goes on: what is in them, and when they count."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import torch

from fakes.bandit_run import FAST, Setup
from outloop.buffer.errors import CheckpointFailed, DeadlineExceeded
from outloop.buffer.records import CheckpointMark
from outloop.buffer.settings import TrainerSettings
from outloop.engine.train.checkpoint.async_writer import Shards, begin_save
from outloop.engine.train.checkpoint.checkpoint_format import latest_checkpoint, load_checkpoint
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.policy_update import rl_update

MakeRun = Callable[..., Setup]
MARK = CheckpointMark(fence=1, group_ids=("g",), next_slot=1, policy_version=1)
EVERY_OTHER = FAST | {"num_steps": 5, "checkpoint_every": 2}


def update(policy: Policy, samples: list[Sample]) -> float:
    """One update; its loss."""
    settings = TrainerSettings(learning_rate=1e-2)
    batch = TrainBatch.of(samples)
    return rl_update(policy, batch, settings, policy_version=0, on_microbatch=lambda: None).loss


@pytest.mark.medium
def test_what_is_trained_meanwhile_is_not_in_the_checkpoint(
    make_policy: Callable[..., Policy],
    make_samples: Callable[..., list[Sample]],
    tmp_path: Path,
) -> None:
    """Two updates between the copy and the write; what is read goes on as from the copy."""
    first, second = make_policy(), make_policy()
    update(first, make_samples(4))
    begun = begin_save(first, tmp_path, step=1, mark=MARK, keep=1)
    after = [update(first, make_samples(4, seed=seed)) for seed in (1, 2)]
    begun.run()
    found = latest_checkpoint(tmp_path)
    assert found is not None
    load_checkpoint(second, found)
    assert [update(second, make_samples(4, seed=seed)) for seed in (1, 2)] == after
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class GatedShards(Shards):
    """Written when the gate is set."""

    def __init__(self, gate: threading.Event, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self._gate = gate

    def write(self) -> Any:
        assert self._gate.wait(100), "the gate was never set"
        return super().write()


class FailingShards(Shards):
    """Finds a full disk at these writes of the run, numbered from 1 on."""

    def __init__(
        self, failing: set[int], numbers: Iterator[int], folder: Path, **options: Any
    ) -> None:
        super().__init__(folder, **options)
        self._failing = failing
        self._numbers = numbers

    def write(self) -> Any:
        if next(self._numbers) in self._failing:
            raise OSError(28, "No space left on device")
        return super().write()


@pytest.mark.medium
def test_steps_go_on_while_a_checkpoint_is_written(setup: MakeRun) -> None:
    """The step after it is trained; nothing is acknowledged before the write has ended."""
    gate = threading.Event()
    made = setup(trainer=EVERY_OTHER, make_shards=partial(GatedShards, gate))
    seen: list[list[int]] = []

    def watch() -> None:
        seen.append([mark.policy_version for mark in made.buffer.marks])
        if len(seen) == 4:
            assert latest_checkpoint(made.run.dir / "checkpoints") is None
            gate.set()

    made.buffer.on_take = watch
    made.train()
    assert seen[:4] == [[], [], [], []]
    assert [mark.policy_version for mark in made.buffer.marks] == [2, 4, 5]


@pytest.mark.medium
def test_a_save_waits_for_the_one_before(setup: MakeRun) -> None:
    """The second save begins only when the first has ended; the trainer says what it waits for."""
    gate = threading.Event()
    made = setup(trainer=EVERY_OTHER, make_shards=partial(GatedShards, gate))
    sentences: list[str] = []

    def note(sentence: str) -> None:
        sentences.append(sentence)
        # The second save is waited for too where the disk is slow; then the first has its mark.
        if sentence == "the checkpoint of step 2 to be written":
            assert made.buffer.marks == []
            gate.set()

    made.buffer.on_wait = note
    made.train()
    assert "the checkpoint of step 2 to be written" in sentences
    assert [mark.policy_version for mark in made.buffer.marks] == [2, 4, 5]


@pytest.mark.medium
def test_saving_while_training_can_be_switched_off(setup: MakeRun) -> None:
    """No thread is started, and the next take finds it acknowledged."""
    made = setup(trainer=EVERY_OTHER | {"trains_while_saving": False})
    seen: list[int] = []

    def watch() -> None:
        seen.append(len(made.buffer.marks))
        assert "checkpoint" not in [thread.name for thread in threading.enumerate()]

    made.buffer.on_take = watch
    made.train()
    assert seen == [0, 0, 1, 1, 2]


@pytest.mark.medium
def test_a_failed_write_is_logged_and_its_groups_are_in_the_next(setup: MakeRun) -> None:
    """Nothing is acknowledged by it; the next checkpoint's mark has the groups of both."""
    made = setup(trainer=EVERY_OTHER, make_shards=partial(FailingShards, {1}, count(1)))
    with structlog.testing.capture_logs() as logs:
        made.train()
    (warning,) = [entry for entry in logs if entry["event"] == "checkpoint_failed"]
    assert "step_2 was not written" in warning["sentence"]
    assert "No space left" in warning["sentence"]
    assert [mark.policy_version for mark in made.buffer.marks] == [4, 5]
    groups = [group for mark in made.buffer.marks for group in mark.group_ids]
    num_dropped = sum(kind == "drop" for kind, _ in made.events)
    assert len(groups) == len(set(groups)) == 40 - num_dropped


@pytest.mark.medium
@pytest.mark.parametrize("failing", [{2, 3}, {3}])
def test_the_run_ends_at_the_second_failure_or_the_last_save(
    failing: set[int], setup: MakeRun
) -> None:
    """Two in a row, or one that no other follows; the checkpoint before stays in use."""
    made = setup(trainer=EVERY_OTHER, make_shards=partial(FailingShards, failing, count(1)))
    with pytest.raises(CheckpointFailed, match="step_5 was not written"):
        made.train()
    in_use = 4 if failing == {3} else 2
    assert [mark.policy_version for mark in made.buffer.marks][-1] == in_use
    found = latest_checkpoint(made.run.dir / "checkpoints")
    assert found is not None
    assert found.step == in_use


@pytest.mark.medium
def test_a_write_that_never_ends_ends_the_run(setup: MakeRun) -> None:
    """The sentence says what was written and how long it was waited for."""
    gate = threading.Event()
    made = setup(
        trainer=FAST | {"num_steps": 2, "checkpoint_every": 1, "hang_timeout_s": 0.3},
        make_shards=partial(GatedShards, gate),
    )
    with pytest.raises(DeadlineExceeded, match="write the checkpoint of step 1"):
        made.train()
    gate.set()
    assert made.buffer.marks == []
