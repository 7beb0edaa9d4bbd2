"""The one number by which an update's summed loss is divided, and the weights of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Denominator = Literal["tokens", "episodes", "episode_means", "budget", "constant"]


def denominator(
    kind: Denominator,
    *,
    num_trained_tokens: Sequence[int],
    episode_ids: Sequence[str],
    constant: float | None = None,
    token_budget: int | None = None,
) -> float:
    """The divisor of an update, the same on all ranks; at least 1 where it counts.

    tokens: trained tokens of the update (DAPO, arXiv:2503.14476, equation 12).
    episodes: episodes with a sample in the update, however many branches each has.
    episode_means: the same; each episode's sum becomes the mean over its trained tokens
    (`token_weights`), as in GRPO, arXiv:2402.03300, equation 3. It favours brevity among correct
    answers and length among incorrect ones (Dr.GRPO, arXiv:2503.20783, section 3.1).
    budget: episodes times `token_budget`, the tokens that one may generate (Dr.GRPO, section 3.2).
    constant: `constant`, whatever is in the update.

    Args:
        num_trained_tokens: of each sample of the update.
        episode_ids: of each sample.
    """
    if kind == "tokens":
        return float(max(1, sum(num_trained_tokens)))
    if kind == "constant":
        assert constant is not None
        return constant
    num_episodes = float(max(1, len(set(episode_ids))))
    if kind == "budget":
        assert token_budget is not None
        return num_episodes * token_budget
    return num_episodes


def token_weights(
    kind: Denominator, *, num_trained_tokens: Sequence[int], episode_ids: Sequence[str]
) -> npt.NDArray[np.float32] | None:
    """By sample the factor of its tokens' losses: 1 / its episode's trained tokens for
    "episode_means"; None: all 1."""
    if kind != "episode_means":
        return None
    counts: dict[str, int] = {}
    for episode_id, count in zip(episode_ids, num_trained_tokens, strict=True):
        counts[episode_id] = counts.get(episode_id, 0) + count
    return np.array([1.0 / max(1, counts[name]) for name in episode_ids], np.float32)
