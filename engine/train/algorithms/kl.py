"""KL to the frozen reference: k1 in the reward, k2 and k3 in the loss.

Estimators of Schulman, "Approximating KL divergence" (2020), joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from outloop.buffer.records import Float32
from outloop.engine.train.algorithms.ratios import MAX_LOG_RATIO, ratio_of


def kl_loss(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    behavior_logprobs: Tensor,
    *,
    kind: Literal["k2", "k3"],
    ratio_cap: float,
) -> Tensor:
    """Per-token loss [N] whose expected gradient under the behavior policy is that of KL(policy,
    reference), while no ratio exceeds `ratio_cap`.

    With d = policy - reference logprob and ratio = policy / behavior: k2 is stop_gradient(ratio) *
    d^2 / 2 (the term of REINFORCE++ with baseline, arXiv:2501.03262), k3 is ratio * (exp(-d) + d -
    1) with the gradient through the ratio, as in DeepSeek-V3.2, arXiv:2512.02556, section 3.1
    (without it, as in GRPO, arXiv:2402.03300, equation 4, k3's gradient is not that of the KL; in
    value and on policy both are equal). Differs: the ratio is cut to `ratio_cap` and every exponent
    to +-20. Of the two only k3 is the KL in value too.
    """
    distance = policy_logprobs - reference_logprobs
    ratio = ratio_of(policy_logprobs, behavior_logprobs).clamp(max=ratio_cap)
    if kind == "k2":
        return ratio.detach() * distance.square() / 2
    towards = torch.exp((-distance).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratio * (towards + distance - 1.0)


def k1(behavior_logprobs: Float32, reference_logprobs: Float32) -> np.ndarray:
    """behavior - reference logprob of each token, float64: what k1 takes off a reward.

    REINFORCE++, arXiv:2501.03262 (v9), section 3.1; equation 4 takes it off the reward.
    Differs from the paper: one sum for the episode instead of the sum to go at each token: the same
    expected gradient, with more variance.
    """
    return behavior_logprobs.astype(np.float64) - reference_logprobs


def adapted_coefficient(coefficient: float, measured: float, *, target: float) -> float:
    """coefficient * (1 + 0.1 clip(measured / target - 1, -0.2, 0.2)): the controller of Ziegler et
    al., arXiv:1909.08593, section 2.2, with its K of 0.1.

    Differs from the paper in the unit alone: measured and target are means over trained tokens,
    where the paper's are sums over an answer.
    """
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + 0.1 * error)
