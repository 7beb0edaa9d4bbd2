"""The only module that touches Megatron-core's process groups, configuration and optimizer.

Owns: joining the process group, the model configuration read from a Hugging Face config.json, the
model, its gradient buffers and its optimizer. Does not own: layers, weights, losses. Invariant:
gradients are summed, never averaged, over microbatches and data-parallel ranks; the caller divides
by one denominator that it fixed before the first forward.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outloop.engine.train import cpu_backend

cpu_backend.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from outloop.buffer.errors import SettingsError  # noqa: E402
from outloop.buffer.settings_trainer import TrainerSettings  # noqa: E402
from outloop.engine.train.layers import PackedRow, block_spec  # noqa: E402

_ARCHITECTURES = {"Qwen3ForCausalLM": {"qk_layernorm": True}, "LlamaForCausalLM": {}}
_PARALLEL_FIELDS = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
    }
)
_OWNED_FIELDS = frozenset({"fp16", "bf16", "num_moe_experts", "multi_latent_attention"})
"""Fields that the trainer decides beside those that `read_config` fills in."""


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron's configuration and the two facts of the family that it has no field for."""

    rope_theta: float = 10000.0
    vocab_size: int = 0
    is_tied: bool = False


def join_process_group(*, seed: int) -> None:
    """Join torchrun's group, or make a group of one; idempotent; seeds the random trackers."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def leave_process_group() -> None:
    """Undo `join_process_group`."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def read_config(model_path: Path, overrides: dict[str, Any]) -> PolicyConfig:
    """The Megatron configuration of a Hugging Face folder, with raw upstream overrides.

    Raises:
        SettingsError: unknown architecture, a family feature that is not supported, an unknown
            override (the nearest field is named) or one that the model folder decides.
    """
    hf = json.loads((model_path / "config.json").read_text())
    architecture = (hf.get("architectures") or ["none"])[0]
    if architecture not in _ARCHITECTURES:
        raise SettingsError(
            f"model.path={str(model_path)!r} has architecture={architecture!r}; allowed: "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    if hf.get("rope_scaling"):
        raise SettingsError(
            f"model.path={str(model_path)!r} has rope_scaling={hf['rope_scaling']!r}; "
            "only plain rotary embeddings are supported"
        )
    heads = hf["num_attention_heads"]
    fields: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads", heads),
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "ffn_hidden_size": hf["intermediate_size"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "rope_theta": float(hf.get("rope_theta", 10000.0)),
        "vocab_size": hf["vocab_size"],
        "is_tied": bool(hf.get("tie_word_embeddings", False)),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": bool(hf.get("attention_bias", False)),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        "calculate_per_token_loss": True,
    }
    fields |= _ARCHITECTURES[architecture]
    _check_overrides(overrides, _OWNED_FIELDS | set(fields) | {"qk_layernorm"})
    try:
        return PolicyConfig(**(fields | overrides))
    except (AssertionError, TypeError, ValueError) as error:
        raise SettingsError(
            f"megatron-core refuses model.path={str(model_path)!r} with "
            f"trainer.megatron={overrides!r}: {error}"
        ) from error


def _check_overrides(overrides: dict[str, Any], owned: frozenset[str]) -> None:
    known = {item.name for item in dataclasses.fields(TransformerConfig)}
    for name, value in overrides.items():
        if name in _PARALLEL_FIELDS:
            raise SettingsError(
                f"trainer.megatron.{name}={value!r}: this release trains on one rank; remove it"
            )
        if name in owned:
            raise SettingsError(
                f"trainer.megatron.{name}={value!r}: the model folder or the trainer decides this "
                "field; remove it"
            )
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingsError(
                f"trainer.megatron.{name} is not a field of megatron-core "
                f"{cpu_backend.SUPPORTED_VERSION} TransformerConfig{hint}"
            )


class PolicyModel(GPTModel):
    """A GPTModel over packed rows whose logits are computed only where they are asked for."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config),
            vocab_size=config.vocab_size,
            max_sequence_length=1,
            parallel_output=True,
            share_embeddings_and_output_weights=config.is_tied,
            position_embedding_type="none",
        )

    def forward(self, token_ids_T: Tensor, row: PackedRow, positions_N: Tensor) -> Tensor:
        """Last hidden states [N, H] at `positions_N` of a packed row of T tokens."""
        hidden_T1H = self.embedding(input_ids=token_ids_T[None, :], position_ids=None)
        hidden_T1H = self.decoder(
            hidden_states=hidden_T1H, attention_mask=None, packed_seq_params=row
        )
        return hidden_T1H[positions_N, 0]

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] of the token that follows each hidden state."""
        weight = self.shared_embedding_or_output_weight() if self.config.is_tied else None
        logits_N1V, _ = self.output_layer(hidden_NH[:, None], weight=weight)
        return logits_N1V[:, 0, :]


@dataclass(kw_only=True)
class Policy:
    """A model with what its optimizer step needs; see `build_policy`."""

    config: PolicyConfig
    model: PolicyModel
    wrapped: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler

    def zero_grad(self) -> None:
        """Forget the gradients of the previous update."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> tuple[float, float]:
        """Sum gradients over ranks, clip, update; returns (gradient norm, learning rate used).

        Raises:
            FloatingPointError: the gradient norm is not finite; weights are unchanged.
        """
        finalize_model_grads(
            [self.wrapped], pg_collection=ProcessGroupCollection.use_mpu_process_groups()
        )
        # The optimizer sees the gradient buffers only after this; without it the norm would be 0.
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if norm != norm or norm in (float("inf"), float("-inf")):
            raise FloatingPointError(
                f"grad_norm={norm}; the update was not made. Look at the batch's rewards, logprobs "
                "and learning rate."
            )
        # Before the update, so that the first one of a warm-up has a rate above zero.
        self.scheduler.step(increment=1)
        self.optimizer.step()
        return norm, float(self.optimizer.param_groups[0]["lr"])


def build_policy(config: PolicyConfig, settings: TrainerSettings, *, num_updates: int) -> Policy:
    """Model, gradient buffers, Adam and learning-rate schedule for `num_updates` updates."""
    model = PolicyModel(config)
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
        ),
        module=model,
    )
    wrapped.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=settings.learning_rate * settings.min_lr_ratio,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            clip_grad=settings.max_grad_norm,
            params_dtype=torch.float32,
        ),
        [wrapped],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=settings.learning_rate * settings.min_lr_ratio,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(num_updates, settings.warmup_steps + 1),
        lr_decay_style=settings.lr_decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return Policy(
        config=config, model=model, wrapped=wrapped, optimizer=optimizer, scheduler=scheduler
    )
