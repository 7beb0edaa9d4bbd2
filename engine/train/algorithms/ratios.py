"""Ratios of probabilities that cannot overflow."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Of every log-ratio that is exponentiated, either way: exp(20) is 4.9e8. What lies beyond is a
server or a tokenizer that disagrees with the trainer, and its size carries no information."""


def ratio_of(policy_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """policy / old probability [N], finite and with a finite gradient for any finite logprobs.

    Beyond exp(+-MAX_LOG_RATIO) it is constant: the gradient is zero there, not NaN.
    """
    log_ratio = policy_logprobs - old_logprobs
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
