"""Every function of engine/train/algorithms against a reference in float64, and its mutants.

A reference is written from the formula, in plain loops, and knows nothing of the function;
gradients are slopes of a reference. A mutant is the function with one piece of its text changed,
for which the same check must fail. A new function needs a line in HELD.
"""

import importlib
import itertools
import math
import pkgutil
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fakes.mutants import Held, held, passes, public_functions_of
from outloop.buffer.settings.trainer import CriticSettings, TrainerSettings
from outloop.engine.train import algorithms, curriculum
from outloop.engine.train.algorithms import (
    advantages,
    credit,
    denominators,
    distillation,
    gae,
    importance_weights,
    kl,
    losses,
    objective,
    ratios,
    reward_losses,
    reward_shaping,
    token_logprobs,
)

Array = Any
REWARDS = [
    np.random.default_rng(0).normal(size=2),
    np.random.default_rng(1).normal(size=5),
    np.array([1.0, 1.0, 0.0, 0.0, 0.0]),
    np.array([0.5, -2.0, 0.5, 0.1, 0.5, -2.0, 3.0]),
]


def close(got: Any, wanted: Any, *, within: float = 1e-9) -> None:
    """Equal in shape, and in every number to rounding."""
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got, np.float64)
    wanted = np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.allclose(got, wanted, rtol=within, atol=within)


def tensor(values: Any, *, with_gradient: bool = False) -> torch.Tensor:
    """In float64."""
    return torch.tensor(np.asarray(values, np.float64), requires_grad=with_gradient)


def slope(function: Callable[[Array], float], at: Array) -> Array:
    """The gradient of a reference, by differences."""
    at = np.asarray(at, np.float64)
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[place] = 1e-6
        found[place] = (function(at + step) - function(at - step)) / 2e-6
    return found


def gradient(output: torch.Tensor, leaf: torch.Tensor) -> Array:
    """Of the sum."""
    (found,) = torch.autograd.grad(output.sum(), leaf)
    return found.numpy()


# Advantages.


def mean(values: Sequence[float]) -> float:
    """Their mean."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float], less: int) -> float:
    """Over n - less."""
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - less))


def check_signal(m: Any) -> None:
    """Two rewards that differ by more than rounding."""
    for rewards, wanted in (
        ([], False),
        ([1.0], False),
        ([2.0, 2.0], False),
        ([0.1 + 0.2, 0.3], False),
        ([1e12, 1e12 + 1e-3], False),
        ([0.0, 1e-3, 0.0], True),
        ([-1.0, 1.0], True),
    ):
        assert m.has_signal(rewards) == wanted


def check_grpo(m: Any) -> None:
    """Less the mean, over the sample's deviation."""
    for own in REWARDS:
        close(m.grpo(own), [(r - mean(own)) / (deviation(own, 1) + 1e-6) for r in own])


def check_dr_grpo(m: Any) -> None:
    """Less the mean."""
    for own in REWARDS:
        close(m.dr_grpo(own), [r - mean(own) for r in own])


def check_rloo(m: Any) -> None:
    """Less the mean of the others."""
    for own in REWARDS:
        close(m.rloo(own), [r - mean(np.delete(own, i).tolist()) for i, r in enumerate(own)])


def check_pass_at_k(m: Any) -> None:
    """By enumeration of all subsets."""
    for own, k in itertools.product(REWARDS, (2, 3)):
        if k > len(own):
            continue
        subsets = list(itertools.combinations(range(len(own)), k))
        best = [max(own[i] for i in one) for one in subsets]
        of_subset = [
            (b - mean(best)) / (deviation(best, 0) + 1e-6) if len(best) > 1 else 0.0 for b in best
        ]
        close(
            m.pass_at_k(own, k=k),
            [
                mean([a for a, one in zip(of_subset, subsets, strict=True) if i in one])
                for i in range(len(own))
            ],
        )


def check_best_of_n(m: Any) -> None:
    """The best share the group's weight; nothing goes to the others."""
    for own in REWARDS:
        num_best = sum(1 for r in own if r == max(own))
        close(m.best_of_n(own), [len(own) / num_best if r == max(own) else 0.0 for r in own])


def check_reinforce_pp(m: Any) -> None:
    """Mean and the population's deviation of all episodes of the take."""
    flat = [float(r) for own in REWARDS for r in own]
    scale = deviation(flat, 0) + 1e-6
    for own, got in zip(REWARDS, m.reinforce_pp(REWARDS), strict=True):
        close(got, [(r - mean(flat)) / scale for r in own])


def check_reinforce_pp_baseline(m: Any) -> None:
    """The group's mean, and the deviation of what is left over the take."""
    centred = [[r - mean(own) for r in own] for own in REWARDS]
    scale = deviation([r for own in centred for r in own], 0) + 1e-6
    for own, got in zip(centred, m.reinforce_pp_baseline(REWARDS), strict=True):
        close(got, [r / scale for r in own])


def check_group_advantages(m: Any) -> None:
    """By name; exactly zero without signal, where a division would blow rounding up."""
    assert m.group_advantages([0.1 + 0.2, 0.3], "grpo").tolist() == [0.0, 0.0]
    close(m.group_advantages([1.0, 0.0], "rloo"), [1.0, -1.0])


TAKE = [[2.0, 2.0], [0.0, 2.0, 1.0], [], [5.0, 5.0]]


def check_groups_with_signal(m: Any) -> None:
    """By group, or by take where the take is the baseline."""
    assert m.groups_with_signal(TAKE, "grpo") == [False, True, False, False]
    assert m.groups_with_signal(TAKE, "reinforce_pp") == [True, True, False, True]
    assert m.groups_with_signal([[1.0], [1.0]], "reinforce_pp") == [False, False]


def check_take_advantages(m: Any) -> None:
    """Statistics of groups that count; zeros without signal."""
    signal, counted = [False, True, False, True], [True, True, True, False]
    got = m.take_advantages(TAKE, "reinforce_pp", signal=signal, counted=counted)
    flat = [2.0, 2.0, 0.0, 2.0, 1.0]
    wanted = [(r - mean(flat)) / (deviation(flat, 0) + 1e-6) for r in TAKE[1]]
    for values, expected in zip(got, [[0.0, 0.0], wanted, [], [0.0, 0.0]], strict=True):
        close(values, expected)
    got = m.take_advantages([[0.1 + 0.2, 0.3], TAKE[1]], "dr_grpo", signal=[False, True])
    assert got[0].tolist() == [0.0, 0.0]
    close(got[1], [-1.0, 1.0, 0.0])


# Credit of turns and tokens.


def make_turn(m: Any, reward: float = 0.0, **more: Any) -> Any:
    """Of three tokens, if nothing else is given."""
    known = {"turn_id": "t", "parent": None, "request": 0, "num_tokens": 3, "oldest_version": 0}
    return m.ScoredTurn(**known | {"is_cut": False, "reward": reward} | more)


def make_group(m: Any) -> Any:
    """Three episodes: spans, choices of one request, one turn more than the others, and none."""
    turns = (
        (
            make_turn(m, 1.0, request=0, spans=((0, 1, 4.0), (1, 3, -2.0))),
            make_turn(m, 0.5, request=1, num_tokens=2, branch_reward=0.25),
            make_turn(m, 3.0, request=1),
            make_turn(m, -1.0, request=3),
        ),
        (
            make_turn(m, 2.0, request=0, num_tokens=5, spans=((2, 4, 7.0),)),
            make_turn(m, 0.0, request=1, num_tokens=1, spans=((0, 1, 1.5),)),
        ),
        (),
    )
    return m.ScoredGroup(
        group_id="g",
        task_id="t",
        source="proofs",
        episodes=tuple(
            m.ScoredEpisode(episode_id=str(i), reward=reward, turns=own)
            for i, (reward, own) in enumerate(zip((10.0, -3.0, 0.5), turns, strict=True))
        ),
    )


