"""Advantages: from one reward an episode to one number per episode.

Statistics go by group_id over scored episodes, each counted once, whatever it yields in samples. A
group without signal has advantages of exactly zero. Credit of turns and tokens is in credit.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Advantage = Callable[[Float64], Float64]
"""Rewards [E] of one group's scored episodes -> advantages [E]."""
TakeAdvantage = Callable[[Sequence[Float64]], list[Float64]]
"""The rewards of every group with scored episodes -> the advantages of each."""

_EPSILON = 1e-6
_EQUAL = 1e-9
"""Rewards closer than this, relative to the largest, are equal: a difference that small is
rounding, and GRPO's division would blow it up to a full advantage."""


def has_signal(rewards: Sequence[float]) -> bool:
    """True if at least two episodes were scored and their rewards differ."""
    if len(rewards) < 2:
        return False
    scale = max(1.0, max(abs(reward) for reward in rewards))
    return max(rewards) - min(rewards) > _EQUAL * scale


def grpo(rewards: Float64) -> Float64:
    """(r - mean) / std: GRPO, arXiv:2402.03300, section 4.1.2 (outcome supervision).

    The paper does not say which standard deviation; this is the sample's (divided by G - 1), as in
    TRL, verl and slime. 1e-6 is added to it.
    """
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + _EPSILON)


def dr_grpo(rewards: Float64) -> Float64:
    """r - mean: Dr.GRPO, arXiv:2503.20783, section 3.2, which removes GRPO's division by std.

    The paper's other change, the generation budget in place of each response's length, is
    trainer.denominator = "budget".
    """
    return rewards - rewards.mean()


def rloo(rewards: Float64) -> Float64:
    """r_i - mean of the others: RLOO, arXiv:2402.14740, section 2.3 (leave-one-out baseline of Kool
    et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!").

    The paper uses it with REINFORCE (trainer.loss = "reinforce"); here any loss may be set.
    """
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


def pass_at_k(rewards: Float64, *, k: int) -> Float64:
    """(mean over the k-subsets with i of their best - mean of all) / std of all, over the k-subsets
    of a group's rewards: Pass@k Training, arXiv:2508.10751, section 2.4 (analytical derivation).

    A subset's reward is that of its best attempt, and each attempt gets the mean advantage of the
    subsets it is in. The paper writes it for rewards of 0 and 1, with n wrong ones of N: mean
    1 - C(n, k) / C(N, k), deviation sqrt(mean (1 - mean)); a right one gets (1 - mean) / deviation,
    a wrong one (1 - mean - C(n - 1, k - 1) / C(N - 1, k - 1)) / deviation. Here rewards may be any
    numbers; the deviation is the population's over subsets, and 1e-6 is added to it.

    Zeros where every subset has the same best: more than N - k attempts share the highest reward.
    """
    count = len(rewards)
    if k > count:
        return np.zeros(count)
    order = np.argsort(rewards, kind="stable")
    ranked = rewards[order]
    total = math.comb(count, k)
    # How many subsets have the attempt of rank r as their best (of equals the later one).
    best = np.array([math.comb(rank, k - 1) for rank in range(count)], np.float64)
    mean = float(best @ ranked) / total
    deviation = math.sqrt(max(0.0, float(best @ np.square(ranked - mean)) / total))
    if deviation <= _EQUAL * max(1.0, float(np.abs(rewards).max())):
        return np.zeros(count)
    with_it = math.comb(count - 1, k - 1)
    found = np.zeros(count)
    for rank in range(count):
        own = math.comb(rank, k - 1) * ranked[rank]
        higher = sum(
            math.comb(above - 1, k - 2) * ranked[above] for above in range(rank + 1, count)
        )
        found[order[rank]] = (own + higher) / with_it - mean
    return found / (deviation + _EPSILON)


