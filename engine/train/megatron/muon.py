"""Muon for the matrices of the layers, Adam for everything else.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": Nesterov's momentum,
made orthogonal by five Newton-Schulz steps; torch computes them in bfloat16. The step is 0.2 times
the root of the longer side (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982), so
that learning rate and weight decay are Adam's. Differs from both where Megatron keeps several
matrices as one: queries, keys and values, and gate and up, are made orthogonal together.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from torch import Tensor

from outloop.buffer.errors import SettingsError

_LAYERS = "decoder."


def check_muon(*, tensor: int, has_experts: bool, is_sharded: bool) -> None:
    """Refuse what splits matrices.

    Args:
        tensor: trainer.megatron.tensor_model_parallel_size.
        is_sharded: Megatron's distributed optimizer is asked for.

    Raises:
        SettingsError: a rank would have a part of a matrix, which cannot be made orthogonal alone.
    """
    for is_wrong, what, remedy in (
        (
            tensor > 1,
            f"trainer.megatron.tensor_model_parallel_size={tensor}",
            "1 is allowed; pipeline, context and data parallelism leave matrices whole",
        ),
        (has_experts, "a mixture of experts", "models without experts are allowed"),
        (
            is_sharded,
            "trainer.megatron.use_distributed_optimizer=true",
            "leave it out: each rank then holds the whole optimizer state",
        ),
    ):
        if is_wrong:
            raise SettingsError(
                f'trainer.optimizer="muon" with {what}: Muon needs matrices whole, each on one '
                f'rank; {remedy}, or trainer.optimizer = "adam"'
            )


def matrices(model: torch.nn.Module) -> list[Tensor]:
    """What Muon trains: the weights of the layers with two dimensions, no embedding, no head."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.startswith(_LAYERS) and parameter.dim() == 2
    ]


def build_muon(
    config: OptimizerConfig, wrapped: Any, model: torch.nn.Module, *, momentum: float
) -> ChainedOptimizer:
    """Muon for `matrices`, and Megatron's Adam of `config` for the rest, as one optimizer."""
    hidden = matrices(model)
    group = {
        "params": hidden,
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        # What Megatron's scheduler looks for.
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
    }
    muon = torch.optim.Muon(
        [group],
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    part: Any = (
        Float16OptimizerWithFloat16Params(muon, config, None, _init)
        if config.bf16
        else FP32Optimizer(muon, config, _init)
    )
    # Megatron gives Adam the parameters that have a gradient.
    for parameter in hidden:
        parameter.requires_grad = False
    rest = get_megatron_optimizer(config, [wrapped])
    for parameter in hidden:
        parameter.requires_grad = True
    return ChainedOptimizer([part, *getattr(rest, "chained_optimizers", [rest])])


def _init(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Room for the state, as Megatron asks for it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