EARNED = [[3.0, 0.75, 3.0, -1.0], [9.0, 1.5], []]
"""Of the turns of `make_group`, by hand."""


def check_scored_records(m: Any) -> None:
    """Sums of what was earned, by hand."""
    group = make_group(m)
    assert [[turn.earned for turn in one.turns] for one in group.episodes] == EARNED
    assert [one.total for one in group.episodes] == [15.75, 7.5, 0.5]
    assert [one.num_tokens for one in group.episodes] == [11, 6, 0]
    assert group.rewards.tolist() == [10.0, -3.0, 0.5]
    assert group.totals.tolist() == [15.75, 7.5, 0.5]
    other = group.with_rewards([1.0, 2.0, 3.0])
    assert other.rewards.tolist() == [1.0, 2.0, 3.0]
    assert [one.turns for one in other.episodes] == [one.turns for one in group.episodes]


def earned_from(episode: Any, place: int, token: int, discount: float) -> float:
    """What an episode earned from a token of a turn on, by the definition."""
    own = episode.turns[place]
    total = own.reward + own.branch_reward
    total += math.fsum(value for _, end, value in own.spans if end > token)
    for later in range(place + 1, len(episode.turns)):
        if episode.turns[later].request != own.request:
            total += discount ** (later - place) * episode.turns[later].earned
    return total + discount ** (len(episode.turns) - 1 - place) * episode.reward


def check_reward_to_go(m: Any) -> None:
    """Less the others at the same token of the same turn; of those that ended, their last turns."""
    group = make_group(m)
    for discount in (1.0, 0.5):
        found = m.reward_to_go(group, discount=discount)
        for index, episode in enumerate(group.episodes):
            others = [one for j, one in enumerate(group.episodes) if j != index]
            assert len(found[index]) == len(episode.turns)
            for place, turn in enumerate(episode.turns):
                there = [one for one in others if len(one.turns) > place]
                ends = [
                    earned_from(one, len(one.turns) - 1, 0, discount) if one.turns else one.reward
                    for one in others
                ]
                wanted = []
                for token in range(turn.num_tokens if turn.spans else 1):
                    rivals = [
                        earned_from(
                            one,
                            place,
                            min(token, one.turns[place].num_tokens - 1)
                            if one.turns[place].spans
                            else 0,
                            discount,
                        )
                        for one in there
                    ]
                    own = earned_from(episode, place, token, discount)
                    wanted.append(own - mean(rivals or ends))
                close(found[index][place], wanted)


def by_source(m: Any) -> Any:
    """Two sources with rules of their own."""
    rules = {
        "proofs": m.SourceRule(advantage="reward_to_go", weight=0.5),
        "bandits": m.SourceRule(weight=2.0),
        "shown": m.SourceRule(is_imitated=True, weight=0.25, min_reward=5.0),
    }
    return m.BySource("dr_grpo", rules, turn_discount=0.5)


def sourced(m: Any, source: str) -> Any:
    """The group, from another source."""
    known = make_group(m)
    return m.ScoredGroup(group_id="g", task_id="t", source=source, episodes=known.episodes)


def check_by_source(m: Any) -> None:
    """Weights times the advantage of the source; of imitated ones the good alone."""
    rule, group = by_source(m), make_group(m)
    plain = m.reward_to_go(group, discount=0.5)
    for got, own in zip(rule(group), plain, strict=True):
        for value, wanted in zip(got, own, strict=True):
            close(value, 0.5 * wanted)
    middle = mean([10.0, -3.0, 0.5])
    close(rule(sourced(m, "bandits")), [2 * (r - middle) for r in (10.0, -3.0, 0.5)])
    close(rule(sourced(m, "other")), [r - middle for r in (10.0, -3.0, 0.5)])
    assert rule(sourced(m, "shown")) == [0.25, 0.25, 0.0]
    assert [rule.imitates(name) for name in ("shown", "proofs", "other")] == [True, False, False]
    alone = m.ScoredGroup(
        group_id="g", task_id="t", source="shown", episodes=make_group(m).episodes[2:]
    )
    assert rule.teaches(sourced(m, "shown"))
    assert not rule.teaches(alone)
    assert rule.teaches(group)


def check_uses(m: Any) -> None:
    """By name; a user's function may do anything."""
    names = ["grpo", "reward_to_go", "gae", "rloo", "reinforce_pp"]
    assert [m.uses_parts(name) for name in names] == [False, True, True, False, False]
    assert [m.divides_by_group(name) for name in names] == [True, False, False, False, False]
    assert m.uses_parts(by_source(m))
    assert m.divides_by_group(by_source(m))


def check_signals_of(m: Any) -> None:
    """What differs, by what the advantage looks at."""
    first, second, third = make_group(m).episodes
    level = m.ScoredEpisode(episode_id="l", reward=10.0, turns=(make_turn(m, 1.0), make_turn(m)))
    moved = m.ScoredEpisode(episode_id="m", reward=10.0, turns=(make_turn(m), make_turn(m, 1.0)))
    groups = [
        m.ScoredGroup(group_id="g", task_id="t", episodes=own)
        for own in ((first, second), (level, moved), (level, level), (third,), ())
    ]
    assert m.signals_of(groups, "grpo") == [True, False, False, False, False]
    assert m.signals_of(groups, "reward_to_go") == [True, True, False, False, False]
    assert m.signals_of(groups, "none") == [True, True, True, True, False]
    assert m.signals_of(groups, by_source(m)) == [True, True, False, False, False]
    assert m.signals_of(groups, "reinforce_pp") == [True, True, True, True, False]


def check_take_credits(m: Any) -> None:
    """Advantages by episode; zeros without signal, or where rewards are not compared here."""
    group = make_group(m)
    two = [group, group]
    assert m.take_credits(two, "gae", signal=[True, True]) == [[0.0] * 3] * 2
    got = m.take_credits(two, "dr_grpo", signal=[True, False])
    close(got[0], [r - 2.5 for r in (10.0, -3.0, 0.5)])
    assert got[1] == [0.0] * 3
    got = m.take_credits(two, "reinforce_pp", signal=[True, True], counted=[True, False])
    scale = deviation([10.0, -3.0, 0.5], 0) + 1e-6
    close(got, [[(r - 2.5) / scale for r in (10.0, -3.0, 0.5)], [0.0] * 3])
    first, zeros = m.take_credits(two, "reward_to_go", signal=[True, False])
    close(first[0][0], m.reward_to_go(group)[0][0])
    assert zeros == [0.0] * 3


# Denominators.

ROWS: dict[str, Any] = {"num_trained_tokens": [3, 2, 7], "episode_ids": ["a", "a", "b"]}


def check_denominator(m: Any) -> None:
    """Tokens, episodes, or neither; never 0."""
    wanted = {"tokens": 12, "episodes": 2, "episode_means": 2, "budget": 200, "constant": 5}
    for kind, number in wanted.items():
        assert m.denominator(kind, **ROWS, constant=5.0, token_budget=100) == number
    assert m.denominator("tokens", num_trained_tokens=[], episode_ids=[]) == 1


def check_token_weights(m: Any) -> None:
    """1 over the tokens of the episode, over all its branches."""
    close(m.token_weights("episode_means", **ROWS), [1 / 5, 1 / 5, 1 / 7], within=1e-6)
    assert m.token_weights("tokens", **ROWS) is None


# KL, ratios, coefficients.

POLICY = np.array([-1.0, -2.5, -0.3, -1.2, -30.0, -0.5])
BEHAVIOR = np.array([-0.8, -2.0, -0.9, -1.2, -1.0, -40.0])
REFERENCE = np.array([-1.4, -2.2, -0.1, -1.9, -1.5, -0.7])
ADVANTAGES = np.array([1.0, -0.5, 2.0, -1.5, 0.7, -1.0])


