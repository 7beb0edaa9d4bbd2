"""A mixture of experts in plain torch: where tokens are sent, and what comes back.

Tokens do not see each other. transformers' arithmetic for Qwen3-MoE and GLM-4.5: router logits and
scores in float32.

Shape letters: N tokens, D hidden size, X experts, k experts of a token, G groups of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outloop.engine.models.mixture import Mixture
from outloop.engine.serve.torch_server.weights import FeedForward, MixtureWeights

_GROUP_BEST = 2


def route(mixture: Mixture, weights: MixtureWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Where tokens [N, D] go: experts [N, k] int64, and the share of each [N, k] float32."""
    logits = functional.linear(hidden.float(), weights.router.float())
    if mixture.score == "softmax":
        scores = logits.softmax(dim=-1)
        shares, experts = scores.topk(mixture.top_k, dim=-1)
        return experts, shares / shares.sum(dim=-1, keepdim=True) if (
            mixture.is_renormalised
        ) else shares
    scores = logits.sigmoid()
    chosen_by = scores if weights.bias is None else scores + weights.bias
    if mixture.num_groups > 1:
        chosen_by = _in_best_groups(mixture, chosen_by)
    experts = chosen_by.topk(mixture.top_k, dim=-1).indices
    shares = scores.gather(1, experts)
    return experts, mixture.scale * shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)


def _in_best_groups(mixture: Mixture, scores: Tensor) -> Tensor:
    """Scores [N, X], 0 outside of each token's best groups."""
    by_group = scores.view(len(scores), mixture.num_groups, -1)
    of_groups = by_group.topk(_GROUP_BEST, dim=-1).values.sum(dim=-1)
    best = of_groups.topk(mixture.num_chosen_groups, dim=-1).indices
    is_best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~is_best[:, :, None], 0.0).view_as(scores)


def feed_forward(weights: FeedForward, hidden: Tensor) -> Tensor:
    """[N, D] of tokens [N, D], without biases."""
    gate, up = functional.linear(hidden, weights.gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate).mul_(up), weights.down)


def mix(mixture: Mixture, weights: MixtureWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What experts, and the shared ones, make of tokens [N, D]; and where they went [N, k]."""
    experts, shares = route(mixture, weights, hidden)
    mixed = torch.zeros_like(hidden)
    for index in experts.unique().tolist():
        tokens, place = (experts == index).nonzero(as_tuple=True)
        made = feed_forward(weights.experts[index], hidden.index_select(0, tokens))
        share = shares[tokens, place].to(hidden.dtype)
        mixed.index_add_(0, tokens, made * share[:, None])
    if weights.shared is not None:
        mixed += feed_forward(weights.shared, hidden)
    return mixed, experts
