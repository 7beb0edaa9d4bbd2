"""Off-policy correction: weights for the step from behavior to proximal logprobs.

Importance weights of tokens and sequences, truncated or masked. They are constants of the take,
fixed before its first update. A masked token adds nothing to the loss and stays in the denominator
(6.1 rule 7). A sequence is a sample: the trained tokens of one branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from outloop.buffer.telemetry import GAP_AGES
from outloop.engine.train.algorithms.ratios import MAX_LOG_RATIO

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Kind = Literal[
    "none",
    "token_tis",
    "sequence_tis",
    "geometric_tis",
    "token_mis",
    "sequence_mis",
    "geometric_mis",
]


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
    is_low: Bool
    """[N]: masked for a ratio below the floor; of a vetoed sequence none is."""
    is_high: Bool
    """[N]: masked for a ratio above the cap."""
    ages: Int64
    """[N]: versions between the weights that sampled a token and those before the update."""


def correct(
    proximal_logprobs: Float64,
    behavior_logprobs: Float64,
    *,
    kind: Kind,
    cap: float,
    floor: float,
    veto: float,
    ages: Int64 | None = None,
) -> Correction:
    """Weights w of one sequence, from r_t = exp(proximal - behavior) at its N trained tokens.

    token_*: r = r_t, each token's own. sequence_*: r = prod_t r_t, one number for the sequence;
    unbiased, and the longer the sequence the further from 1. geometric_*: r = (prod_t r_t)^(1/N),
    which does not depend on length; Zheng et al., GSPO, arXiv:2507.18071, equation 7, used as a
    weight by AReaL and as a mask by Liu et al. 2025.

    *_tis: w = min(r, cap); Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training". token_tis with cap = inf is the behavior weight of decoupled PPO:
    Hilton, Cobbe, Schulman, "Batch size-invariance for policy optimization", arXiv:2110.00641;
    AReaL, arXiv:2505.24298, section 5.2, equations 4 and 5.
    *_mis: w = r where floor <= r <= cap and 0 elsewhere; Liu et al. 2025, "When speed kills
    stability". token_mis with a floor is also IcePop, arXiv:2510.18855.
    veto: if any r_t < veto, every weight of the sequence is 0, whatever the kind.
    none: all weights 1, ratios reported by token.

    Every log-ratio is cut to +-20 before it is exponentiated.

    Args:
        proximal_logprobs: [N] at trained tokens.
        behavior_logprobs: [N].
        ages: [N] in versions; None: all 0.
    """
    log_ratios = np.clip(proximal_logprobs - behavior_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    count = len(log_ratios)
    by_token = np.exp(log_ratios)
    if kind.startswith("sequence"):
        ratios = np.exp(np.clip(log_ratios.sum(keepdims=True), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    elif kind.startswith("geometric"):
        ratios = np.exp(log_ratios.sum(keepdims=True) / max(1, count))
    else:
        ratios = by_token
    per_token = np.broadcast_to(ratios, (count,))
    is_vetoed = bool(veto > 0 and (by_token < veto).any())
    if kind == "none":
        weights = np.ones(count)
    elif kind.endswith("tis"):
        weights = np.minimum(per_token, cap)
    else:
        weights = np.where((per_token >= floor) & (per_token <= cap), per_token, 0.0)
    is_masked = kind.endswith("mis") and not is_vetoed
    num_truncated = int((per_token > cap).sum()) if kind.endswith("tis") else 0
    if is_vetoed:
        weights, num_truncated = np.zeros(count), 0
    return Correction(
        weights=weights,
        ratios=ratios,
        num_truncated=num_truncated,
        is_vetoed=is_vetoed,
        is_low=is_masked & (per_token < floor),
        is_high=is_masked & (per_token > cap),
        ages=np.zeros(count, np.int64) if ages is None else ages,
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
        "train/correction_effective_share": effective_share(weights),
    } | _reasons(corrections)


def effective_share(weights: Float64) -> float:
    """Effective sample size over the number of samples, (sum w)^2 / (n sum w^2): Kish 1965; 1 where
    all weights are equal, 0 where all are 0. Of tokens, taken as independent."""
    total = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / (len(weights) * total) if total > 0 else 0.0


def _reasons(corrections: Sequence[Correction]) -> dict[str, float]:
    """Shares of tokens that were masked, by why, together and by their age."""
    ages = np.concatenate([one.ages for one in corrections])
    shares = {
        "low": np.concatenate([one.is_low for one in corrections]),
        "high": np.concatenate([one.is_high for one in corrections]),
        "veto": np.concatenate([np.full(len(one.ages), one.is_vetoed) for one in corrections]),
    }
    found: dict[str, float] = {}
    for why, is_masked in shares.items():
        found[f"train/masked_{why}_share"] = float(is_masked.mean())
        for name, first, last, _ in GAP_AGES:
            where = (ages >= first) & (ages <= last)
            if where.any():
                found[f"train/masked_{why}_share_{name}"] = float(is_masked[where].mean())
    return found
