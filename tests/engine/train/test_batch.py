"""What is trained, what is dropped and what was measured before."""

from collections.abc import Callable

import pytest

from outloop.buffer.records import Group, Trajectory, Turn
from outloop.buffer.settings import Settings
from outloop.engine.train.data.batch_builder import build_batch

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
    assert [sample.episode_id for sample in batch.samples[0]] == ["g-0", "g-2"]
    assert [sample.advantage for sample in batch.samples[0]] == pytest.approx([-1, 1], abs=1e-5)


def test_an_episode_without_turns_counts_in_the_baseline(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Two zero-turn failures and one success: the success stands out from all three."""
    played = make_trajectory([make_turn("a")], reward=1.0, episode_id="played")
    silent = [make_trajectory([], reward=0.0, episode_id=f"silent{i}") for i in range(2)]
    group = Group(group_id="g", slot=0, task_id="t", group_size=3, trajectories=(played, *silent))
    chosen = settings(trainer={"advantage": "dr_grpo"})
    batch = build_batch([group], chosen, policy_version=0, vocab_size=10)
    (sample,) = batch.samples[0]
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


def test_truncated_episodes_are_masked_only_if_asked(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """They stay in the statistics either way (6.1 rule 9)."""
    trajectories = (
        make_trajectory([make_turn("a")], reward=0.0, episode_id="cut", outcome="truncated"),
        make_trajectory([make_turn("a")], reward=1.0, episode_id="done"),
    )
    group = Group(group_id="g", slot=0, task_id="t", group_size=2, trajectories=trajectories)
    for masked, episodes in ((False, ["cut", "done"]), (True, ["done"])):
        chosen = settings(trainer={"mask_truncated": masked})
        batch = build_batch([group], chosen, policy_version=0, vocab_size=10)
        assert [sample.episode_id for sample in batch.samples[0]] == episodes
        assert batch.samples[0][-1].advantage == pytest.approx(1.0, abs=1e-5)


def test_a_take_is_split_into_updates_by_whole_groups(make_group: MakeGroup) -> None:
    """Every sample is in exactly one update."""
    groups = [make_group(f"g{i}", rewards=[0.0, 1.0], slot=i) for i in range(5)]
    batch = build_batch(groups, settings(), policy_version=0, vocab_size=10)
    updates = batch.updates(2)
    assert [sorted({s.group_id for s in update}) for update in updates] == [
        ["g0", "g1", "g2"],
        ["g3", "g4"],
    ]
    assert build_batch([], settings(), policy_version=0, vocab_size=10).updates(2) == []