def ratio(new: float, old: float) -> float:
    """Of probabilities, the log-ratio cut to +-20."""
    return math.exp(min(max(new - old, -20.0), 20.0))


def check_ratio_of(m: Any) -> None:
    """Value and slope; nothing overflows."""
    leaf = tensor([-1.0, -300.0, 0.0, -2.0], with_gradient=True)
    old = [-1.5, -1.0, -90.0, -1.0]
    got = m.ratio_of(leaf, tensor(old))
    values = leaf.detach().numpy()
    close(got, [ratio(p, o) for p, o in zip(values, old, strict=True)])
    pairs = zip(values, old, strict=True)
    wanted = [slope(lambda x, o=o: ratio(x, o), p) for p, o in pairs]
    close(gradient(got, leaf), wanted, within=1e-6)


def kl_of(p: float, reference: float, behavior: float, kind: str, cap: float = 2.0) -> float:
    """One token's KL term in value."""
    weight, gap = min(ratio(p, behavior), cap), p - reference
    if kind == "k2":
        return weight * gap * gap / 2
    return weight * (math.exp(min(max(-gap, -20.0), 20.0)) + gap - 1)


def check_kl_loss(m: Any) -> None:
    """Value, and the slope: k2's weight is a constant, k3's is not."""
    for kind in ("k2", "k3"):
        leaf = tensor(POLICY, with_gradient=True)
        known = tensor(REFERENCE), tensor(BEHAVIOR)
        got = m.kl_loss(leaf, *known, kind=kind, ratio_cap=2.0)
        rows = list(zip(POLICY, REFERENCE, BEHAVIOR, strict=True))
        close(got, [kl_of(p, r, b, kind) for p, r, b in rows])
        if kind == "k2":
            wanted = [min(ratio(p, b), 2.0) * (p - r) for p, r, b in rows]
        else:
            wanted = [slope(lambda x, r=r, b=b: kl_of(x, r, b, "k3"), p) for p, r, b in rows]
        close(gradient(got, leaf), wanted, within=1e-6)


def check_k1(m: Any) -> None:
    """By token, in float64."""
    got = m.k1(BEHAVIOR.astype(np.float32), REFERENCE.astype(np.float32))
    assert got.dtype == np.float64
    close(got, BEHAVIOR - REFERENCE, within=1e-5)


CONTROLLED = [(0.5, 0.02, 0.02), (0.5, 0.021, 0.02), (0.1, 9.0, 0.02), (0.1, -9.0, 0.02)]
"""Coefficient, what was measured, its target."""


def check_adapted_coefficient(m: Any) -> None:
    """Up while the KL is above its target, by 2% at most."""
    for now, measured, target in CONTROLLED:
        change = 0.1 * min(max((measured - target) / target, -0.2), 0.2)
        close(m.adapted_coefficient(now, measured, target=target), now + now * change)


def check_adapted_entropy(m: Any) -> None:
    """Up while the entropy is below its target, by 2% at most."""
    for now, measured, target in CONTROLLED:
        change = 0.1 * min(max((target - measured) / target, -0.2), 0.2)
        close(m.adapted_entropy_coefficient(now, measured, target=target), now + now * change)


def check_weight_of(m: Any) -> None:
    """Highest where half of the episodes pass; never below the floor."""
    for p in (0.0, 0.25, 0.5, 0.9, 1.0):
        close(m.weight_of(p, base=3.0, floor=0.1), 3 * 0.1 + 3 * 0.9 * (1 - (2 * p - 1) ** 2))


# Losses.


def inputs(m: Any, leaf: torch.Tensor, **more: Any) -> Any:
    """All that a loss may look at; two sequences, of four and two tokens."""
    known = {
        "policy_logprobs": leaf,
        "behavior_logprobs": tensor(BEHAVIOR),
        "proximal_logprobs": tensor(BEHAVIOR + 0.1),
        "advantages": tensor(ADVANTAGES),
        "clip_low": 0.2,
        "clip_high": 0.28,
        "sequences": m.Sequences(torch.tensor([0, 0, 0, 0, 1, 1]), 2),
    }
    return m.LossInputs(**known | more)


def clipped(r: float, advantage: float, dual: float) -> float:
    """The loss of PPO with a dual clip, at a ratio."""
    best = min(r * advantage, min(max(r, 0.8), 1.28) * advantage)
    return -(max(best, dual * advantage) if advantage < 0 and dual else best)


def check_ppo_clip(m: Any) -> None:
    """Value, slope, and which tokens lost their gradient."""
    for dual in (0.0, 3.0):
        leaf = tensor(POLICY, with_gradient=True)
        got = m.ppo_clip(inputs(m, leaf, dual_clip=dual))
        rows = list(zip(POLICY, BEHAVIOR + 0.1, ADVANTAGES, strict=True))
        close(got.loss, [clipped(ratio(p, o), a, dual) for p, o, a in rows])
        wanted = [
            slope(lambda x, o=o, a=a, d=dual: clipped(ratio(x, o), a, d), p) for p, o, a in rows
        ]
        close(gradient(got.loss, leaf), wanted, within=1e-6)
        close(got.ratio, [ratio(p, o) for p, o, _ in rows])
        # Beyond +-20 the ratio is a constant: no gradient either, though no clip took it.
        is_flat = [w == 0 and abs(p - o) < 20 for w, (p, o, _) in zip(wanted, rows, strict=True)]
        assert got.is_clipped[:4].tolist() == is_flat[:4]


def check_gspo(m: Any) -> None:
    """A sequence's ratio by its mean, with the gradient of each of its tokens."""
    policy, old = POLICY[:4], (BEHAVIOR + 0.1)[:4]
    policy, old = np.append(policy, [-1.0, -0.6]), np.append(old, [-1.05, -0.7])
    leaf = tensor(policy, with_gradient=True)
    got = m.gspo(inputs(m, leaf, proximal_logprobs=tensor(old), dual_clip=3.0))
    wanted, slopes = [], []
    for where in (range(4), range(4, 6)):
        s = math.exp(mean([policy[i] - old[i] for i in where]))
        for i in where:
            wanted.append(clipped(s, ADVANTAGES[i], 3.0))
            slopes.append(s * slope(lambda x, a=ADVANTAGES[i]: clipped(float(x), a, 3.0), s))
    close(got.loss, wanted)
    close(gradient(got.loss, leaf), slopes, within=1e-6)


def check_cispo(m: Any) -> None:
    """Value; the gradient is the clipped weight times -A, whether it was clipped or not."""
    leaf = tensor(POLICY, with_gradient=True)
    got = m.cispo(inputs(m, leaf))
    weights = [
        min(max(ratio(p, o), 0.8), 1.28) for p, o in zip(POLICY, BEHAVIOR + 0.1, strict=True)
    ]
    close(got.loss, [-w * a * p for w, a, p in zip(weights, ADVANTAGES, POLICY, strict=True)])
    close(gradient(got.loss, leaf), -np.array(weights) * ADVANTAGES)


def check_reinforce(m: Any) -> None:
    """-A log p, whoever sampled the token."""
    leaf = tensor(POLICY, with_gradient=True)
    got = m.reinforce(inputs(m, leaf))
    close(got.loss, [-a * p for a, p in zip(ADVANTAGES, POLICY, strict=True)])
    close(gradient(got.loss, leaf), -ADVANTAGES)


