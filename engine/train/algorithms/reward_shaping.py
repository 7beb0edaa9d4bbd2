"""What is taken off a reward before group statistics.

Owns: the overlong penalty and the reward's KL penalty. Does not own: rewards themselves, which
stay as the verifier gave them in every record and in train/reward_mean, and advantages. Invariant:
a penalty is one number per episode, whatever its turns and branches.
"""

from __future__ import annotations

from collections.abc import Sequence

from outloop.buffer.records import Trajectory
from outloop.engine.train.algorithms.kl import k1
from outloop.engine.train.data.samples import Sample


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> float:
    """How much an episode pays for drawing `num_tokens`: from 0 to `penalty`.

    Soft overlong punishment, DAPO, arXiv:2503.14476, equation 13: nothing up to max_tokens -
    buffer_tokens, linear from there, all of it from max_tokens on. Differs from the paper: the
    length is what the policy drew in the whole episode, over all turns and branches; the paper's
    height is penalty = 1, with rewards of -1 and 1.
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    if excess <= 0:
        return 0.0
    if excess >= buffer_tokens:
        return penalty
    return penalty * excess / buffer_tokens


def num_drawn_tokens(trajectory: Trajectory) -> int:
    """Tokens that the policy drew in the episode, each once."""
    return sum(len(turn.output_ids) for turn in trajectory.turns)


def kl_penalty(samples: Sequence[Sample]) -> float:
    """Sum over an episode's trained tokens of behavior - reference logprob: see `kl.k1`.

    Args:
        samples: of one episode, with reference_logprobs; each trained token is in one of them.
    """
    total = 0.0
    for sample in samples:
        assert sample.behavior_logprobs is not None
        assert sample.reference_logprobs is not None
        gap = k1(sample.behavior_logprobs, sample.reference_logprobs)
        total += float(gap[sample.loss_mask].sum())
    return total
