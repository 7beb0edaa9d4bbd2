"""What moves while a run goes on: the entropy bonus, the reference, the mixture of tasks; and
advantages by source and by the best attempt."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from fakes.bandit_run import FAST, Setup
from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Group
from outloop.buffer.settings import Settings, build_settings
from outloop.engine.train.algorithms.advantages import best_of_n, grpo, rloo
from outloop.engine.train.algorithms.credit import (
    BySource,
    ScoredEpisode,
    ScoredGroup,
    ScoredTurn,
    SourceRule,
    reward_to_go,
    signals_of,
)
from outloop.engine.train.algorithms.objective import adapted_entropy_coefficient
from outloop.engine.train.algorithms.user_functions import advantage_of
from outloop.engine.train.curriculum import Curriculum, weight_of
from outloop.engine.train.debug.recorded_groups import Recording

MakeRun = Callable[..., Setup]
MIXTURE = {"easy": {"source": "a.jsonl", "weight": 2}, "hard": {"source": "b.jsonl"}}


def test_only_the_best_are_imitated() -> None:
    """They share the weight of their group, which is its size whatever the rewards' scale."""
    assert best_of_n(np.array([0.1, 3.0, -2.0, 2.9])).tolist() == [0.0, 4.0, 0.0, 0.0]
    assert best_of_n(np.array([1.0, 0.0, 1.0, 0.0])).tolist() == [2.0, 0.0, 2.0, 0.0]
    assert best_of_n(np.array([-5.0, -4.0])).tolist() == [0.0, 2.0]


def scored(source: str, *rewards: float) -> ScoredGroup:
    """A group of one-turn episodes."""
    turn = ScoredTurn(
        turn_id="t",
        parent=None,
        request=0,
        num_tokens=2,
        oldest_version=0,
        is_cut=False,
        spans=((0, 1, 1.0),),
    )
    episodes = tuple(
        ScoredEpisode(episode_id=str(n), reward=reward, turns=(turn,), branches=((0,),))
        for n, reward in enumerate(rewards)
    )
    return ScoredGroup(group_id="g", task_id="t", source=source, episodes=episodes)


def test_an_advantage_goes_by_the_source_of_its_group() -> None:
    """Named ones have their own, scaled; the others the default, whole."""
    rewards = [1.0, 0.5, 0.0]
    rules = {
        "a": SourceRule(advantage="grpo", weight=2.0),
        "b": SourceRule(weight=0.5),
        "c": SourceRule(advantage="reward_to_go", weight=3.0),
        "d": SourceRule(is_imitated=True, weight=3.0),
        "e": SourceRule(is_imitated=True, min_reward=1.5),
    }
    advantage = BySource("rloo", rules)
    array = np.array(rewards)
    assert advantage(scored("", *rewards)) == pytest.approx(rloo(array).tolist())
    assert advantage(scored("a", *rewards)) == pytest.approx((2 * grpo(array)).tolist())
    assert advantage(scored("b", *rewards)) == pytest.approx((0.5 * rloo(array)).tolist())
    plain = reward_to_go(scored("c", *rewards))
    for own, wanted in zip(advantage(scored("c", *rewards)), plain, strict=True):
        assert isinstance(own, list)
        assert isinstance(wanted, list)
        np.testing.assert_allclose(own[0], 3 * wanted[0])
        assert own[0].shape == (2,)
    assert advantage(scored("d", *rewards)) == [3.0, 3.0, 3.0]
    # What a part earned counts too: 1 each.
    assert advantage(scored("e", *rewards)) == [1.0, 1.0, 0.0]
    groups = [scored(name, 0.0, 0.0) for name in ("", "d", "e")]
    assert signals_of(groups, advantage) == [False, True, False]
    late = BySource("reward_to_go", {}, turn_discount=0.0)(scored("c", *rewards))
    for own, wanted in zip(late, reward_to_go(scored("c", *rewards), discount=0.0), strict=True):
        np.testing.assert_array_equal(own, wanted)


def build(trainer: dict[str, Any], **sections: Any) -> Settings:
    """Settings of a run with two lists of tasks."""
    tree = {"model": {"path": "."}, "env": {"tasks": MIXTURE}, "trainer": trainer}
    return build_settings(tree | sections, source="test")