def check_loss_inputs(m: Any) -> None:
    """Ratios, and means over sequences, as constants; some of the tokens."""
    leaf = tensor(POLICY, with_gradient=True)
    known = inputs(m, leaf)
    close(known.ratio, [ratio(p, o) for p, o in zip(POLICY, BEHAVIOR + 0.1, strict=True)])
    wanted = [mean(POLICY[:4])] * 4 + [mean(POLICY[4:])] * 2
    for got in (known.sequence_mean(leaf), known.sequences.mean(leaf)):
        close(got, wanted)
        assert not got.requires_grad
    is_masked = torch.tensor([True, False])
    two = m.TokenLoss(tensor([1.0, 2.0]), tensor([3.0, 4.0]), is_masked, is_masked)
    one = two.at(torch.tensor([False, True]))
    assert [float(one.loss), float(one.ratio), bool(one.is_clipped)] == [2.0, 4.0, False]
    assert one.is_masked is not None
    assert one.is_masked.tolist() == [False]


def check_marks(m: Any) -> None:
    """A loss that needs whole sequences is one that was marked."""
    assert m.is_sequence_level(m.gspo)
    assert not m.is_sequence_level(m.ppo_clip)
    assert m.is_sequence_level(m.sequence_level(lambda inputs: None))


TOP_POLICY = np.log(np.array([[0.5, 0.2], [0.05, 0.9], [0.3, 0.3]] * 2))
TOP_TEACHER = np.log(np.array([[0.6, 0.3], [0.7, 0.1], [0.4, 0.2]] * 2))


def divergence(policy: Array, teacher: Array, kind: str) -> float:
    """Of one place, from probabilities: the k tokens and one bucket for the rest."""
    p = [*np.exp(policy), 1 - np.exp(policy).sum()]
    q = [*np.exp(teacher), 1 - np.exp(teacher).sum()]
    a, b = (p, q) if kind == "reverse" else (q, p)
    return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)


def check_top_divergence(m: Any) -> None:
    """Value and slope, both ways; of a token that the teacher did not name nothing is known."""
    for kind in ("reverse", "forward"):
        leaf = tensor(TOP_POLICY, with_gradient=True)
        got = m.top_divergence(leaf, tensor(TOP_TEACHER), kind=kind)
        pairs = list(zip(TOP_POLICY, TOP_TEACHER, strict=True))
        close(got, [divergence(p, q, kind) for p, q in pairs])
        wanted = [slope(lambda x, q=q, k=kind: divergence(x, q, k), p) for p, q in pairs]
        close(gradient(got, leaf), wanted, within=1e-6)
        fewer = TOP_TEACHER.copy()
        fewer[:, 1] = -np.inf
        got = m.top_divergence(tensor(TOP_POLICY), tensor(fewer), kind=kind)
        close(got, [divergence(p[:1], q[:1], kind) for p, q in pairs])


def check_teacher_advantages(m: Any) -> None:
    """c (log teacher - log policy), a constant; its policy gradient is that of -c KL."""
    leaf = tensor(POLICY, with_gradient=True)
    got = m.teacher_advantages(leaf, tensor(REFERENCE), coefficient=0.7)
    assert not got.requires_grad
    gaps = zip(REFERENCE, POLICY, strict=True)
    close(got, [0.7 * min(max(t - p, -20.0), 20.0) for t, p in gaps])
    logits, teacher = np.array([0.2, -1.0, 0.7]), np.log([0.2, 0.5, 0.3])

    def log_softmax(x: Array) -> Array:
        return x - math.log(np.exp(x).sum())

    p = np.exp(log_softmax(logits))
    of_each = m.teacher_advantages(tensor(np.log(p)), tensor(teacher), coefficient=0.7).numpy()
    pull = sum(p[i] * of_each[i] * (np.eye(3)[i] - p) for i in range(3))
    divergence_of = lambda x: float(np.exp(log_softmax(x)) @ (log_softmax(x) - teacher))  # noqa: E731
    close(pull, -0.7 * slope(divergence_of, logits), within=1e-6)


CORRECTION = np.array([1.0, 0.5, 0.0, 1.5, 1.0, 0.8])
WEIGHTS = np.array([0.25, 0.25, 0.25, 0.25, 0.5, 0.5])
ENTROPIES = np.array([1.0, 2.0, 0.5, 0.1, 3.0, 0.7])
IMITATED = np.array([False, True, False, False, True, False])


def check_objective(m: Any) -> None:
    """The policy's loss times its correction, the terms beside it, what is masked, the weights."""
    teacher = {"path": "t", "coefficient": 0.7}
    cases: list[dict[str, Any]] = [
        {},
        {"kl": "k2", "kl_coefficient": 0.3, "entropy_coefficient": 0.01},
        {"kl": "k3", "kl_coefficient": 0.3, "entropy_coefficient": 0.01},
        {"opsm_delta": 0.01},
        {"loss": "cispo", "teacher": teacher},
        {"teacher": teacher | {"top_k": 2}},
        {"teacher": teacher | {"top_k": 2, "divergence": "forward"}},
    ]
    for case, is_corrected in itertools.product(cases, (False, True)):
        settings = TrainerSettings(**{"loss": "ppo_clip", "dual_clip": 3.0} | case)
        known = inputs(
            losses,
            tensor(POLICY),
            dual_clip=3.0,
            reference_logprobs=tensor(REFERENCE),
            teacher_logprobs=tensor(REFERENCE),
            entropies=tensor(ENTROPIES),
            correction=tensor(CORRECTION) if is_corrected else None,
            policy_top_logprobs=tensor(TOP_POLICY),
            teacher_top_logprobs=tensor(TOP_TEACHER),
        )
        function = losses.LOSSES[settings.loss]
        for is_imitated in (None, IMITATED):
            got = m.objective(
                known,
                function,
                settings,
                token_weights=tensor(WEIGHTS),
                is_imitated=None if is_imitated is None else torch.tensor(is_imitated),
            )
            wanted = [
                objective_of(place, settings, is_corrected, is_imitated)
                for place in range(len(POLICY))
            ]
            close(got.loss, wanted)


def objective_of(
    place: int, settings: TrainerSettings, is_corrected: bool, is_imitated: Array | None
) -> float:
    """One token's loss, term by term."""
    p, old, advantage = POLICY[place], BEHAVIOR[place] + 0.1, ADVANTAGES[place]
    if is_imitated is not None and is_imitated[place]:
        return -WEIGHTS[place] * advantage * p
    correction = CORRECTION[place] if is_corrected else 1.0
    if correction == 0:
        return 0.0
    teacher = settings.teacher
    if teacher is not None and not teacher.top_k:
        advantage += 0.7 * min(max(REFERENCE[place] - p, -20.0), 20.0)
    if settings.loss == "cispo":
        found = -min(max(ratio(p, old), 0.8), 1.28) * advantage * p
    else:
        found = clipped(ratio(p, old), advantage, 3.0)
    found *= correction
    own = slice(0, 4) if place < 4 else slice(4, 6)
    drift = mean(BEHAVIOR[own] - POLICY[own])
    if settings.opsm_delta and advantage < 0 and drift > settings.opsm_delta:
        found = 0.0
    if teacher is not None and teacher.top_k:
        found += 0.7 * divergence(TOP_POLICY[place], TOP_TEACHER[place], teacher.divergence)
    if settings.kl != "none":
        found += 0.3 * kl_of(p, REFERENCE[place], BEHAVIOR[place], settings.kl)
    return float(WEIGHTS[place] * (found - settings.entropy_coefficient * ENTROPIES[place]))


def check_needs_sequences(m: Any) -> None:
    """Of the loss, or of OPSM."""
    plain = TrainerSettings(loss="ppo_clip")
    masked = TrainerSettings(loss="ppo_clip", opsm_delta=0.1)
    assert not m.needs_sequences(losses.ppo_clip, plain)
    assert m.needs_sequences(losses.gspo, plain)
    assert m.needs_sequences(losses.ppo_clip, masked)


# Off-policy weights.


