"""What is trained, what is dropped and what was measured before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from msgspec import structs

from outloop.buffer.errors import RecordError, UpdateRefused
from outloop.buffer.records import (
    Group,
    Reward,
    Sampling,
    TokenReward,
    Trajectory,
    Turn,
    VersionSpan,
)
from outloop.buffer.sampling_support import SamplingSupport
from outloop.buffer.settings import Settings
from outloop.engine.train.data.batch_builder import Batch, build_batch
from outloop.engine.train.data.samples import Sample, oldest_trained_version

SPREAD = 0.5**0.5
"""GRPO's advantage of two different rewards."""
MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]
MakeGroup = Callable[..., Group]


@pytest.fixture
def make_group(make_turn: MakeTurn, make_trajectory: MakeTrajectory) -> MakeGroup:
    """A group of one-turn episodes: `make_group("g", rewards=[0, 1], version=3)`."""

    def make(
        group_id: str,
        *,
        rewards: list[float | None],
        slot: int = 0,
        version: int = 0,
        output: tuple[int, ...] = (3, 4),
        turns: bool = True,
    ) -> Group:
        trajectories = tuple(
            make_trajectory(
                [make_turn("a", output=output, version=version)] if turns else [],
                reward=reward,
                episode_id=f"{group_id}-{index}",
                group_id=group_id,
            )
            for index, reward in enumerate(rewards)
        )
        return Group(
            group_id=group_id,
            slot=slot,
            task_id="t",
            group_size=len(rewards),
            trajectories=trajectories,
        )

    return make


def settings(**sections: dict[str, object]) -> Settings:
    """Settings with some values changed."""
    return Settings(model={"path": "m"}, **sections)


def samples_of(batch: Batch) -> list[list[Sample]]:
    """The trained rows by group."""
    return [[batch.rows.row(row) for row in members] for members in batch.trained]


def test_statistics_come_before_filters(make_group: MakeGroup) -> None:
    """The reported reward covers dropped groups too."""
    groups = [
        make_group("same", rewards=[1.0, 1.0], slot=1),
        make_group("mixed", rewards=[0.0, 1.0], slot=0),
    ]
    batch = build_batch(groups, settings(), policy_version=0, vocab_size=10)
    assert batch.metrics["train/reward_mean"] == 0.75
    assert batch.metrics["train/groups_with_signal_share"] == 0.5
    assert batch.group_ids == ("mixed",)
    assert batch.dropped == (("same", "no_signal"),)


def test_kept_groups_stay_in_admission_order(make_group: MakeGroup) -> None:
    """Slots decide, not the order of arrival."""
    groups = [
        make_group(name, rewards=[0.0, 1.0], slot=slot) for name, slot in (("b", 4), ("a", 2))
    ]
    batch = build_batch(groups, settings(), policy_version=0, vocab_size=10)
    assert batch.group_ids == ("a", "b")


def test_staleness_is_checked_once_more_at_the_step(make_group: MakeGroup) -> None:
    """Older than max_staleness is dropped whole; at the limit it is trained."""
    groups = [
        make_group("old", rewards=[0.0, 1.0], version=2),
        make_group("fresh", rewards=[0.0, 1.0], version=3),
    ]
    one = settings(buffer={"max_staleness": 1})
    batch = build_batch(groups, one, policy_version=4, vocab_size=10)
    assert batch.dropped == (("old", "stale"),)
    assert batch.metrics["train/staleness_max"] == 1


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [([None, None], "failed"), ([1.0, None], "no_signal"), ([0.5, 0.5], "no_signal")],
)
def test_groups_without_two_different_scores_are_dropped(
    rewards: list[float | None], reason: str, make_group: MakeGroup
) -> None:
    """An unscored episode is not a reward of zero."""
    batch = build_batch(
        [make_group("g", rewards=rewards)], settings(), policy_version=0, vocab_size=10
    )
    assert batch.dropped == (("g", reason),)


def test_unscored_episodes_are_neither_counted_nor_trained(make_group: MakeGroup) -> None:
    """Three attempts, two scored: advantages are those of two."""
    group = make_group("g", rewards=[0.0, None, 1.0])
    batch = build_batch([group], settings(), policy_version=0, vocab_size=10)
    assert [sample.episode_id for sample in samples_of(batch)[0]] == ["g-0", "g-2"]
    assert [s.advantage for s in samples_of(batch)[0]] == pytest.approx([-SPREAD, SPREAD], abs=1e-5)