def test_sources_of_the_settings_reach_the_advantage() -> None:
    """By the name of their list."""
    chosen = {"advantage": "rloo", "sources": {"hard": {"advantage": "best_of_n", "weight": 0.5}}}
    advantage = advantage_of(build(chosen))
    assert callable(advantage)
    assert advantage(scored("hard", 1.0, 0.0)) == [1.0, 0.0]
    assert advantage(scored("easy", 1.0, 0.0)) == [1.0, -1.0]


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (
            {"sources": {"hrad": {}}},
            "trainer.sources.hrad: did you mean 'hard'",
        ),
        ({"sources": {"hard": {}}, "advantage": "gae"}, "an advantage of one group"),
        (
            {"sources": {"hard": {"loss": "sft", "advantage": "grpo"}}},
            "imitation compares no rewards",
        ),
        ({"sources": {"hard": {"min_reward": 1.0}}}, 'it needs loss = "sft"'),
        ({"sources": {"hard": {"loss": "sft"}}, "kl": "k1"}, "k1 is taken off rewards"),
        ({"entropy_target": 0.5}, "entropy_coefficient above 0"),
        ({"reference_decay": 0.9}, 'a trainer.kl other than "none"'),
        ({"kl": "k3", "reference_decay": 0.9, "reference_refresh_every": 3}, "leave one out"),
        ({"kl": "k3", "reference_decay": 0.9, "reference_path": "x"}, "follows the policy"),
        ({"kl": "k3", "reference_decay": 0.9, "dtype": "bfloat16"}, "drops the small part"),
        ({"mode": "sft", "curriculum": {"every": 2}}, "no effect"),
    ],
)
def test_what_has_no_effect_is_refused(trainer: dict[str, Any], words: str) -> None:
    """Before the start, with what to change."""
    with pytest.raises(SettingsError, match=words):
        build(trainer)


def test_a_curriculum_needs_lists_to_weigh() -> None:
    """One list has no other to be played instead of."""
    with pytest.raises(SettingsError, match="nothing to weigh"):
        build({"curriculum": {"every": 1}}, env={"tasks": "t.jsonl"})


def test_the_entropy_bonus_rises_below_its_target() -> None:
    """By the sign of the dual, by at most 2%, and not at all at the target."""
    assert adapted_entropy_coefficient(1.0, 0.5, target=0.5) == 1.0
    assert adapted_entropy_coefficient(1.0, 0.45, target=0.5) == pytest.approx(1.01)
    assert adapted_entropy_coefficient(1.0, 0.55, target=0.5) == pytest.approx(0.99)
    assert adapted_entropy_coefficient(1.0, 0.0, target=0.5) == pytest.approx(1.02)
    assert adapted_entropy_coefficient(2.0, 9.0, target=0.5) == pytest.approx(1.96)


@pytest.mark.medium
def test_the_weight_of_the_entropy_bonus_follows_its_target(setup: MakeRun) -> None:
    """Each step's weight follows from the entropy measured in the one before; a resumed run goes on
    where it was."""
    chosen = {"entropy_coefficient": 0.1, "entropy_target": 1e-3, "num_steps": 2}
    setup(trainer=FAST | chosen).train()
    rows = setup(trainer=FAST | chosen | {"num_steps": 4}).train()
    weights = [row["train/entropy_coefficient"] for row in rows]
    assert weights == pytest.approx([0.1 * 0.98**n for n in range(4)])
    high = {"entropy_target": 50.0, "num_steps": 3, "resume": False}
    rows = setup(trainer=FAST | chosen | high).train()[4:]
    for row, (before, after) in zip(
        rows, pairwise(row["train/entropy_coefficient"] for row in rows), strict=False
    ):
        wanted = adapted_entropy_coefficient(before, row["train/entropy"], target=50.0)
        assert after == pytest.approx(wanted)
        assert after > before


def first(model: torch.nn.Module) -> torch.Tensor:
    """A copy of a model's first parameter, float64."""
    return next(model.parameters()).detach().double().clone()