def best_of_n(rewards: Float64) -> Float64:
    """G / (number of best) for the attempts with the highest of a group's G rewards, 0 for the
    others: RAFT, arXiv:2304.06767, section 3, rejection sampling fine-tuning.

    With trainer.loss = "reinforce" and trainer.denominator = "episodes" the update is the gradient
    of the mean over prompts of the log-likelihood of the best answer. Differs from the paper: best
    answers that are equally good share their prompt's weight, where the paper takes one; a group
    whose rewards are all equal teaches nothing, where the paper imitates one of them, right or
    wrong.
    """
    is_best = rewards >= rewards.max() - _EQUAL * max(1.0, float(np.abs(rewards).max()))
    return is_best * (len(rewards) / is_best.sum())


def reinforce_pp(groups: Sequence[Float64]) -> list[Float64]:
    """(r - mean) / std over all episodes of a take: REINFORCE++, arXiv:2501.03262v9, equation 5.

    Differs from the paper, which normalises over tokens: an episode counts once, however many
    tokens and branches it has. The paper's KL per token to go is trainer.kl = "k1", one sum per
    episode. The standard deviation is the population's (of a take it hardly differs from the
    sample's); 1e-6 is added to it.
    """
    everyone = np.concatenate(groups)
    scale = everyone.std() + _EPSILON
    return [(rewards - everyone.mean()) / scale for rewards in groups]


def reinforce_pp_baseline(groups: Sequence[Float64]) -> list[Float64]:
    """(r - group mean) / std of the same over a take: REINFORCE++ with baseline, arXiv:2501.03262.

    Equations 6 and 7 of version 9; differs as `reinforce_pp` does. The KL is k2 in the loss
    (equation 8), trainer.kl = "k2", not k1 in the reward. The only member of its group is its own
    mean: it gets zero and counts in the standard deviation.
    """
    centred = [rewards - rewards.mean() for rewards in groups]
    scale = np.concatenate(centred).std() + _EPSILON
    return [rewards / scale for rewards in centred]


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "best_of_n": best_of_n,
}
TAKE_ADVANTAGES: dict[str, TakeAdvantage] = {
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def group_advantages(rewards: Sequence[float], advantage: str) -> Float64:
    """Advantages [E] of one group's scored episodes; zeros when the group has no signal."""
    if not has_signal(rewards):
        return np.zeros(len(rewards))
    return ADVANTAGES[advantage](np.asarray(rewards, np.float64))


def groups_with_signal(groups: Sequence[Sequence[float]], advantage: str) -> list[bool]:
    """For each group of a take whether its rewards can teach anything under `advantage`.

    Under reinforce_pp, whose baseline is the take's, a group of equal rewards can, if the take's
    rewards differ.
    """
    if advantage == "reinforce_pp":
        take_has_signal = has_signal([reward for rewards in groups for reward in rewards])
        return [take_has_signal and len(rewards) > 0 for rewards in groups]
    return [has_signal(rewards) for rewards in groups]


def take_advantages(
    groups: Sequence[Sequence[float]],
    advantage: str,
    *,
    signal: Sequence[bool],
    counted: Sequence[bool] | None = None,
) -> list[Float64]:
    """Advantages of every group of a take, from the rewards of their scored episodes.

    Args:
        groups: rewards by group; a group may be empty.
        advantage: a name of ADVANTAGES or TAKE_ADVANTAGES.
        signal: `groups_with_signal`; the others get zeros, but count in a take's statistics.
        counted: which groups count in a take's statistics; None: all.
    """
    counted = [True] * len(groups) if counted is None else counted
    arrays = [np.asarray(rewards, np.float64) for rewards in groups]
    of_take = TAKE_ADVANTAGES.get(advantage)
    if of_take is None:
        return [
            ADVANTAGES[advantage](rewards) if has else np.zeros(len(rewards))
            for rewards, has in zip(arrays, signal, strict=True)
        ]
    filled = [index for index, rewards in enumerate(arrays) if len(rewards) and counted[index]]
    results = [np.zeros(len(rewards)) for rewards in arrays]
    if filled:
        for index, values in zip(filled, of_take([arrays[i] for i in filled]), strict=True):
            if signal[index]:
                results[index] = values
    return results
