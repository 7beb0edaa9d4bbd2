"""What is taken off a reward, and when."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outloop.buffer.records import Float32, Group, Trajectory, Turn
from outloop.buffer.settings import Settings
from outloop.engine.train.algorithms.reward_shaping import overlong_penalty
from outloop.engine.train.data.batch_builder import Batch, build_batch, with_reference
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch

MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]


@given(
    size=st.integers(0, 50), limit=st.integers(1, 40), share=st.floats(0, 1), height=st.floats(0, 3)
)
def test_the_overlong_penalty_agrees_with_equation_13(
    size: int, limit: int, share: float, height: float
) -> None:
    """Nothing, then linear, then all of it; without a buffer a step."""
    buffer = int(share * limit)
    if size <= limit - buffer:
        want = 0.0
    elif size <= limit:
        want = (size - (limit - buffer)) / buffer
    else:
        want = 1.0
    got = overlong_penalty(size, max_tokens=limit, buffer_tokens=buffer, penalty=height)
    assert got == pytest.approx(want * height)


@pytest.fixture
def group(make_turn: MakeTurn, make_trajectory: MakeTrajectory) -> Group:
    """Three episodes: short, two branches over one turn, and one without turns; all pay 1."""
    first = make_turn("a", output=(3, 4))
    turns = [
        [make_turn("s", output=(3, 4))],
        [first, make_turn("b", parent="a", output=(5,)), make_turn("c", parent="a", output=(6, 7))],
        [],
    ]
    return Group(
        group_id="g",
        slot=0,
        task_id="t",
        group_size=3,
        trajectories=tuple(
            make_trajectory(path, reward=1.0, episode_id=f"e{index}")
            for index, path in enumerate(turns)
        ),
    )


def settings(**trainer: object) -> Settings:
    """Dr.GRPO, so that an advantage is a reward less its mean."""
    return Settings(model={"path": "m"}, trainer={"advantage": "dr_grpo", **trainer})


def test_overlong_shaping_comes_before_group_statistics(
    group: Group, make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Length is what was generated over all branches; the reported reward stays as it was."""
    shaped = settings(overlong_penalty=0.5, overlong_max_tokens=5, overlong_buffer_tokens=2)
    wrong = make_trajectory([make_turn("z", output=(9,))], reward=0.0, episode_id="e3")
    mixed = dataclasses.replace(group, group_size=4, trajectories=(*group.trajectories, wrong))
    batch = build_batch([mixed], shaped, policy_version=0, vocab_size=10)
    # Generated: 2, 5, 0 and 1 tokens, so the rewards are 1, 0.5, 1 and 0.
    (samples,) = samples_of(batch)
    advantages = {sample.episode_id: sample.advantage for sample in samples}
    assert advantages == pytest.approx({"e0": 0.375, "e1": -0.125, "e3": -0.625})
    assert batch.metrics["train/reward_mean"] == 0.75
    assert batch.metrics["train/overlong_penalty_mean"] == pytest.approx(0.5 / 4)
    plain = build_batch([group], settings(), policy_version=0, vocab_size=10)
    assert plain.dropped == (("g", "no_signal"),)
    assert "train/overlong_penalty_mean" not in plain.metrics


@pytest.mark.parametrize("drops", [True, False])
def test_length_alone_is_no_signal(drops: bool, group: Group) -> None:
    """Equal rewards of which one pays for its length: DAPO filters on correctness (equation 11).

    Before, one overlong attempt at a task that nobody solves made three wrong answers good ones.
    """
    chosen = Settings(
        model={"path": "m"},
        buffer={"drop_zero_signal": drops},
        trainer={
            "overlong_penalty": 0.5,
            "overlong_max_tokens": 5,
            "overlong_buffer_tokens": 2,
        },
    )
    batch = build_batch([group], chosen, policy_version=0, vocab_size=10)
    assert batch.metrics["train/groups_with_signal_share"] == 0.0
    assert batch.dropped == ((("g", "no_signal"),) if drops else ())
    assert all(sample.advantage == 0.0 for samples in samples_of(batch) for sample in samples)


def samples_of(batch: Batch) -> list[list[Sample]]:
    """The trained rows by group."""
    return [[batch.rows.row(row) for row in members] for members in batch.trained]


