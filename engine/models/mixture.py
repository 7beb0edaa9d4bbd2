"""Which layers of a model are mixtures of experts, and how their routers choose.

Trainer and server route by the same rules, because both take them from here. What a config.json
asks for and neither has is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outloop.buffer.errors import SettingsError

_GROUP_BEST = 2
"""Experts of a group whose scores make the group's (DeepSeek-V3, arXiv:2412.19437, section 2.1.2:
transformers and SGLang take two)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The mixtures of experts of one model; all its routers are alike.

    softmax: the `top_k` largest logits; their softmax, or with `is_renormalised` off the softmax
    over all experts. sigmoid: the `top_k` largest sigmoid + correction bias, out of the
    `num_chosen_groups` best groups; sigmoids without the bias, divided by their sum, times `scale`.
    """

    num_experts: int
    top_k: int
    expert_size: int
    """Intermediate size of one expert."""
    shared_size: int
    """Intermediate size of all shared experts together; 0: none."""
    layers: tuple[int, ...]
    """Which layers have experts; the others are dense."""
    score: Literal["softmax", "sigmoid"]
    is_renormalised: bool
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0

    @property
    def has_bias(self) -> bool:
        """True if routers have a correction bias, which no gradient reaches."""
        return self.score == "sigmoid"


def mixture_of(raw: Mapping[str, Any], source: str) -> Mixture | None:
    """The mixtures of a config.json; None for a dense model.

    Args:
        source: what to call the config.json in an error.

    Raises:
        SettingsError: routers or layers of a kind that there is no code for.
    """
    if raw.get("n_routed_experts"):
        return _glm(raw, source)
    if raw.get("num_experts"):
        return _qwen(raw)
    return None


def _qwen(raw: Mapping[str, Any]) -> Mixture | None:
    """Qwen3-MoE's fields."""
    step, dense = int(raw.get("decoder_sparse_step") or 1), raw.get("mlp_only_layers") or ()
    layers = tuple(
        layer
        for layer in range(raw["num_hidden_layers"])
        if layer not in dense and (layer + 1) % step == 0
    )
    if not layers:
        return None
    return Mixture(
        num_experts=raw["num_experts"],
        top_k=raw["num_experts_per_tok"],
        expert_size=raw["moe_intermediate_size"],
        shared_size=0,
        layers=layers,
        score="softmax",
        is_renormalised=bool(raw.get("norm_topk_prob", False)),
    )


def _glm(raw: Mapping[str, Any], source: str) -> Mixture:
    """GLM-4.5's and GLM-4.6's fields, which are DeepSeek-V3's."""
    groups = int(raw.get("n_group") or 1)
    chosen = int(raw.get("topk_group") or 1)
    num, top_k = raw["n_routed_experts"], raw["num_experts_per_tok"]
    if groups == chosen:
        groups = chosen = 1
    elif num % groups or chosen > groups or top_k // chosen != _GROUP_BEST:
        raise SettingsError(
            f"{source} has n_group={groups}, topk_group={chosen}, num_experts_per_tok={top_k}, "
            f"n_routed_experts={num}; groups that divide the experts, and {_GROUP_BEST} experts "
            "for each chosen group are allowed"
        )
    if not raw.get("norm_topk_prob", True):
        raise SettingsError(f"{source} has norm_topk_prob=false; only true is allowed here")
    return Mixture(
        num_experts=num,
        top_k=top_k,
        expert_size=raw["moe_intermediate_size"],
        shared_size=raw["moe_intermediate_size"] * int(raw.get("n_shared_experts") or 0),
        layers=tuple(range(int(raw.get("first_k_dense_replace") or 0), raw["num_hidden_layers"])),
        score="sigmoid",
        is_renormalised=True,
        num_groups=groups,
        num_chosen_groups=chosen,
        scale=float(raw.get("routed_scaling_factor") or 1.0),
    )
