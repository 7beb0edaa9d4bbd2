"""Off-policy correction: weights for the step from behavior to proximal logprobs.

Owns: importance weights of tokens and sequences, truncated or masked, and their statistics. Does
not own: the ratio policy / proximal, which the loss clips. Invariant: weights are constants of the
take, fixed before its first update; a masked token stays in the denominator (6.1 rule 7). A
sequence is a sample: the trained tokens of one branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Kind = Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"]
_MAX_LOG_RATIO = 80.0
"""Keeps the ratio of a long sequence finite; every cap is far below exp of it."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights of one sequence's trained tokens and what happened to them."""

    weights: Float64
    """[N]; 0: masked."""
    ratios: Float64
    """[N] by token, [1] by sequence."""
    num_truncated: int
    """Tokens whose weight was cut to the cap."""
    is_vetoed: bool


def correct(
    proximal_logprobs: Float64,
    behavior_logprobs: Float64,
    *,
    kind: Kind,
    cap: float,
    floor: float,
    veto: float,
) -> Correction:
    """Weights w of one sequence, from r_t = exp(proximal - behavior) at its trained tokens.

    token_tis: w_t = min(r_t, cap); Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training". With cap = inf it is the behavior weight of decoupled PPO, AReaL,
    arXiv:2505.24298, section 5.2.
    sequence_tis: w_t = min(prod_t r_t, cap), the same number for every token.
    token_mis, sequence_mis: w = r where floor <= r <= cap and 0 elsewhere; Liu et al. 2025, "When
    speed kills stability" (token_mis with a floor is also IcePop).
    veto: if any r_t < veto, every weight of the sequence is 0, whatever the kind.
    none: all weights 1, ratios reported by token.

    Args:
        proximal_logprobs: [N] at trained tokens.
        behavior_logprobs: [N].
    """
    log_ratios = np.clip(proximal_logprobs - behavior_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    count = len(log_ratios)
    by_sequence = kind.startswith("sequence")
    if by_sequence:
        total = np.clip(log_ratios.sum(), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        ratios = np.exp(np.array([total]))
    else:
        ratios = np.exp(log_ratios)
    per_token = np.full(count, ratios[0]) if by_sequence else ratios
    is_vetoed = bool(veto > 0 and (np.exp(log_ratios) < veto).any())
    if kind == "none":
        weights = np.ones(count)
    elif kind.endswith("tis"):
        weights = np.minimum(per_token, cap)
    else:
        weights = np.where((per_token >= floor) & (per_token <= cap), per_token, 0.0)
    num_truncated = int((per_token > cap).sum()) if kind.endswith("tis") else 0
    if is_vetoed:
        weights, num_truncated = np.zeros(count), 0
    return Correction(
        weights=weights, ratios=ratios, num_truncated=num_truncated, is_vetoed=is_vetoed
    )


def correction_metrics(corrections: Sequence[Correction]) -> dict[str, float]:
    """Ratios and shares over the sequences of a take; empty without any."""
    if not corrections:
        return {}
    ratios = np.concatenate([correction.ratios for correction in corrections])
    weights = np.concatenate([correction.weights for correction in corrections])
    low, high = np.quantile(ratios, [0.01, 0.99])
    return {
        "train/correction_ratio_mean": float(ratios.mean()),
        "train/correction_ratio_p01": float(low),
        "train/correction_ratio_p99": float(high),
        "train/correction_ratio_max": float(ratios.max()),
        "train/correction_truncated_share": sum(c.num_truncated for c in corrections)
        / len(weights),
        "train/correction_masked_share": float((weights == 0).mean()),
        "train/correction_vetoed_share": float(np.mean([c.is_vetoed for c in corrections])),
    }
