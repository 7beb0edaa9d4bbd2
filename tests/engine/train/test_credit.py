"""Credit of turns and tokens: where a reward belongs, and that no baseline shifts the gradient."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from outloop.buffer.errors import RecordError
from outloop.buffer.records import Group, Reward, TokenReward, Trajectory, Turn
from outloop.engine.train.algorithms.advantages import rloo
from outloop.engine.train.algorithms.credit import (
    BySource,
    ScoredEpisode,
    ScoredGroup,
    ScoredTurn,
    SourceRule,
    reward_to_go,
    signals_of,
    take_credits,
)
from outloop.engine.train.data.scored_groups import reward_metrics, scored_group

Estimator = Callable[[ScoredGroup], Sequence[Sequence[np.ndarray]]]


def episode(
    rewards: Sequence[float],
    *,
    value: float = 0.0,
    spans: Sequence[tuple[tuple[int, int, float], ...]] | None = None,
    requests: Sequence[int] | None = None,
    num_tokens: int = 3,
) -> ScoredEpisode:
    """A chain of turns with these rewards."""
    turns = tuple(
        ScoredTurn(
            turn_id=f"t{place}",
            parent=place - 1 if place else None,
            request=place if requests is None else requests[place],
            num_tokens=num_tokens,
            oldest_version=0,
            is_cut=False,
            reward=reward,
            spans=() if spans is None else spans[place],
        )
        for place, reward in enumerate(rewards)
    )
    return ScoredEpisode(
        episode_id="e", reward=value, turns=turns, branches=(tuple(range(len(turns))),)
    )


def group(*episodes: ScoredEpisode) -> ScoredGroup:
    """A group of them."""
    return ScoredGroup(group_id="g", task_id="t", episodes=episodes)


def test_a_discount_counts_turns() -> None:
    """By hand: what is earned n turns later counts discount^n, the episode's own reward comes with
    its last turn, and other choices of a request are left out wherever they stand."""
    first = episode([1.0, 2.0, 4.0], value=8.0)
    for discount, wanted in (
        (1.0, [15.0, 14.0, 12.0]),
        (0.5, [1 + 1 + 1 + 2, 2 + 2 + 4, 12.0]),
        (0.0, [1.0, 2.0, 12.0]),
    ):
        found = reward_to_go(group(first, episode([0.0] * 3)), discount=discount)
        assert [float(own[0]) for own in found[0]] == pytest.approx(wanted)  # type: ignore[union-attr]
    choices = episode([1.0, 2.0, 4.0], requests=[0, 1, 0])
    found = reward_to_go(group(choices, episode([0.0] * 3)), discount=0.5)
    assert [float(own[0]) for own in found[0]] == pytest.approx([1 + 1, 2 + 2, 4])  # type: ignore[union-attr]


def centred_by_turn(scored: ScoredGroup) -> list[list[np.ndarray]]:
    """What verl's issue 7244 warns of: rewards less the mean at their index, summed to go."""
    means = [
        np.mean([e.turns[t].reward for e in scored.episodes if len(e.turns) > t])
        for t in range(max(len(e.turns) for e in scored.episodes))
    ]
    found = []
    for one in scored.episodes:
        centred = [turn.reward - means[t] for t, turn in enumerate(one.turns)]
        found.append([np.array([sum(centred[t:])]) for t in range(len(centred))])
    return found


def mean_with_itself(scored: ScoredGroup) -> list[list[np.ndarray]]:
    """Rewards to go less the mean of all that reached the turn, the episode itself included."""
    to_go = [
        [sum(turn.reward for turn in e.turns[t:]) for t in range(len(e.turns))]
        for e in scored.episodes
    ]
    return [
        [np.array([own[t] - np.mean([o[t] for o in to_go if len(o) > t])]) for t in range(len(own))]
        for own in to_go
    ]


def gradients(estimator: Estimator, rewards: Callable[[int, int], float]) -> tuple[np.ndarray, ...]:
    """The true gradient of the expected return, and the estimator's expectation, both exact.

    A policy of two logits goes on after turn 1 and after turn 2, or stops; it ends after turn 3.
    Every pair of episodes is enumerated with its probability. `rewards`: of a turn, by its index
    and what was decided there (1: go on).
    """
    logits = np.array([0.3, -0.4])
    p = 1 / (1 + np.exp(-logits))
    episodes = []  # decisions, probability, gradient of the log-probability at each turn
    for decisions in ((0,), (1, 0), (1, 1, 0)):
        probability, scores = 1.0, []
        for turn, go in enumerate(decisions):
            score = np.zeros(2)
            if turn < 2:
                probability *= p[turn] if go else 1 - p[turn]
                score[turn] = go - p[turn]
            scores.append(score)
        earned = [rewards(turn, go) for turn, go in enumerate(decisions)]
        episodes.append((episode(earned, num_tokens=1), probability, scores))
    true = sum(prob * e.total * np.sum(scores, axis=0) for e, prob, scores in episodes)
    expected = np.zeros(2)
    for first, second in itertools.product(episodes, repeat=2):
        found = estimator(group(first[0], second[0]))
        for (_, _, scores), own in zip((first, second), found, strict=True):
            pull = sum(a[0] * s for a, s in zip(own, scores, strict=True))
            expected += first[1] * second[1] * pull / 2
    return true, expected