def check_correct(m: Any) -> None:
    """Every kind, at bounds that some tokens exceed; a veto takes the whole sequence."""
    for old in (BEHAVIOR[:4], BEHAVIOR[:4] + 0.4, BEHAVIOR):
        new = POLICY[: len(old)]
        by_token = [ratio(p, b) for p, b in zip(new, old, strict=True)]
        gaps = [min(max(p - b, -20.0), 20.0) for p, b in zip(new, old, strict=True)]
        whole = math.exp(min(max(math.fsum(gaps), -20.0), 20.0))
        kinds = {"token": by_token, "sequence": [whole] * len(old)}
        kinds["geometric"] = [math.exp(mean(gaps))] * len(old)
        for (name, of_kind), ending, veto in itertools.product(
            kinds.items(), ("tis", "mis"), (0.0, 1e-4)
        ):
            got = m.correct(new, old, kind=f"{name}_{ending}", cap=1.3, floor=0.7, veto=veto)
            is_vetoed = veto > 0 and min(by_token) < veto
            wanted = [min(r, 1.3) if ending == "tis" else r * (0.7 <= r <= 1.3) for r in of_kind]
            close(got.weights, [0.0 if is_vetoed else w for w in wanted])
            assert got.is_vetoed == is_vetoed
            is_masked = ending == "mis" and not is_vetoed
            assert got.is_low.tolist() == [is_masked and r < 0.7 for r in of_kind]
            assert got.is_high.tolist() == [is_masked and r > 1.3 for r in of_kind]
            num_cut = sum(r > 1.3 for r in of_kind) if ending == "tis" and not is_vetoed else 0
            assert got.num_truncated == num_cut
        got = m.correct(new, old, kind="none", cap=1.3, floor=0.7, veto=0.0)
        close(got.weights, np.ones(len(old)))
        close(got.ratios, by_token)


def check_correction_metrics(m: Any) -> None:
    """Over two sequences, one of them vetoed."""
    bounds = {"cap": 1.3, "floor": 0.7, "veto": 1e-4}
    both = [
        m.correct(
            POLICY[:4], BEHAVIOR[:4], kind="token_mis", **bounds, ages=np.array([0, 1, 1, 2])
        ),
        m.correct(POLICY[4:], BEHAVIOR[4:], kind="token_mis", **bounds, ages=np.array([0, 0])),
    ]
    got = m.correction_metrics(both)
    ratios_of = [ratio(p, b) for p, b in zip(POLICY, BEHAVIOR, strict=True)]
    # Ratios 0.8, 0.6, 1.8, 1: the second is low, the third high.
    close(got["train/correction_ratio_mean"], mean(ratios_of))
    close(got["train/correction_ratio_max"], max(ratios_of))
    close(got["train/correction_masked_share"], 4 / 6)
    close(got["train/correction_vetoed_share"], 1 / 2)
    close(got["train/masked_low_share"], 1 / 6)
    close(got["train/masked_high_share"], 1 / 6)
    close(got["train/masked_veto_share"], 2 / 6)
    close(got["train/masked_low_share_age_1"], 1 / 2)
    kept = [ratios_of[0], ratios_of[3]]
    share = math.fsum(kept) ** 2 / (6 * math.fsum(w * w for w in kept))
    close(got["train/correction_effective_share"], share)
    assert m.correction_metrics([]) == {}


def check_effective_share(m: Any) -> None:
    """Kish's: 1 of equal weights, 1/n of one alone."""
    close(m.effective_share(np.array([2.0, 2.0, 2.0])), 1.0)
    close(m.effective_share(np.array([0.0, 3.0, 0.0, 0.0])), 0.25)
    close(m.effective_share(np.array([1.0, 3.0])), 16 / 20)
    close(m.effective_share(np.zeros(3)), 0.0)


# The critic.


def check_goes_on(m: Any) -> None:
    """Where a limit ended the episode, where its last answer was cut, or nowhere."""
    whole = credit.ScoredEpisode(episode_id="whole", reward=0.0)
    cut = credit.ScoredEpisode(episode_id="cut", reward=0.0, is_truncated=True)
    late = credit.ScoredEpisode(
        episode_id="late", reward=0.0, is_truncated=True, outcome="truncated"
    )
    for bootstrap, wanted in (
        ("limits", [False, False, True]),
        ("cut_answers", [False, True, True]),
        ("none", [False, False, False]),
    ):
        settings = CriticSettings(bootstrap=bootstrap)
        assert [m.goes_on(one, settings) for one in (whole, cut, late)] == wanted


def check_gae(m: Any) -> None:
    """A weighted sum of the errors of all later steps, with a value after the last."""
    generator = np.random.default_rng(3)
    rewards, values = generator.normal(size=(2, 6))
    for bootstrap, gamma, lam in ((0.0, 1.0, 0.95), (1.5, 0.9, 0.5), (1.5, 0.8, 0.0)):
        got = m.gae(rewards, values, bootstrap=bootstrap, gamma=gamma, gae_lambda=lam)
        close(got, gae_of(rewards, values, bootstrap, gamma, lam))


def gae_of(
    rewards: Array, values: Array, bootstrap: float, gamma: float, lam: float
) -> list[float]:
    """By definition."""
    known = [*values, bootstrap]
    errors = [r + gamma * known[k + 1] - known[k] for k, r in enumerate(rewards)]
    return [
        math.fsum((gamma * lam) ** (later - k) * errors[later] for later in range(k, len(errors)))
        for k in range(len(errors))
    ]


PLACES = [(0, 0), (0, 1), (0, 2), (2, 1), (2, 2), (3, 0)]
"""Trained tokens of a chain: turn and output token; turn 1 has none, nor token 0 of turn 2."""


def make_chain(m: Any) -> Any:
    """Of these."""
    turns, offsets = np.array(PLACES).T
    return m.Chain(places=np.arange(len(PLACES)), turns=turns, offsets=offsets)


def check_rewards_on(m: Any) -> None:
    """Each lies on the last trained token at or before where it was earned."""
    spans = ((0, 2, 5.0),), (), ((0, 1, 7.0), (1, 2, -1.0)), ()
    own = zip((1.0, 2.0, 3.0, 4.0), spans, (0.0, 0.0, 0.5, 0.0), strict=True)
    turns = tuple(make_turn(credit, r, spans=s, branch_reward=b) for r, s, b in own)
    episode = credit.ScoredEpisode(episode_id="e", reward=10.0, turns=turns)
    wanted = [0.0] * len(PLACES)
    wanted[-1] += 10.0
    for place, turn in enumerate(turns):
        earned = [(turn.num_tokens, turn.reward + turn.branch_reward)]
        for end, value in earned + [(end, value) for _, end, value in turn.spans]:
            before = [at for at, known in enumerate(PLACES) if known < (place, end)]
            wanted[before[-1]] += value
    close(m.rewards_on(make_chain(m), episode), wanted)


def check_targets_on(m: Any) -> None:
    """Advantages by one lambda, targets by another; over turns each is one step."""
    rewards = np.array([0.0, 1.0, 2.0, 0.0, -1.0, 4.0])
    values = np.array([0.5, 0.1, 0.25, -1.0, 0.3, 0.9])
    common: dict[str, Any] = {"gamma": 0.9, "gae_lambda": 0.8, "value_lambda": 1.0}
    settings = CriticSettings(**common)
    got = m.targets_on(make_chain(m), rewards, values, bootstrap=0.5, settings=settings)
    close(got.advantages, gae_of(rewards, values, 0.5, 0.9, 0.8))
    close(got.returns, np.array(gae_of(rewards, values, 0.5, 0.9, 1.0)) + values)
    assert got.is_target.all()
    settings = CriticSettings(over="turns", **common)
    got = m.targets_on(make_chain(m), rewards, values, bootstrap=0.5, settings=settings)
    earned, known = [3.0, -1.0, 4.0], [0.5, -1.0, 0.9]
    close(got.advantages, np.repeat(gae_of(earned, known, 0.5, 0.9, 0.8), [3, 2, 1]))
    of_turns = np.array(gae_of(earned, known, 0.5, 0.9, 1.0)) + known
    close(got.returns, [of_turns[0], 0, 0, of_turns[1], 0, of_turns[2]])
    assert got.is_target.tolist() == [True, False, False, True, False, True]