@pytest.mark.medium
@pytest.mark.parametrize("how", [{"reference_decay": 0.75}, {"reference_refresh_every": 2}])
def test_the_reference_follows_the_policy(setup: MakeRun, how: dict[str, Any]) -> None:
    """An average of what every step left, or the policy of some steps ago; a checkpoint holds it,
    so that a resumed run goes on with it."""
    chosen = {"kl": "k3", "kl_coefficient": 0.1, "learning_rate": 1e-2} | how
    weights: list[torch.Tensor] = []
    made = setup(trainer=FAST | chosen | {"num_steps": 3})

    def keep(policy_version: int) -> None:
        weights.append(first(made.policy.model))

    made.server.on_publish = keep
    rows = made.train()
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-5)
    expected = weights[0]
    if "reference_decay" in how:
        for after in weights[1:]:
            expected = 0.75 * expected + 0.25 * after
    else:
        expected = weights[2]
    reference = first(made.ranks.worker.reference.model)
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-7)
    assert not torch.equal(reference, weights[0])
    again = setup(trainer=FAST | chosen | {"num_steps": 4})
    seen: list[torch.Tensor] = []

    def look(policy_version: int) -> None:
        seen.append(first(again.ranks.worker.reference.model))

    again.server.on_publish = look
    again.train()
    torch.testing.assert_close(seen[0], reference, rtol=0, atol=0)


def test_a_list_that_is_half_solved_weighs_most() -> None:
    """As it does in env.tasks; one that is solved, or never, keeps the floor of that."""
    assert weight_of(0.5, base=2.0, floor=0.1) == pytest.approx(2.0)
    assert weight_of(0.0, base=2.0, floor=0.1) == weight_of(1.0, base=2.0, floor=0.1) == 0.2
    assert weight_of(0.1, base=1.0, floor=0.1) == pytest.approx(0.1 + 0.9 * 0.36)


class _Weights(Recording):
    """A recording that keeps the weights that it is told."""

    def __init__(self) -> None:
        self.changes: list[dict[str, float]] = []

    def change_task_weights(self, weights: Any) -> None:
        """Keep them."""
        self.changes.append(dict(weights))


def test_a_curriculum_follows_the_measured_rates(make_trajectory: Callable[..., Any]) -> None:
    """Smoothed over takes, changed when it is time, and measured by list alone."""

    def group(source: str, *rewards: float) -> Group:
        trajectories = tuple(
            structs.replace(
                made,
                episode=structs.replace(made.episode, metadata={"source": source}),
            )
            for n, reward in enumerate(rewards)
            for made in [make_trajectory([], reward=reward, episode_id=f"{source}{n}")]
        )
        return Group(group_id="g", slot=0, task_id="t", group_size=2, trajectories=trajectories)

    weights = _Weights()
    plan = {"every": 2, "smoothing": 0.5, "floor": 0.2}
    curriculum = Curriculum(build({"curriculum": plan}), weights)
    row = curriculum.follow([group("easy", 1.0, 1.0), group("hard", 0.0, 1.0)], step=1)
    assert row["source/easy/pass_rate"] == 1.0
    assert row["source/hard/pass_rate"] == 0.5
    assert weights.changes == []
    row = curriculum.follow([group("easy", 1.0, 0.0), group("other", 0.0)], step=2)
    assert row["source/easy/pass_rate"] == 0.75
    (changed,) = weights.changes
    assert changed == pytest.approx({"easy": 2 * (0.2 + 0.8 * 0.75), "hard": 1.0})
    # A list that is not to be played is neither measured nor weighed.
    unused = {"off": {"source": "c.jsonl", "weight": 0}}
    some = Curriculum(build({"curriculum": plan}, env={"tasks": MIXTURE | unused}), weights)
    row = some.follow([group("off", 1.0, 0.0), group("easy", 1.0, 0.0)], step=1)
    assert row.keys() == {"source/easy/pass_rate", "source/easy/weight"}
    slow = Curriculum(build({"curriculum": plan | {"smoothing": 0.75}}), weights)
    slow.follow([group("easy", 1.0, 1.0)], step=1)
    row = slow.follow([group("easy", 0.0, 0.0)], step=2)
    # What was measured before keeps the share trainer.curriculum.smoothing.
    assert row["source/easy/pass_rate"] == 0.75
    idle = Curriculum(build({}), weights)
    assert idle.follow([group("easy", 1.0)], step=2) == {}