@pytest.mark.parametrize(
    "rewards",
    [lambda turn, go: 1.0, lambda turn, go: [1.0, -0.5, 2.0][turn] + 0.25 * go],
    ids=["each turn earns 1", "turns earn unequally"],
)
def test_the_mean_at_a_turns_index_is_biased_where_the_policy_decides_when_to_stop(
    rewards: Callable[[int, int], float],
) -> None:
    """Both natural baselines change the expected gradient; that of reward_to_go does not.

    Where each turn earns 1, centred rewards are all 0 and teach nothing, though going on pays.
    """
    true, expected = gradients(reward_to_go, rewards)
    assert np.abs(true).min() > 0.05
    assert expected == pytest.approx(true, abs=1e-12)
    for biased in (centred_by_turn, mean_with_itself):
        _, wrong = gradients(biased, rewards)
        scale = float(wrong @ true / (true @ true))
        assert np.abs(wrong - scale * true).max() > 0.01 or abs(scale) < 0.1, biased.__name__


def test_rewards_to_go_are_less_the_others_at_the_same_turn() -> None:
    """By hand: what was earned from the turn on, the episode's reward included."""
    first = episode([1.0, 2.0], value=10.0)
    second = episode([4.0], value=0.0)
    third = episode([0.0, 0.0, 5.0], value=1.0)
    found = reward_to_go(group(first, second, third))
    # To go: 13, 12; 4; 6, 6, 6.
    wanted = [
        [13.0 - 5.0, 12.0 - 6.0],
        [4.0 - 9.5],
        # Nobody else has a third turn: the others' last ones.
        [6.0 - 8.5, 6.0 - 12.0, 6.0 - (12.0 + 4.0) / 2],
    ]
    for own, expected in zip(found, wanted, strict=True):
        assert [float(a[0]) for a in own] == pytest.approx(expected)


def test_one_turn_and_one_reward_is_rloo() -> None:
    """In float64, whatever the rewards."""
    values = [0.5, -1.0, 3.0, 0.0]
    found = reward_to_go(group(*(episode([0.0], value=value) for value in values)))
    assert [float(own[0][0]) for own in found] == pytest.approx(rloo(np.array(values)))


def test_a_span_is_earned_by_the_tokens_up_to_its_end() -> None:
    """Those behind it have it no more; the other attempt is taken at the same token."""
    first = episode([0.0], value=1.0, spans=[((1, 2, -3.0),)], num_tokens=4)
    second = episode([0.0], value=0.0, num_tokens=2)
    (one,), (two,) = reward_to_go(group(first, second))
    assert one == pytest.approx([-2.0, -2.0, 1.0, 1.0])
    # Its own turn has one value for all tokens, compared at the first.
    assert two == pytest.approx([2.0])


def test_choices_of_one_request_do_not_share_what_they_earn() -> None:
    """One of two answers to the same prompt did not cause what the other earned."""
    choices = episode([1.0, 5.0, 2.0], requests=[0, 0, 2])
    (own, _) = reward_to_go(group(choices, episode([0.0, 0.0, 0.0])))
    assert [float(a[0]) for a in own] == pytest.approx([1.0 + 2.0, 5.0 + 2.0, 2.0])


def test_a_group_whose_parts_alone_differ_has_signal() -> None:
    """Equal returns, earned at different turns; equal parts have none."""
    late, early = episode([0.0, 1.0]), episode([1.0, 0.0])
    groups = [group(late, early), group(late, late), group(late), group()]
    assert signals_of(groups, "reward_to_go") == [True, False, False, False]
    assert signals_of(groups, "grpo") == [False] * 4
    found = take_credits(groups, "reward_to_go", signal=[True, False, False, False])
    assert [len(own) for own in found] == [2, 2, 1, 0]
    assert found[1] == [0.0, 0.0]


@pytest.fixture
def played(make_turn: Callable[..., Turn]) -> list[Turn]:
    """A root with two choices of one request, the second of which goes on."""
    return [
        make_turn("a", output=[3, 4]),
        make_turn("b", parent="a", output=[5]),
        make_turn("c", parent="a", output=[6, 7]),
        make_turn("d", parent="c", output=[8]),
    ]


def rewarded(make: Callable[..., Trajectory], turns: Sequence[Turn], reward: Reward) -> Group:
    """A group of one episode with this reward."""
    trajectory = make(turns)
    one = replace(trajectory, episode=replace(trajectory.episode, reward=reward))
    return Group(group_id="g", slot=0, task_id="t", group_size=1, trajectories=(one,))