def check_normalized(m: Any) -> None:
    """Less the mean, over the population's deviation."""
    for own in REWARDS:
        close(m.normalized(own), [(r - mean(own)) / (deviation(own, 0) + 1e-8) for r in own])


def check_value_losses(m: Any) -> None:
    """Half of the larger square, and its slope; without a clip half of the square."""
    values, before = np.array([1.0, 0.15, -1.0, 0.1]), np.array([0.0, 0.0, 0.1, 0.05])
    returns = np.array([2.0, 0.6, 2.0, 0.0])

    def loss(value: float, old: float, due: float, clip: float) -> float:
        near = old + min(max(value - old, -clip), clip)
        return max((value - due) ** 2, (near - due) ** 2 if clip else 0.0) / 2

    for clip in (0.0, 0.2):
        leaf = tensor(values, with_gradient=True)
        got = m.value_losses(leaf, tensor(before), tensor(returns), value_clip=clip)
        rows = list(zip(values, before, returns, strict=True))
        close(got, [loss(v, b, r, clip) for v, b, r in rows])
        wanted = [slope(lambda x, b=b, r=r, c=clip: loss(x, b, r, c), v) for v, b, r in rows]
        close(gradient(got, leaf), wanted, within=1e-6)


# Reward models and penalties.

SCORES = np.array([0.3, -1.0, 2.0, 0.5, 0.5, 1.5])
TARGETS = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 1.0])
SETS = [0, 0, 0, 1, 1, 2]


def preferred() -> list[list[tuple[int, int]]]:
    """Pairs of better and worse rows of each set that has any."""
    pairs = [
        [
            (i, j)
            for i, j in itertools.permutations(range(6), 2)
            if SETS[i] == SETS[j] == label and TARGETS[i] > TARGETS[j]
        ]
        for label in range(3)
    ]
    return [own for own in pairs if own]


def bradley_terry_of(scores: Array) -> float:
    """From the formula, pair by pair."""
    return mean(
        [
            mean([math.log(1 + math.exp(scores[worse] - scores[better])) for better, worse in own])
            for own in preferred()
        ]
    )


def check_bradley_terry(m: Any) -> None:
    """Value, slope, and how many pairs are ordered rightly."""
    got = m.bradley_terry(SCORES, TARGETS, SETS)
    close(got.loss, bradley_terry_of(SCORES))
    close(got.gradient, slope(bradley_terry_of, SCORES), within=1e-6)
    pairs = [pair for own in preferred() for pair in own]
    right = [np.sign(SCORES[i] - SCORES[j]) / 2 + 0.5 for i, j in pairs]
    assert (got.num_pairs, got.accuracy) == (len(pairs), pytest.approx(mean(right)))


def check_regression(m: Any) -> None:
    """Half of the mean square, and its slope."""
    got = m.regression(SCORES, TARGETS, SETS)

    def loss(scores: Array) -> float:
        return mean([(s - t) ** 2 / 2 for s, t in zip(scores, TARGETS, strict=True)])

    close(got.loss, loss(SCORES))
    close(got.gradient, slope(loss, SCORES), within=1e-6)
    assert got.num_pairs == sum(len(own) for own in preferred())


def check_overlong_penalty(m: Any) -> None:
    """Nothing, a line, all of it."""
    for length, wanted in ((0, 0.0), (80, 0.0), (85, 0.125), (90, 0.25), (100, 0.5), (999, 0.5)):
        got = m.overlong_penalty(length, max_tokens=100, buffer_tokens=20, penalty=0.5)
        close(got, wanted)


def check_num_generated_tokens(m: Any) -> None:
    """Over all turns, each once."""
    turns = tuple(SimpleNamespace(prompt_ids=range(5), output_ids=range(n)) for n in (2, 3))
    assert m.num_generated_tokens(SimpleNamespace(turns=turns)) == 5


# Logprobs.

LOGITS = np.random.default_rng(5).normal(size=(4, 7)) * 2
TOKENS = np.array([[0, 6], [3, 1], [5, 5], [2, 0]])
TEMPERATURES = np.array([1.0, 0.5, 2.0, 1.5])


def log_softmax_of(logits: Array) -> Array:
    """Over each row, at its temperature."""
    scaled = logits / TEMPERATURES[:, None]
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


def check_logprobs(m: Any) -> None:
    """Values, entropies, and the slope of both; computed in blocks of one row or two."""
    by_logprob, by_entropy = np.array([[1.0, -2.0], [0.5, 3.0], [1.0, 1.0], [2.0, 0.0]]), SCORES[:4]

    def total(logits: Array) -> float:
        table = log_softmax_of(logits)
        own = np.take_along_axis(table, TOKENS, -1)
        entropies = -(np.exp(table) * table).sum(-1)
        return float((own * by_logprob).sum() + entropies @ by_entropy)

    for has_gradient, block in ((True, 7), (False, 14)):
        leaf = torch.tensor(LOGITS, dtype=torch.float32, requires_grad=True)
        logprobs, entropies = m.logprobs_and_entropies(
            leaf * 1.0,
            torch.tensor(TOKENS),
            torch.tensor(TEMPERATURES, dtype=torch.float32),
            has_entropy_gradient=has_gradient,
            block_size=block,
        )
        table = log_softmax_of(LOGITS)
        close(logprobs, np.take_along_axis(table, TOKENS, -1), within=1e-5)
        close(entropies, -(np.exp(table) * table).sum(-1), within=1e-5)
        pulled = (logprobs * torch.tensor(by_logprob)).sum()
        if has_gradient:
            pulled = pulled + (entropies * torch.tensor(by_entropy)).sum()
            close(gradient(pulled, leaf), slope(total, LOGITS), within=1e-4)


def check_renormalised(m: Any) -> None:
    """Over the ids that were left; a row without any keeps its logprob. Slopes alike."""
    among = np.log(np.array([[0.5, 0.2, 0.1], [0.3, 0.6, 0.05], [0.25, 0.25, 0.25]]))
    is_kept = np.array([[True, True, False], [True, True, True], [False, False, False]])

    def one(own: Array, kept: Array) -> float:
        left = np.exp(own)[kept].sum()
        return float(own[0] - (math.log(left) if kept.any() else 0.0))

    leaf = tensor(among, with_gradient=True)
    got = m.renormalised(leaf[:, 0], leaf, torch.tensor(is_kept))
    rows = list(zip(among, is_kept, strict=True))
    close(got, [one(own, kept) for own, kept in rows])
    close(gradient(got, leaf), [slope(lambda x, k=k: one(x, k), a) for a, k in rows], within=1e-6)


def check_top_ids(m: Any) -> None:
    """Highest first, padding left out."""
    logits = torch.tensor(LOGITS, dtype=torch.float32)
    wanted = [sorted(range(6), key=lambda i: -row[i])[:3] for row in LOGITS]
    assert m.top_ids(logits, 3, vocab_size=6).tolist() == wanted
    moved = [[i + 10 for i in row] for row in wanted]
    assert m.top_ids(logits, 3, vocab_size=16, vocab_start=10).tolist() == moved


