"""Advantages by a critic: generalized advantage estimation over an episode's tokens or turns.

Owns: the recursion, where rewards lie on the chain of an episode, targets of values, the value
loss. Does not own: values themselves (step/critic_update). Invariant: every trained token of an
episode is on one chain, in the order in which turns were recorded, whatever branches they are in;
each reward lies on it once, at the last trained token that it can be credited to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outloop.engine.train.algorithms.advantages import Float64
from outloop.engine.train.algorithms.credit import ScoredEpisode

if TYPE_CHECKING:
    from outloop.buffer.settings.trainer import CriticSettings

_EPSILON = 1e-8


def gae(
    rewards: Float64, values: Float64, *, bootstrap: float, gamma: float, gae_lambda: float
) -> Float64:
    """A_k = sum over l >= 0 of (gamma lambda)^l (r_k+l + gamma V_k+l+1 - V_k+l): GAE,
    arXiv:1506.02438, equation 16, with V after the last step = bootstrap.

    Args:
        rewards: [K] earned by each step.
        values: [K] expected before each.
        bootstrap: expected after the last: 0 where the episode ended, the critic's value where a
            limit cut it.

    Returns:
        [K] float64.
    """
    following = np.append(values[1:], bootstrap)
    errors = rewards + gamma * following - values
    found = np.zeros(len(errors))
    carried = 0.0
    for step in range(len(errors) - 1, -1, -1):
        carried = errors[step] + gamma * gae_lambda * carried
        found[step] = carried
    return found


def goes_on(episode: ScoredEpisode, settings: CriticSettings) -> bool:
    """Whether an episode would have earned more behind its last token, had no limit ended it: its
    chain ends in the critic's value there, and in 0 otherwise."""
    if settings.bootstrap == "none":
        return False
    is_cut = settings.bootstrap == "cut_answers" and episode.is_truncated
    return is_cut or episode.outcome == "truncated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The trained tokens of an episode, in order: K of them."""

    places: npt.NDArray[np.int64]
    """[K]: where each is in the batch."""
    turns: npt.NDArray[np.int64]
    """[K]: place in the episode of each one's turn."""
    offsets: npt.NDArray[np.int64]
    """[K]: which output token of its turn it is."""


def rewards_on(chain: Chain, episode: ScoredEpisode) -> Float64:
    """[K] what each token of the chain earned; the sum is the episode's return.

    The episode's reward lies on the last token; a turn's, and that of the branch that it ends, on
    the turn's last one, a span's on the last one in it. Where that turn or span has no trained
    token, the one before it on the chain has it, and what was earned before the first token is left
    out: nothing that is trained caused it.
    """
    found = np.zeros(len(chain.places))
    if not len(found):
        return found
    found[-1] += episode.reward
    for place, turn in enumerate(episode.turns):
        last = int(np.searchsorted(chain.turns, place, side="right")) - 1
        if last >= 0:
            found[last] += turn.reward + turn.branch_reward
        first = int(np.searchsorted(chain.turns, place, side="left"))
        for _, end, value in turn.spans:
            own = chain.offsets[first : last + 1] if last >= first else chain.offsets[:0]
            at = first + int(np.searchsorted(own, end, side="left")) - 1
            if at >= 0:
                found[at] += value
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainTargets:
    """What a critic makes of a chain."""

    advantages: Float64
    """[K]."""
    returns: Float64
    """[K]: what the values should have been; of turns at their first token, 0 elsewhere."""
    is_target: npt.NDArray[np.bool_]
    """[K]: where a value is trained."""


def targets_on(
    chain: Chain,
    rewards: Float64,
    values: Float64,
    *,
    bootstrap: float,
    settings: CriticSettings,
) -> ChainTargets:
    """Advantages and returns of a chain, over tokens or over turns.

    Over turns a step of time is a turn: it earns the sum of its tokens, its value is that before
    its first trained token, and its tokens share its advantage.

    Targets are A + V with value_lambda in A: with another lambda than the advantages' (VAPO,
    arXiv:2504.05118, takes 1) the critic's own bias stays out of what it learns.
    """
    starts = np.arange(len(rewards))
    if settings.over == "turns":
        starts = np.flatnonzero(np.append(True, np.diff(chain.turns) != 0)[: len(rewards)])
    earned = np.add.reduceat(rewards, starts) if len(starts) else np.zeros(0)
    expected = values[starts]

    def by_step(gae_lambda: float) -> Float64:
        return gae(
            earned, expected, bootstrap=bootstrap, gamma=settings.gamma, gae_lambda=gae_lambda
        )

    of_steps = by_step(settings.gae_lambda)
    value_lambda = settings.gae_lambda if settings.value_lambda is None else settings.value_lambda
    is_target = np.zeros(len(rewards), np.bool_)
    is_target[starts] = True
    returns = np.zeros(len(rewards))
    returns[starts] = by_step(value_lambda) + expected
    lengths = [end - start for start, end in pairwise([*starts.tolist(), len(rewards)])]
    return ChainTargets(
        advantages=np.repeat(of_steps, lengths), returns=returns, is_target=is_target
    )


def normalized(advantages: Float64) -> Float64:
    """Less their mean, over their deviation (the population's, 1e-8 added to it).

    As in the implementations of PPO (OpenAI baselines; InstructGPT's successors), not in its paper.
    """
    if not len(advantages):
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + _EPSILON)


def value_losses(values: Tensor, before: Tensor, returns: Tensor, *, value_clip: float) -> Tensor:
    """Half of max((V - R)^2, (V_before + clip(V - V_before, +-value_clip) - R)^2), [N].

    The clipped value loss of PPO's implementations (OpenAI baselines; arXiv:2005.12729, section 3),
    which its paper lacks. value_clip 0: half of (V - R)^2.
    """
    losses = (values - returns).square()
    if value_clip > 0:
        near = before + (values - before).clamp(-value_clip, value_clip)
        losses = torch.maximum(losses, (near - returns).square())
    return 0.5 * losses