def test_rewards_find_what_they_name(
    played: list[Turn], make_trajectory: Callable[..., Trajectory]
) -> None:
    """Turns by place, branches at their last turn, spans in order."""
    reward = Reward(
        value=1.0,
        components={"form": 0.5},
        turns={"c": 2.0},
        branches={"b": 3.0, "d": 4.0},
        tokens=(TokenReward("a", 1, 2, -1.0), TokenReward("a", 0, 1, 7.0)),
    )
    (found,) = scored_group(rewarded(make_trajectory, played, reward)).episodes
    assert found.branches == ((0, 1), (0, 2, 3))
    assert [turn.parent for turn in found.turns] == [None, 0, 0, 2]
    assert [turn.earned for turn in found.turns] == [6.0, 3.0, 2.0, 4.0]
    assert found.turns[0].spans == ((0, 1, 7.0), (1, 2, -1.0))
    assert found.total == 16.0
    metrics = reward_metrics([group(found)])
    assert metrics == {"reward/form": 0.5, "train/return_mean": 16.0}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"turns": {"x": 1.0}}, "turn 'x', which is none of its 4 turns"),
        ({"branches": {"a": 1.0}}, "branch 'a', which is the last turn of none"),
        ({"tokens": (TokenReward("x", 0, 1, 1.0),)}, "turn 'x'"),
        ({"tokens": (TokenReward("b", 0, 2, 1.0),)}, "tokens 0..2 of turn 'b', which has 1"),
    ],
)
def test_a_reward_of_nothing_is_refused(
    parts: dict[str, object],
    words: str,
    played: list[Turn],
    make_trajectory: Callable[..., Trajectory],
) -> None:
    """It is not left out in silence."""
    with pytest.raises(RecordError, match=words):
        scored_group(rewarded(make_trajectory, played, Reward(value=0.0, **parts)))


def test_choices_of_a_request_are_known_by_their_numbers(
    make_turn: Callable[..., Turn], make_trajectory: Callable[..., Trajectory]
) -> None:
    """Asked at one time after the same turn; a second request after it has its own."""

    def choice(turn_id: str, index: int, at: float) -> Turn:
        turn = make_turn(turn_id, parent="a")
        return replace(turn, choice_index=index, started_at=at)

    turns = [make_turn("a"), choice("b", 0, 1.0), choice("c", 1, 1.0), choice("d", 0, 2.0)]
    (found,) = scored_group(rewarded(make_trajectory, turns, Reward(value=0.0))).episodes
    assert [turn.request for turn in found.turns] == [0, 1, 1, 3]


@pytest.mark.parametrize("value", [float("nan"), "good"])
def test_spans_are_checked_where_they_are_built(value: object) -> None:
    """Overlaps and what is no number, before anything is stored."""
    with pytest.raises(RecordError, match="tokens"):
        Reward(value=0.0, tokens=(TokenReward("a", 0, 1, value),))
    with pytest.raises(RecordError, match=r"spans 0\.\.2 and 1\.\.3 of turn a overlap"):
        Reward(value=0.0, tokens=(TokenReward("a", 1, 3, 1.0), TokenReward("a", 0, 2, 1.0)))
    with pytest.raises(RecordError, match="0 <= start < end"):
        Reward(value=0.0, tokens=(TokenReward("a", 2, 2, 1.0),))


def test_attempts_that_ended_before_are_taken_at_their_last_turns_first_token() -> None:
    """A turn that nobody else reached is less what the others' last turns earned from their first
    token on, spans included."""
    long = episode([0.0, 0.0], value=2.0)
    short = episode([0.0], value=1.0, spans=[((0, 1, 4.0), (2, 3, -1.0))], num_tokens=3)
    (own, _) = reward_to_go(group(long, short))
    # The short attempt's reward to go is 1 + 4 - 1 at its first token and 0 at its last.
    assert [float(a[0]) for a in own] == pytest.approx([2.0 - 4.0, 2.0 - 4.0])


def test_a_group_whose_spans_alone_differ_has_signal() -> None:
    """The same tokens earned together as much, at other places of the same turn."""
    at_first = episode([0.0], spans=[((0, 1, 1.0),)])
    at_last = episode([0.0], spans=[((2, 3, 1.0),)])
    shared = episode([0.0], spans=[((0, 1, 0.5), (2, 3, 0.5))])
    groups = [group(at_first, at_last), group(at_first, shared), group(at_last, at_last)]
    assert signals_of(groups, "reward_to_go") == [True, True, False]


def test_an_imitated_group_teaches_from_its_least_reward_on() -> None:
    """At the least reward an episode is imitated, below it none is; parts count in what it
    earned."""
    rule = SourceRule(is_imitated=True, weight=2.0, min_reward=1.0)
    advantage = BySource(default="grpo", rules={"": rule})
    below, at, by_parts = episode([0.0], value=0.5), episode([0.0], value=1.0), episode([1.0])
    assert signals_of([group(below), group(below, at)], advantage) == [False, True]
    (found,) = take_credits([group(below, at, by_parts)], advantage, signal=[True])
    assert found == [0.0, 2.0, 2.0]