HELD: tuple[Held, ...] = (
    held(
        advantages,
        "has_signal",
        check_signal,
        ("_EQUAL * scale", "0.0"),
        ("_EQUAL * scale", "_EQUAL"),
    ),
    held(
        advantages,
        "grpo",
        check_grpo,
        ("ddof=1", "ddof=0"),
        ("(rewards - rewards.mean())", "rewards"),
    ),
    held(
        advantages,
        "dr_grpo",
        check_dr_grpo,
        ("rewards - rewards.mean()", "rewards.mean() - rewards"),
    ),
    held(advantages, "rloo", check_rloo, ("(len(rewards) / (len(rewards) - 1))", "1.0")),
    held(
        advantages,
        "pass_at_k",
        check_pass_at_k,
        ("above - 1, k - 2", "above - 1, k - 1"),
        ("(own + higher) / with_it", "own / with_it"),
        ("/ with_it - mean", "/ with_it"),
    ),
    held(
        advantages,
        "best_of_n",
        check_best_of_n,
        ("len(rewards) / is_best.sum()", "len(rewards)"),
        ("len(rewards) / is_best.sum()", "1.0 / is_best.sum()"),
    ),
    held(
        advantages,
        "reinforce_pp",
        check_reinforce_pp,
        ("everyone.std()", "everyone.std(ddof=1)"),
        ("rewards - everyone.mean()", "rewards - rewards.mean()"),
    ),
    held(
        advantages,
        "reinforce_pp_baseline",
        check_reinforce_pp_baseline,
        ("np.concatenate(centred).std()", "np.concatenate(groups).std()"),
        ("[rewards / scale", "[rewards / (rewards.std() + _EPSILON)"),
    ),
    held(
        advantages,
        "group_advantages",
        check_group_advantages,
        ("not has_signal(rewards)", "len(rewards) < 2"),
    ),
    held(
        advantages,
        "groups_with_signal",
        check_groups_with_signal,
        ("take_has_signal and len(rewards) > 0", "has_signal(rewards)"),
        (" and len(rewards) > 0", ""),
    ),
    held(
        advantages,
        "take_advantages",
        check_take_advantages,
        (" and counted[index]", ""),
        ("if signal[index]", "if True"),
        ("if has else", "if True else"),
    ),
    held(credit, "ScoredTurn.earned", check_scored_records, (" + self.branch_reward", "")),
    held(credit, "ScoredEpisode.total", check_scored_records, ("self.reward + ", "")),
    held(credit, "ScoredEpisode.num_tokens", check_scored_records, ("turn.num_tokens", "1")),
    held(credit, "ScoredGroup.rewards", check_scored_records, ("episode.reward", "episode.total")),
    held(credit, "ScoredGroup.totals", check_scored_records, ("episode.total", "episode.reward")),
    held(
        credit,
        "ScoredGroup.with_rewards",
        check_scored_records,
        ("reward=reward", "reward=rewards[0]"),
    ),
    held(
        credit,
        "reward_to_go",
        check_reward_to_go,
        ("np.delete(table, row, axis=0)[:, :size]", "table[:, :size]"),
        ('mode="edge"', 'mode="constant"'),
        ("if j != index", ""),
        ("later - siblings", "later", "_steps"),
        ("to_go[:end]", "to_go[: end - 1]", "_steps"),
        ("later = discount * (later", "later = (discount * later", "_steps"),
    ),
    held(credit, "uses_parts", check_uses, (" or advantage in VALUE_ADVANTAGES", "")),
    held(credit, "divides_by_group", check_uses, ('advantage == "grpo"', 'advantage != "grpo"')),
    held(
        credit,
        "BySource.imitates",
        check_by_source,
        (".is_imitated", ".weight > 0"),
        ("rule.weight * is_good", "is_good", "BySource.__call__"),
        ("discount=self.turn_discount", "discount=1.0", "BySource.__call__"),
        ("rule.weight * group_advantages", "group_advantages", "BySource.__call__"),
        ("episode.total >= least", "episode.reward >= least", "_good"),
    ),
    held(credit, "BySource.teaches", check_by_source, ("any(_good(group, rule))", "True")),
    held(
        credit,
        "signals_of",
        check_signals_of,
        ("len(group.episodes) > 0", "len(group.episodes) > 1"),
        ("[_differs(group) for", "[has_signal(group.totals.tolist()) for"),
    ),
    held(
        credit,
        "take_credits",
        check_take_credits,
        ("if has else", "if True else"),
        ("counted=counted)", "counted=None)"),
    ),
    held(
        denominators,
        "denominator",
        check_denominator,
        ("len(set(episode_ids))", "len(episode_ids)"),
        ("return num_episodes * token_budget", "return float(token_budget)"),
        ("max(1, sum(num_trained_tokens))", "sum(num_trained_tokens)"),
    ),
    held(
        denominators,
        "token_weights",
        check_token_weights,
        ("counts.get(episode_id, 0) + count", "count"),
    ),
    held(
        distillation,
        "teacher_advantages",
        check_teacher_advantages,
        (
            "teacher_logprobs - policy_logprobs.detach()",
            "policy_logprobs.detach() - teacher_logprobs",
        ),
        ("policy_logprobs.detach()", "policy_logprobs"),
        ("gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "gap"),
        ("return coefficient * gap", "return gap"),
    ),
    held(
        distillation,
        "top_divergence",
        check_top_divergence,
        (" + our_rest * rest_gap", ""),
        ("- their_rest * rest_gap", "+ their_rest * rest_gap"),
        ('if kind == "reverse"', 'if kind == "forward"'),
        ("ours.exp() * is_known", "ours.exp()"),
    ),
    held(
        gae,
        "gae",
        check_gae,
        ("gamma * following - values", "following - values"),
        ("np.append(values[1:], bootstrap)", "np.append(values[1:], 0.0)"),
        ("gamma * gae_lambda * carried", "gae_lambda * carried"),
        ("len(errors) - 1, -1, -1", "len(errors) - 1, 0, -1"),
    ),
    held(
        gae,
        "goes_on",
        check_goes_on,
        ('settings.bootstrap == "none"', "False"),
        ('settings.bootstrap == "cut_answers" and episode', "episode"),
        ('is_cut or episode.outcome == "truncated"', "is_cut"),
    ),
    held(
        gae,
        "rewards_on",
        check_rewards_on,
        ('place, side="right")) - 1', 'place, side="left"))'),
        ("turn.reward + turn.branch_reward", "turn.reward"),
        ('own, end, side="left")) - 1', 'own, end, side="right")) - 1'),
    ),
    held(
        gae,
        "targets_on",
        check_targets_on,
        ("by_step(value_lambda) + expected", "by_step(value_lambda)"),
        ("by_step(value_lambda)", "by_step(settings.gae_lambda)"),
        ("np.diff(chain.turns) != 0", "np.diff(chain.turns) == 1"),
    ),
    held(
        gae,
        "normalized",
        check_normalized,
        ("(advantages - advantages.mean())", "advantages"),
        ("advantages.std()", "advantages.std(ddof=1)"),
    ),
    held(
        gae,
        "value_losses",
        check_value_losses,
        ("torch.maximum", "torch.minimum"),
        ("0.5 * losses", "losses"),
        ("near = before", "near = values"),
    ),
    held(
        importance_weights,
        "correct",
        check_correct,
        ("proximal_logprobs - behavior_logprobs", "behavior_logprobs - proximal_logprobs"),
        ("np.minimum(per_token, cap)", "per_token"),
        ("(per_token >= floor) & ", ""),
        ("log_ratios.sum(keepdims=True) / max(1, count)", "log_ratios.sum(keepdims=True)"),
        ("weights, num_truncated = np.zeros(count), 0", "num_truncated = 0"),
    ),
    held(
        importance_weights,
        "correction_metrics",
        check_correction_metrics,
        ("(weights == 0).mean()", "(weights != 0).mean()"),
        ("is_masked[where].mean()", "is_masked.mean()", "_reasons"),
    ),
    held(
        importance_weights,
        "effective_share",
        check_effective_share,
        ("(len(weights) * total)", "total"),
    ),
    held(
        kl,
        "kl_loss",
        check_kl_loss,
        ("policy_logprobs - reference_logprobs", "reference_logprobs - policy_logprobs"),
        (".clamp(max=ratio_cap)", ""),
        ("return ratio.detach() *", "return ratio *"),
        ("return ratio * (towards", "return ratio.detach() * (towards"),
        ("+ distance - 1.0", "- 1.0"),
    ),
    held(
        kl,
        "k1",
        check_k1,
        (
            "behavior_logprobs.astype(np.float64) - reference_logprobs",
            "reference_logprobs - behavior_logprobs.astype(np.float64)",
        ),
    ),
    held(
        kl,
        "adapted_coefficient",
        check_adapted_coefficient,
        ("(1.0 + 0.1 * error)", "(1.0 - 0.1 * error)"),
        ("min(max(measured / target - 1.0, -0.2), 0.2)", "measured / target - 1.0"),
    ),
    held(
        losses,
        "Sequences.mean",
        check_loss_inputs,
        ("torch.ones_like(values_N)", "values_N"),
        ("values.detach()", "values"),
    ),
    held(
        losses,
        "LossInputs.ratio",
        check_loss_inputs,
        ("self.proximal_logprobs", "self.behavior_logprobs"),
    ),
    held(
        losses,
        "LossInputs.sequence_mean",
        check_loss_inputs,
        ("self.sequences.mean(values)", "values.mean().expand(len(values))"),
    ),
    held(
        losses,
        "TokenLoss.at",
        check_loss_inputs,
        ("self.is_masked[where]", "self.is_masked[~where]"),
    ),
    held(losses, "sequence_level", check_marks, ("= True", "= False")),
    held(losses, "is_sequence_level", check_marks, ("False))", "True))")),
    held(
        losses,
        "ppo_clip",
        check_ppo_clip,
        ("torch.minimum(plain, cut)", "torch.maximum(plain, cut)", "_clipped"),
        ("1.0 + inputs.clip_high", "1.0 + inputs.clip_low", "_clipped"),
        ("torch.where(is_beyond, lowest, objective)", "objective", "_clipped"),
        ("(inputs.advantages < 0) & ", "", "_clipped"),
        ("loss=-objective", "loss=objective", "_clipped"),
    ),
    held(
        losses,
        "gspo",
        check_gspo,
        ("logprobs - inputs.proximal_logprobs", "logprobs - inputs.behavior_logprobs"),
        ("log_ratio + (logprobs - logprobs.detach())", "log_ratio + 0 * logprobs"),
        (
            "inputs.sequence_mean(logprobs - inputs.proximal_logprobs)",
            "(logprobs - inputs.proximal_logprobs).detach()",
        ),
    ),
    held(
        losses,
        "cispo",
        check_cispo,
        ("inputs.ratio.detach()", "inputs.ratio"),
        ("1.0 + inputs.clip_high", "1.0 + inputs.clip_low"),
        ("loss=-clipped", "loss=-ratio"),
    ),
    held(
        losses,
        "reinforce",
        check_reinforce,
        ("loss=-inputs.advantages", "loss=inputs.advantages"),
        ("loss=-inputs", "loss=-ratio * inputs"),
    ),
    held(objective, "needs_sequences", check_needs_sequences, (" or settings.opsm_delta > 0", "")),
    held(
        objective,
        "adapted_entropy_coefficient",
        check_adapted_entropy,
        ("1.0 - measured / target", "measured / target - 1.0"),
    ),
    held(
        objective,
        "objective",
        check_objective,
        ("loss * inputs.correction", "loss"),
        (
            "inputs.behavior_logprobs - inputs.policy_logprobs)",
            "inputs.policy_logprobs - inputs.behavior_logprobs)",
        ),
        ("(inputs.advantages < 0) & ", ""),
        ("settings.teacher.coefficient * top_divergence", "top_divergence"),
        ("loss + settings.kl_coefficient", "loss - settings.kl_coefficient"),
        ("loss - settings.entropy_coefficient", "loss + settings.entropy_coefficient"),
        ("torch.where(inputs.correction == 0, torch.zeros_like(loss), loss)", "loss"),
        ("is_imitated, -weights *", "is_imitated, weights *"),
        ("loss = loss * token_weights", "loss = loss / token_weights"),
        ("inputs.advantages + pull", "pull", "_taught"),
    ),
    held(
        ratios,
        "ratio_of",
        check_ratio_of,
        ("policy_logprobs - old_logprobs", "old_logprobs - policy_logprobs"),
        (".clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", ".clamp(max=MAX_LOG_RATIO)"),
    ),
    held(
        reward_losses,
        "bradley_terry",
        check_bradley_terry,
        ("targets[rows][:, None] > targets", "targets[rows][:, None] < targets"),
        (" / len(gaps)\n", "\n"),
        ("gradient / max(1, len(losses))", "gradient"),
        ("0.5 * (gaps == 0).sum()", "(gaps == 0).sum()"),
    ),
    held(
        reward_losses,
        "regression",
        check_regression,
        ("0.5 * np.square", "np.square"),
        ("scores - targets", "targets - scores"),
    ),
    held(
        reward_shaping,
        "overlong_penalty",
        check_overlong_penalty,
        ("(max_tokens - buffer_tokens)", "max_tokens"),
        ("penalty * excess / buffer_tokens", "excess / buffer_tokens"),
    ),
    held(
        reward_shaping,
        "num_generated_tokens",
        check_num_generated_tokens,
        ("len(turn.output_ids)", "len(turn.prompt_ids)"),
    ),
    held(
        token_logprobs,
        "logprobs_and_entropies",
        check_logprobs,
        ("log_total - sums[1] / sums[0]", "log_total", "_TokenStatistics.forward"),
        ("p.div_(temperature[rows, None])", "p.mul_(1.0)", "_TokenStatistics.backward"),
        (".add_(entropies[rows, None])", "", "_TokenStatistics.backward"),
        ("by_logprob.sum(-1)", "by_logprob[:, 0]", "_TokenStatistics.backward"),
        ("block.div_(temperature[rows, None])", "block", "_scaled"),
    ),
    held(
        token_logprobs,
        "renormalised",
        check_renormalised,
        ("logprobs - kept", "logprobs + kept"),
        ("among.masked_fill(~is_kept, -torch.inf)", "among"),
    ),
    held(
        token_logprobs,
        "top_ids",
        check_top_ids,
        ("vocab_size - vocab_start", "vocab_size"),
        ("found.indices + vocab_start", "found.indices"),
    ),
    held(
        curriculum,
        "weight_of",
        check_weight_of,
        ("4.0 * pass_rate", "2.0 * pass_rate"),
        ("(floor + ", "("),
    ),
)

WITHOUT_NUMBERS = {
    "user_functions": "finds and checks functions of the user: test_custom",
}
"""Modules whose functions compute nothing, each with where they are held."""


@pytest.mark.parametrize("one", HELD, ids=str)
def test_a_function_is_its_formula_and_no_mutant_is(one: Held) -> None:
    """Against the reference in float64; then each wrong variant fails the same check."""
    one.check(one.module)
    for mutant in one.mutants:
        assert not passes(one, mutant), f"nothing tells {mutant.right!r} from {mutant.wrong!r}"


def test_every_function_is_held() -> None:
    """A new one needs a reference and a mutant."""
    names = [item.name for item in pkgutil.iter_modules(algorithms.__path__)]
    modules = [importlib.import_module(f"{algorithms.__name__}.{name}") for name in names]
    assert set(WITHOUT_NUMBERS) < set(names)
    wanted = {
        f"{name}.{function}"
        for name, module in zip(names, modules, strict=True)
        if name not in WITHOUT_NUMBERS
        for function in public_functions_of(module)
    }
    known = {str(one) for one in HELD if one.module is not curriculum}
    assert wanted - known == set(), "without a reference: a line in HELD is due"
    assert known - wanted == set(), "no longer there"
    assert all(one.mutants for one in HELD)
