"""Refused updates and profiles."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fakes.bandit_run import FAST, Setup, arm
from outloop.buffer.errors import UpdateRefused
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.debug.bad_gradient_report import suspects

MakeRun = Callable[..., Setup]
MakeSamples = Callable[..., list[Sample]]


STEEP = """
def advantage(group):
    return [reward * 1e18 if reward > 1 else reward for reward in group.rewards]
"""


@pytest.mark.medium
def test_an_update_that_is_not_finite_names_its_episodes_and_stops(
    setup: MakeRun, tmp_path: Path
) -> None:
    """One episode's advantage at step 2 is too large for the gradient's norm: it is named first,
    and nothing was updated."""
    (tmp_path / "steep.py").write_text(STEEP)
    made = setup(
        env={"import_dir": tmp_path},
        trainer=FAST | {"num_steps": 4, "checkpoint_every": 0, "advantage_path": "steep:advantage"},
    )
    too_large = 1e12
    rewards: list[float] = []

    def reward_of(token: int) -> float:
        is_due = made.policy.scheduler.num_steps == 1 and too_large not in rewards
        rewards.append(too_large if is_due else arm(token))
        return rewards[-1]

    made.buffer.reward_of = reward_of
    with pytest.raises(UpdateRefused) as caught:
        made.train()
    (poisoned,) = [
        trajectory.episode.episode_id
        for lease in made.buffer.taken
        for trajectory in lease.group.trajectories
        if trajectory.episode.reward.value == too_large
    ]
    sentence = str(caught.value)
    assert sentence.startswith("step 2: grad_norm=inf")
    assert f"Likeliest first: {poisoned} (" in sentence
    assert made.policy.scheduler.num_steps == 1
    first, *rest = (made.run.dir / "reports/refused_step_2.jsonl").read_text().splitlines()
    assert json.loads(first)["step"] == 2
    assert json.loads(rest[0])["suspect"]["episode_id"] == poisoned
    assert json.loads(rest[1])["suspect"]["num_not_finite"] == 0


@pytest.mark.medium
def test_a_spike_is_refused_before_it_is_made(setup: MakeRun) -> None:
    """After twenty updates of its kind one of ten thousand times the pull stops the run."""
    made = setup(
        trainer=FAST
        | {"num_steps": 30, "checkpoint_every": 0, "learning_rate": 1e-5, "max_grad_spike": 50.0}
        | {"advantage": "dr_grpo", "denominator": "budget", "token_budget": 1}
    )

    def reward_of(token: int) -> float:
        return arm(token) * (1e4 if made.policy.scheduler.num_steps == 22 else 1.0)

    made.buffer.reward_of = reward_of
    with pytest.raises(UpdateRefused, match=r"step 23: grad_norm=.* exceeds .*max_grad_spike"):
        made.train()
    assert made.policy.scheduler.num_steps == 22


def test_what_is_not_finite_comes_before_what_pulls(make_samples: MakeSamples) -> None:
    """A NaN logprob outranks a large ratio, which outranks the rest."""
    samples = make_samples(4)
    logprobs = [np.where(s.loss_mask, s.behavior_logprobs, 0.0).astype(np.float32) for s in samples]
    where = np.flatnonzero(samples[2].loss_mask)[0]
    logprobs[2][where] = np.nan
    logprobs[1][np.flatnonzero(samples[1].loss_mask)[0]] += 9.0
    found = suspects(TrainBatch.of(samples), range(4), np.concatenate(logprobs))
    assert (found[0].episode_id, found[0].branch) == (samples[2].episode_id, samples[2].branch)
    assert found[0].num_not_finite == 1
    assert (found[1].episode_id, found[1].branch) == (samples[1].episode_id, samples[1].branch)
    assert found[1].max_log_ratio == pytest.approx(9.0, abs=1e-4)


@pytest.mark.medium
def test_a_profiled_step_leaves_a_trace_and_a_table(setup: MakeRun) -> None:
    """Of that step alone; the trace is JSON with the matrix products in it."""
    made = setup(trainer=FAST | {"num_steps": 2, "profile_steps": [2]})
    made.train()
    folder = made.run.dir / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_2_rank_0.json",
        "step_2_rank_0.txt",
    ]
    names = {
        event.get("name")
        for event in json.loads((folder / "step_2_rank_0.json").read_text())["traceEvents"]
    }
    assert "aten::mm" in names
    assert "aten::mm" in (folder / "step_2_rank_0.txt").read_text()


@pytest.mark.medium
def test_a_takes_last_update_is_reported_too(setup: MakeRun) -> None:
    """Its ratios have left 1, which those of the first have not."""
    made = setup(trainer=FAST | {"num_steps": 1, "num_updates_per_take": 2, "learning_rate": 0.05})
    (row,) = made.train()
    assert row["train/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert abs(row["train/last_ratio_p99"] - 1.0) > 1e-3
    assert 0.0 <= row["train/last_clip_share"] <= 1.0
