"""The overlong penalty, which is taken off a reward before group statistics.

A penalty is one number per episode, whatever its turns and branches. Records and train/reward_mean
keep the verifier's rewards.
"""

from __future__ import annotations

from outloop.buffer.records import Trajectory


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> float:
    """How much an episode pays for generating `num_tokens`: from 0 to `penalty`.

    Soft overlong punishment, DAPO, arXiv:2503.14476, equation 13: nothing up to max_tokens -
    buffer_tokens, linear from there, all of it from max_tokens on. Differs from the paper: the
    length is what was generated in the whole episode, over all turns and branches; the paper's
    height is penalty = 1, with rewards of -1 and 1.
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    if excess <= 0:
        return 0.0
    if excess >= buffer_tokens:
        return penalty
    return penalty * excess / buffer_tokens


def num_generated_tokens(trajectory: Trajectory) -> int:
    """Tokens that the policy generated in the episode, each once."""
    return sum(len(turn.output_ids) for turn in trajectory.turns)