def test_an_episode_without_turns_counts_in_the_baseline(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Two zero-turn failures and one success: the success stands out from all three."""
    played = make_trajectory([make_turn("a")], reward=1.0, episode_id="played")
    silent = [make_trajectory([], reward=0.0, episode_id=f"silent{i}") for i in range(2)]
    group = Group(group_id="g", slot=0, task_id="t", group_size=3, trajectories=(played, *silent))
    chosen = settings(trainer={"advantage": "dr_grpo"})
    batch = build_batch([group], chosen, policy_version=0, vocab_size=10)
    (sample,) = samples_of(batch)[0]
    assert sample.advantage == pytest.approx(2 / 3)


def test_unusable_ids_are_malformed_and_long_rows_overlong(make_group: MakeGroup) -> None:
    """Neither reaches the model."""
    groups = [
        make_group("ids", rewards=[0.0, 1.0], output=(3, 10)),
        make_group("long", rewards=[0.0, 1.0], output=(3,) * 30, slot=1),
    ]
    small = settings(trainer={"max_microbatch_tokens": 20})
    batch = build_batch(groups, small, policy_version=0, vocab_size=10)
    assert batch.dropped == (("ids", "malformed"), ("long", "overlong"))
    assert "token_ids hold id 10; ids below the model's vocab_size=10" in batch.sentences["ids"]


@pytest.mark.parametrize("limit", ["episode", "answer", "answer of a branch"])
def test_truncated_episodes_are_masked_only_if_asked(
    limit: str, make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Whatever limit ended them; they stay in the statistics either way (6.1 rules 9 and 16)."""
    turns = [make_turn("a", finish_reason="length" if limit == "answer" else "stop")]
    if limit == "answer of a branch":
        turns += [
            make_turn("b", parent="a"),
            make_turn("c", parent="a", finish_reason="length"),
        ]
    cut = make_trajectory(
        turns,
        reward=0.0,
        episode_id="cut",
        outcome="truncated" if limit == "episode" else "completed",
    )
    done = make_trajectory([make_turn("a")], reward=1.0, episode_id="done")
    group = Group(group_id="g", slot=0, task_id="t", group_size=2, trajectories=(cut, done))
    for masked, episodes in ((False, {"cut", "done"}), (True, {"done"})):
        chosen = settings(trainer={"mask_truncated": masked})
        batch = build_batch([group], chosen, policy_version=0, vocab_size=10)
        assert {sample.episode_id for sample in samples_of(batch)[0]} == episodes
        assert samples_of(batch)[0][-1].advantage == pytest.approx(SPREAD, abs=1e-5)
        assert batch.metrics["train/truncated_share"] == 0.5
        assert batch.metrics["train/length_cut_share"] == (0.0 if limit == "episode" else 0.5)


def test_an_answer_that_was_cut_and_went_on_is_not_truncated(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """The agent asked again: only the last answer of a branch decides."""
    turns = [make_turn("a", finish_reason="length"), make_turn("b", parent="a")]
    group = Group(
        group_id="g",
        slot=0,
        task_id="t",
        group_size=2,
        trajectories=tuple(
            make_trajectory(turns, reward=reward, episode_id=f"e{reward}") for reward in (0.0, 1.0)
        ),
    )
    chosen = settings(trainer={"mask_truncated": True})
    batch = build_batch([group], chosen, policy_version=0, vocab_size=10)
    assert len(samples_of(batch)[0]) == 2
    assert batch.metrics["train/truncated_share"] == 0.0


def test_lengths_are_measured_before_filters(make_group: MakeGroup) -> None:
    """Tokens generated in an episode, and whether longer ones are rewarded."""
    groups = [
        make_group("short", rewards=[0.0, 0.0], output=(3, 4), slot=0),
        make_group("long", rewards=[1.0, 1.0], output=(3, 4, 5, 6), slot=1),
    ]
    metrics = build_batch(groups, settings(), policy_version=0, vocab_size=10).metrics
    assert metrics["train/generated_tokens_mean"] == 3.0
    assert metrics["train/generated_tokens_max"] == 4
    assert metrics["train/length_reward_correlation"] == pytest.approx(1.0)


@pytest.mark.parametrize("reason", ["stale", "filtered", "overlong", "malformed"])
def test_statistics_of_a_take_cover_every_kind_of_dropped_group(
    reason: str, make_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean and deviation are those of all that was taken, whatever is dropped afterwards."""
    (tmp_path / "own_filter.py").write_text(
        "def keep(group):\n    return 'not this one' if group.group_id == 'filtered' else ''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    unlike: dict[str, dict[str, Any]] = {
        "stale": {"version": 1},
        "filtered": {},
        "overlong": {"output": (3,) * 30},
        "malformed": {"output": (3, 10)},
    }
    groups = [
        make_group("kept", rewards=[0.0, 1.0], version=4),
        make_group(reason, rewards=[5.0, 6.0], slot=1, **({"version": 4} | unlike[reason])),
    ]
    chosen = settings(
        trainer={"advantage": "reinforce_pp", "max_microbatch_tokens": 20},
        buffer={"max_staleness": 1, "filter_path": "own_filter:keep"},
    )
    batch = build_batch(groups, chosen, policy_version=4, vocab_size=10)
    assert batch.dropped == ((reason, reason),)
    rewards = np.array([0.0, 1.0, 5.0, 6.0])
    wanted = (rewards[:2] - rewards.mean()) / rewards.std()
    assert [s.advantage for s in samples_of(batch)[0]] == pytest.approx(wanted.tolist(), rel=1e-5)


def test_staleness_goes_by_the_oldest_turn(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """An episode that began two versions before the limit is stale, however fresh its end is."""
    turns = [make_turn("a", version=2), make_turn("b", parent="a", version=5)]
    group = Group(
        group_id="g",
        slot=0,
        task_id="t",
        group_size=2,
        trajectories=tuple(
            make_trajectory(turns, reward=reward, episode_id=f"e{reward}") for reward in (0.0, 1.0)
        ),
    )
    one = settings(buffer={"max_staleness": 1})
    batch = build_batch([group], one, policy_version=5, vocab_size=10)
    assert batch.dropped == (("g", "stale"),)
    three = settings(buffer={"max_staleness": 3})
    kept = build_batch([group], three, policy_version=5, vocab_size=10)
    assert kept.metrics["train/staleness_max"] == 3


@pytest.mark.medium
@given(num_groups=st.integers(0, 40), num_updates=st.integers(1, 9))
@settings_of_hypothesis(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_take_is_split_into_updates_of_equal_size(
    num_groups: int, num_updates: int, make_group: MakeGroup
) -> None:
    """Whole groups in order, each in one update; as many updates as asked for, or as groups, and
    none with more than one group beyond another's."""
    groups = [make_group(f"g{i}", rewards=[0.0, 1.0], slot=i) for i in range(num_groups)]
    batch = build_batch(groups, settings(), policy_version=0, vocab_size=10)
    updates = batch.updates(num_updates)
    names = [list(dict.fromkeys(batch.rows.group_ids[row] for row in rows)) for rows in updates]
    assert [name for update in names for name in update] == [f"g{i}" for i in range(num_groups)]
    assert len(updates) == min(num_updates, num_groups)
    sizes = [len(update) for update in names]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_further_passes_deal_the_groups_anew(make_group: MakeGroup) -> None:
    """Each pass trains every group once; the first in order, the others by the seed alone."""
    groups = [make_group(f"g{i}", rewards=[0.0, 1.0], slot=i) for i in range(9)]
    batch = build_batch(groups, settings(), policy_version=0, vocab_size=10)
    found = batch.updates(3, num_epochs=3, seed=5)
    passes = [found[start : start + 3] for start in (0, 3, 6)]
    assert passes[0] == batch.updates(3)
    everything = sorted(row for rows in passes[0] for row in rows)
    for one in passes[1:]:
        assert sorted(row for rows in one for row in rows) == everything
        assert [len(rows) for rows in one] == [len(rows) for rows in passes[0]]
    assert passes[0] != passes[1] != passes[2]
    assert batch.updates(3, num_epochs=3, seed=5) == found
    assert batch.updates(3, num_epochs=3, seed=6) != found


def test_rows_that_a_teacher_scores_hold_no_supports(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """A teacher knows the whole vocabulary: a token that was sampled among some ids is not trained
    then, and is without one."""
    among_two = SamplingSupport.of([[3, 5], [4, 6]])
    turn = structs.replace(
        make_turn("a"), sampling=Sampling(temperature=1.0, top_k=2), support=among_two
    )
    group = Group(
        group_id="g",
        slot=0,
        task_id="t",
        group_size=2,
        trajectories=tuple(
            make_trajectory([turn], reward=reward, episode_id=f"e{reward}") for reward in (0.0, 1.0)
        ),
    )
    alone = build_batch([group], settings(), policy_version=0, vocab_size=10)
    assert alone.metrics["train/support_share"] == 1.0
    teacher = {"teacher": {"path": "t"}}
    taught = build_batch([group], settings(trainer=teacher), policy_version=0, vocab_size=10)
    assert len(taught.rows) == 0
    assert "train/support_share" not in taught.metrics


def test_a_token_is_as_old_as_the_oldest_version_of_its_turn(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Wherever in the turn that version sampled; later tokens attended to it, earlier ones did
    not, and tokens that are not trained do not count."""
    spans = (VersionSpan(5, 0, 1), VersionSpan(3, 1, 2), VersionSpan(4, 2, 3))
    turn = make_turn("a", output=[3, 4, 5], spans=spans)
    assert turn.trained_version_bounds == (3, 5)
    for trained, oldest in (((2, 3), 3), ((1, 2), 3), ((0, 1), 5), ((2, 2), None)):
        assert structs.replace(turn, loss_spans=(trained,)).trained_version_bounds == (oldest, 5)
    assert oldest_trained_version(make_trajectory([turn])) == 3


@pytest.mark.parametrize("part", ["value", "components", "turns", "branches", "tokens"])
@pytest.mark.parametrize("number", [1e300, -1e13, float("inf"), float("nan"), 10**400])
def test_a_reward_that_would_overflow_statistics_is_refused(part: str, number: float) -> None:
    """Where it is built, as one that is no number is; a group with it would teach nothing and say
    that all is well."""
    parts: dict[str, Any] = {
        "components": {"c": number},
        "turns": {"t": number},
        "branches": {"t": number},
        "tokens": (TokenReward("t", 0, 1, number),),
    }
    with pytest.raises(RecordError, match="allowed"):
        Reward(value=number) if part == "value" else Reward(value=0.0, **{part: parts[part]})


@pytest.mark.parametrize("largest", [1e12, -1e12, 1e6])
@pytest.mark.parametrize(
    "advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "best_of_n"]
)
def test_the_largest_reward_leaves_advantages_finite(
    advantage: str, largest: float, make_group: MakeGroup
) -> None:
    """Each group that has signal teaches, and is pulled towards what earned most."""
    group = make_group("g", rewards=[0.0, largest, 0.0, 1.0])
    chosen = settings(trainer={"advantage": advantage})
    batch = build_batch([group], chosen, policy_version=0, vocab_size=10)
    assert batch.metrics["train/groups_with_signal_share"] == 1.0
    found = [s.advantage for s in samples_of(batch)[0]]
    assert np.isfinite(found).all()
    assert np.ptp(found) > 0.5
    assert found[1] == (max(found) if largest > 0 else min(found))


@pytest.mark.parametrize(
    "trainer",
    [
        {"overlong_penalty": 1e300, "overlong_max_tokens": 1, "advantage": "grpo"},
        {"overlong_penalty": 1e200, "overlong_max_tokens": 1, "advantage": "reinforce_pp"},
        {"overlong_penalty": 1e39, "overlong_max_tokens": 1, "advantage": "dr_grpo"},
    ],
)
def test_what_overflows_later_refuses_the_step(
    trainer: dict[str, Any], make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Advantages of zero or infinity would hide it."""
    turns = [make_turn("a", output=(3,) * size) for size in (1, 3)]
    group = Group(
        group_id="g",
        slot=0,
        task_id="t",
        group_size=2,
        trajectories=tuple(
            make_trajectory([turn], reward=reward, episode_id=f"e{reward}")
            for turn, reward in zip(turns, (0.0, 1.0), strict=True)
        ),
    )
    chosen = settings(trainer=trainer | {"overlong_buffer_tokens": 0, "overlong_max_tokens": 2})
    with pytest.raises(UpdateRefused, match="not finite: its rewards"):
        build_batch([group], chosen, policy_version=0, vocab_size=10)