def with_kl(groups: Sequence[Group], chosen: Settings, *, policy_version: int = 0) -> Batch:
    """The batch of a step against `reference_of`."""
    batch = build_batch(groups, chosen, policy_version=policy_version, vocab_size=10)
    if not len(batch.rows):
        return batch
    reference = reference_of(batch.rows)
    rows, metrics = with_reference(batch.rows, batch.credit, reference, chosen)
    return dataclasses.replace(batch, rows=rows, metrics=batch.metrics | metrics)


def reference_of(rows: TrainBatch) -> Float32:
    """A reference that finds each trained token 0.1 * its id less likely than was recorded."""
    assert rows.behavior_logprobs is not None
    values = rows.behavior_logprobs - 0.1 * rows.token_ids.astype(np.float32)
    return np.where(rows.loss_mask, values, 0.0).astype(np.float32)


def test_k1_is_taken_off_the_reward_once_for_each_token(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory, group: Group
) -> None:
    """The sum over an episode's branches, a shared turn once; signal is decided without it."""
    loser = make_trajectory([make_turn("z", output=(9,))], reward=0.0, episode_id="e3")
    mixed = Group(
        group_id="g",
        slot=0,
        task_id="t",
        group_size=4,
        trajectories=(*group.trajectories, loser),
    )
    chosen = settings(kl="k1", kl_coefficient=0.5)
    batch = with_kl([mixed], chosen)
    paid = {"e0": 0.5 * 0.7, "e1": 0.5 * 2.5, "e2": 0.0, "e3": 0.5 * 0.9}
    rewards = {"e0": 1 - paid["e0"], "e1": 1 - paid["e1"], "e2": 1.0, "e3": -paid["e3"]}
    mean = sum(rewards.values()) / 4
    (samples,) = samples_of(batch)
    assert len(samples) == 4
    for sample in samples:
        assert sample.advantage == pytest.approx(rewards[sample.episode_id] - mean, abs=1e-6)
    assert batch.metrics["train/kl_penalty_mean"] == pytest.approx(sum(paid.values()) / 4)
    assert batch.metrics["train/kl"] == pytest.approx((0.7 + 2.5 + 0.9) / 8)
    equal = with_kl([group], chosen)
    assert equal.dropped == (("g", "no_signal"),)


def test_a_masked_episode_still_pays_for_its_distance(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """A truncated episode that is left out of the loss counts with its KL in the baseline."""
    trajectories = (
        make_trajectory([make_turn("a", output=(2,))], reward=1.0, episode_id="e0"),
        make_trajectory(
            [make_turn("b", output=(8,))], reward=0.0, episode_id="e1", outcome="truncated"
        ),
    )
    group = Group(group_id="g", slot=0, task_id="t", group_size=2, trajectories=trajectories)
    batch = with_kl([group], settings(kl="k1", kl_coefficient=1.0, mask_truncated=True))
    ((sample,),) = samples_of(batch)
    assert sample.episode_id == "e0"
    assert sample.advantage == pytest.approx((0.8 - -0.8) / 2)


def test_groups_that_pay_no_kl_do_not_shift_the_others_mean(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Under reinforce_pp with k1 a dropped group is left out of the take's mean: its reward is not
    less a penalty, and would push all others down."""

    def pair(name: str, slot: int, version: int) -> Group:
        return Group(
            group_id=name,
            slot=slot,
            task_id="t",
            group_size=2,
            trajectories=tuple(
                make_trajectory(
                    [make_turn("a", output=(3 + index,), version=version)],
                    reward=float(index),
                    episode_id=f"{name}{index}",
                    group_id=name,
                )
                for index in range(2)
            ),
        )

    chosen = settings(advantage="reinforce_pp", kl="k1", kl_coefficient=1.0)
    taken = [pair("kept", 0, 4), pair("stale", 1, 0)]
    batch = with_kl(taken, chosen, policy_version=4)
    assert batch.dropped == (("stale", "stale"),)
    (samples,) = samples_of(batch)
    assert sum(sample.advantage for sample in samples) == pytest.approx(0.0, abs=1e-6)
    # Rewards 0 - 0.3 and 1 - 0.4.
    assert [s.advantage for s in samples] == pytest.approx([-1.0, 1.0], rel=1e-4)
