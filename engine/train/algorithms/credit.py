"""Credit: what a group's episodes earned, and where, as advantages of turns and tokens.

A baseline of a turn depends on other episodes alone, so that it shifts no expected gradient,
whoever decides when an episode ends. Advantages from one reward an episode are in advantages.py,
those of a critic in gae.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outloop.engine.train.algorithms.advantages import (
    Float64,
    group_advantages,
    groups_with_signal,
    has_signal,
    take_advantages,
)

_EQUAL = 1e-9
"""Parts of a reward closer than this, relative to the largest, are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTurn:
    """One model call of an episode and what it earned."""

    turn_id: str
    parent: int | None
    """Place in the episode of the turn that it continued; None: it began a branch."""
    request: int
    """The choices of one request share it; they cannot have caused each other."""
    num_tokens: int
    """Output tokens, trained or not."""
    oldest_version: int | None
    """The oldest policy_version of its trained tokens; None: none is trained."""
    is_cut: bool
    """Ended by the limit of its answer's tokens."""
    reward: float = 0.0
    """Of the turn."""
    branch_reward: float = 0.0
    """Of the branch that it ends; 0 for a turn that was continued."""
    spans: tuple[tuple[int, int, float], ...] = ()
    """What tokens [start, end) of its output earned: (start, end, reward), in order."""

    @property
    def earned(self) -> float:
        """All that it earned: its own reward, its branch's if it ends one, and its tokens'."""
        return self.reward + self.branch_reward + sum(value for _, _, value in self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredEpisode:
    """One scored attempt."""

    episode_id: str
    reward: float
    """Of the episode as a whole, less penalties; what its parts earned is beside it."""
    components: dict[str, float] = field(default_factory=dict)
    outcome: str = "completed"
    is_truncated: bool = False
    """Any limit ended it (6.1 rule 16)."""
    turns: tuple[ScoredTurn, ...] = ()
    """In the order in which they were recorded, parents before children."""
    branches: tuple[tuple[int, ...], ...] = ()
    """Places of the turns of each branch, from its root to its last turn."""

    @property
    def total(self) -> float:
        """The return: the episode's reward and all that its parts earned."""
        return self.reward + sum(turn.earned for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all its turns."""
        return sum(turn.num_tokens for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """The scored episodes of a group, as an advantage function sees them."""

    group_id: str
    task_id: str
    source: str = ""
    """Name of the list of tasks that it is from, where there are several."""
    episodes: tuple[ScoredEpisode, ...]

    @property
    def rewards(self) -> Float64:
        """[E] float64: each episode's reward as a whole."""
        return np.array([episode.reward for episode in self.episodes], np.float64)

    @property
    def totals(self) -> Float64:
        """[E] float64: each episode's return, what its parts earned included."""
        return np.array([episode.total for episode in self.episodes], np.float64)

    def with_rewards(self, rewards: Sequence[float]) -> ScoredGroup:
        """The same with other rewards of the episodes."""
        return dataclasses.replace(
            self,
            episodes=tuple(
                dataclasses.replace(episode, reward=reward)
                for episode, reward in zip(self.episodes, rewards, strict=True)
            ),
        )


TurnAdvantages = list[Float64]
"""For each turn of an episode, [O] for its output tokens or [1] for all of them."""
EpisodeAdvantage = float | TurnAdvantages
GroupAdvantage = Callable[[ScoredGroup], Sequence[EpisodeAdvantage]]
"""A group with signal -> for each of its episodes one number, or one for each turn or token."""


def reward_to_go(group: ScoredGroup, *, discount: float = 1.0) -> list[EpisodeAdvantage]:
    """A_itk = G_itk - mean over the other episodes j of G_jtk: rewards to go, with the other
    attempts at the same place as the baseline.

    G_itk is what episode i earned from output token k of its turn t on: the episode's own reward,
    all that turns recorded later earned, and of turn t itself its reward, its branch's if it ends
    one, and the spans of tokens that end behind k. Other choices of t's request are left out: it
    cannot have caused them. The others are taken at their token k of turn t, or at that turn's last
    token; those that ended before are left out, and if all did, each is taken at its last turn
    (without turns: its reward).

    Why the baseline shifts nothing: whether episode i has a turn t, and how many tokens it has
    before k, is decided by what was sampled before; the baseline is a function of other episodes,
    which are independent of it. So E[grad log pi(token) * baseline] = baseline * 0 for each token
    that is sampled, and the expected gradient is that of the return, for any rule of stopping.

    Two other choices are biased where the policy decides when it stops (verl, issue 7244). Centring
    each turn's reward by the mean at its index before summing to go (MT-GRPO, arXiv:2505.11821,
    carried over to episodes of any number of turns) subtracts later turns' means from the turn that
    decides whether there are later turns: a reward of minus the mean for each further turn. The
    mean at an index with the episode itself in it shrinks turn t's gradient by 1 - 1/n_t, where n_t
    is how many reached t: late turns, which few reach, are nearly left out. Division by a deviation
    (GRPO) weighs turns unequally too, and is left out.

    With `discount` below 1 what is earned n turns later counts discount^n. The expected gradient is
    then that of the discounted return, as in REINFORCE with a discount: less noise, and wrong where
    what a turn does pays late. At 0 a turn answers for its own reward alone, which loses nothing
    where turns do not change each other's rewards, nor how many there are.

    With one turn an episode and no scores of parts this is `rloo`.
    """
    steps = [_steps(episode, discount) for episode in group.episodes]
    ends = [_last(episode, own) for episode, own in zip(group.episodes, steps, strict=True)]
    num_turns = max((len(own) for own in steps), default=0)
    found: list[TurnAdvantages] = [[] for _ in steps]
    for place in range(num_turns):
        there = [index for index, own in enumerate(steps) if len(own) > place]
        sizes = [len(steps[index][place]) for index in there]
        # Beyond a turn's last token its reward to go stays what it was there.
        table = np.stack(
            [
                np.pad(steps[index][place], (0, max(sizes) - size), mode="edge")
                for index, size in zip(there, sizes, strict=True)
            ]
        )
        for row, (index, size) in enumerate(zip(there, sizes, strict=True)):
            others = np.delete(table, row, axis=0)[:, :size]
            if len(others):
                baseline = others.mean(axis=0)
            else:
                baseline = np.mean([ends[j] for j in range(len(ends)) if j != index])
            found[index].append(table[row, :size] - baseline)
    return list(found)


def _steps(episode: ScoredEpisode, discount: float) -> list[Float64]:
    """Reward to go of every output token of every turn; [1] for a turn without scored spans."""
    later = episode.reward
    found: list[Float64] = []
    by_request: dict[int, tuple[float, int]] = {}
    for place in reversed(range(len(episode.turns))):
        turn = episode.turns[place]
        value, at = by_request.get(turn.request, (0.0, place))
        siblings = value * discount ** (at - place)
        at_end = later - siblings + turn.reward + turn.branch_reward
        to_go = np.full(max(1, turn.num_tokens) if turn.spans else 1, at_end)
        for _, end, earned in turn.spans:
            to_go[:end] += earned
        found.append(to_go)
        by_request[turn.request] = (siblings + turn.earned, place)
        later = discount * (later + turn.earned)
    return found[::-1]


def _last(episode: ScoredEpisode, steps: Sequence[Float64]) -> float:
    return float(steps[-1][0]) if steps else episode.reward


GROUP_ADVANTAGES: dict[str, GroupAdvantage] = {"reward_to_go": reward_to_go}
"""By name: those that see a group with its structure."""
VALUE_ADVANTAGES = ("gae",)
"""By name: those that need a critic; they are computed at the ranks (step/critic)."""
_WITHOUT_REWARDS = (*VALUE_ADVANTAGES, "none")
"""By name: those that compare no rewards here; with "none" a teacher alone trains."""


def uses_parts(advantage: str | GroupAdvantage) -> bool:
    """True if scores of turns, branches and tokens change the advantage; of a function of the
    user's own they may."""
    return (
        advantage in GROUP_ADVANTAGES or advantage in VALUE_ADVANTAGES
        if isinstance(advantage, str)
        else True
    )


def divides_by_group(advantage: str | GroupAdvantage) -> bool:
    """True if a group's advantages are of one size however little its rewards differ; of a function
    of the user's own it may be true."""
    return advantage == "grpo" or not isinstance(advantage, str)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRule:
    """What is different for the groups of a source."""

    advantage: str | None = None
    """Of one group: a name of ADVANTAGES or GROUP_ADVANTAGES; None: the default."""
    weight: float = 1.0
    """What its advantages are multiplied by."""
    is_imitated: bool = False
    """Its episodes are trained by cross-entropy: the advantage is that term's weight."""
    min_reward: float | None = None
    """Of imitated episodes: those that earned less have weight 0; None: none has."""


@dataclass(frozen=True, slots=True)
class BySource:
    """An advantage that goes by the group's source."""

    default: str
    """Of the sources that `rules` does not name."""
    rules: Mapping[str, SourceRule]
    turn_discount: float = 1.0
    """Of reward_to_go."""

    def __call__(self, group: ScoredGroup) -> list[EpisodeAdvantage]:
        """The group's advantages, or the weights with which its episodes are imitated."""
        rule = self.rules.get(group.source, SourceRule())
        if rule.is_imitated:
            return [rule.weight * is_good for is_good in _good(group, rule)]
        name = rule.advantage or self.default
        if name == "reward_to_go":
            found = reward_to_go(group, discount=self.turn_discount)
            return [_times(value, rule.weight) for value in found]
        return (rule.weight * group_advantages(group.rewards.tolist(), name)).tolist()

    def imitates(self, source: str) -> bool:
        """True if episodes of this source are trained by cross-entropy."""
        return self.rules.get(source, SourceRule()).is_imitated

    def teaches(self, group: ScoredGroup) -> bool:
        """True if something of the group can be learned: its rewards differ, or an episode is to be
        imitated."""
        rule = self.rules.get(group.source, SourceRule())
        return any(_good(group, rule)) if rule.is_imitated else _differs(group)


def _good(group: ScoredGroup, rule: SourceRule) -> list[bool]:
    least = rule.min_reward
    return [least is None or episode.total >= least for episode in group.episodes]


def _times(value: EpisodeAdvantage, weight: float) -> EpisodeAdvantage:
    return value * weight if isinstance(value, float) else [own * weight for own in value]


def signals_of(groups: Sequence[ScoredGroup], advantage: str | GroupAdvantage) -> list[bool]:
    """For each group of a take whether what it earned can teach anything under `advantage`."""
    if isinstance(advantage, str) and advantage in _WITHOUT_REWARDS:
        return [len(group.episodes) > 0 for group in groups]
    if isinstance(advantage, BySource):
        return [advantage.teaches(group) for group in groups]
    if uses_parts(advantage):
        return [_differs(group) for group in groups]
    assert isinstance(advantage, str)
    return groups_with_signal([group.rewards.tolist() for group in groups], advantage)


def take_credits(
    groups: Sequence[ScoredGroup],
    advantage: str | GroupAdvantage,
    *,
    signal: Sequence[bool],
    counted: Sequence[bool] | None = None,
) -> list[list[EpisodeAdvantage]]:
    """The advantages of every episode of a take; zeros for groups without signal.

    Args:
        advantage: a name of ADVANTAGES, TAKE_ADVANTAGES, GROUP_ADVANTAGES or VALUE_ADVANTAGES (of
            which the ranks know more: zeros), "none" (zeros), or a function of one group.
        signal: `signals_of`; the others count in a take's statistics.
        counted: which groups count in a take's statistics; None: all.
    """
    if isinstance(advantage, str) and advantage in _WITHOUT_REWARDS:
        return [[0.0] * len(group.episodes) for group in groups]
    if not uses_parts(advantage):
        assert isinstance(advantage, str)
        rewards = [group.rewards.tolist() for group in groups]
        taken = take_advantages(rewards, advantage, signal=signal, counted=counted)
        return [values.tolist() for values in taken]
    function = GROUP_ADVANTAGES[advantage] if isinstance(advantage, str) else advantage
    return [
        list(function(group)) if has else [0.0] * len(group.episodes)
        for group, has in zip(groups, signal, strict=True)
    ]


def _differs(group: ScoredGroup) -> bool:
    """True if at least two episodes were scored, and what they or their parts earned differs."""
    if len(group.episodes) < 2:
        return False
    if has_signal(group.rewards.tolist()) or has_signal(group.totals.tolist()):
        return True
    if not any(turn.earned or turn.spans for e in group.episodes for turn in e.turns):
        return False
    first, *others = (
        [number for turn in episode.turns for number in (turn.earned, *np.ravel(turn.spans))]
        for episode in group.episodes
    )
    return any(
        len(other) != len(first) or not np.allclose(other, first, _EQUAL, _EQUAL)
        for other in others
    )
