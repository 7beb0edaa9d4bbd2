"""The Megatron configuration of a Hugging Face folder.

It needs no process group. A feature that the trainer does not have is refused here, never ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from outloop.engine.train.megatron import cpu_backend

cpu_backend.install()

import torch  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from torch.nn import functional  # noqa: E402

from outloop.buffer.errors import SettingsError  # noqa: E402
from outloop.buffer.routed_experts import RoutingShape, routing_shape  # noqa: E402
from outloop.buffer.settings import Settings  # noqa: E402
from outloop.engine.models.mixture import Mixture, mixture_of  # noqa: E402
from outloop.engine.models.rotary import rotary_parameters  # noqa: E402
from outloop.engine.models.safetensors_folder import HuggingFaceFolder  # noqa: E402
from outloop.engine.models.weight_map import check_tensors  # noqa: E402
from outloop.engine.train.megatron import parallel_config  # noqa: E402
from outloop.engine.train.megatron.layer_kind import LayerKind  # noqa: E402
from outloop.engine.train.megatron.parallel_config import ParallelSizes  # noqa: E402
from outloop.engine.train.megatron.release import installed_release  # noqa: E402

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"add_qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_layernorm": True},
    "Qwen3MoeForCausalLM": {"qk_layernorm": True},
    "Glm4MoeForCausalLM": {},
}
"""Architecture -> what its config.json leaves unsaid. SmolLM2 is a Llama; GLM-4.6 a GLM-4.5."""
_HAS_QKV_BIAS = frozenset({"Glm4MoeForCausalLM"})
"""Architectures whose attention_bias is one of queries, keys and values alone."""
_REFUSED_FEATURES = {
    "use_sliding_window": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
}
"""config.json field -> values that the trainer has layers for."""
_FIXED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
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
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
}
"""What follows from how this trainer computes: packed rows of any length, gradients summed."""
_OWNED = frozenset({"fp16", "bf16", "multi_latent_attention", "moe_enable_routing_replay"})
_OWNED_DDP = frozenset(
    {
        "average_in_collective",
        "grad_reduce_in_fp32",
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "num_distributed_optimizer_instances",
    }
)
_OWNED_OPTIMIZER = frozenset(
    {
        "optimizer",
        "lr",
        "min_lr",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "clip_grad",
        "params_dtype",
        "fp16",
        "bf16",
        # Checkpoints hold float32 weights and moments of every optimizer alike.
        "use_precision_aware_optimizer",
    }
)
_SPLIT_FIELDS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron's configuration and the facts of the family and the run that it has no field for."""

    rope: dict[str, Any] = field(default_factory=dict)
    """See `outloop.engine.models.rotary.rotary_parameters`."""
    vocab_size: int = 0
    is_tied: bool = False
    num_further_layers: int = 0
    """Layers of the folder that predict further tokens; they are neither trained nor exported."""
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    layers: LayerKind = "local"
    routing: RoutingShape | None = None
    """Of the model's routers; None: it has no experts."""
    described: dict[str, Any] = field(default_factory=dict)
    """Everything that the model folder and its family decide, as JSON has it."""
    ddp_options: dict[str, Any] = field(default_factory=dict)
    """Raw options that are fields of Megatron's DistributedDataParallelConfig."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Raw options that are fields of Megatron's OptimizerConfig."""


def read_config(
    model_path: Path,
    raw: Mapping[str, Any],
    *,
    num_ranks: int = 1,
    has_tensors: bool = True,
    layers: LayerKind = "local",
    dtype: Literal["float32", "bfloat16"] = "float32",
    setting: str = "model.path",
) -> PolicyConfig:
    """The configuration of a Hugging Face folder, with raw upstream options.

    Args:
        setting: the folder's, for errors.
        dtype: of weights and activations; the optimizer's are float32.
        has_tensors: false for a folder of which only config.json is wanted.

    Raises:
        SettingsError: unknown architecture, a family feature that is not supported, tensors that
            are not those of config.json, an unknown option (the nearest field is named), one that
            the trainer or the model folder decides, or impossible parallel sizes.
    """
    named = f"{setting}={str(model_path)!r}"
    hf = _read_json(model_path, named)
    fields = _model_fields(hf, str(model_path / "config.json"), named)
    options, ddp, optimizer = _sort_options(raw, owned=_OWNED | set(fields))
    sizes = parallel_config.read_sizes(raw, num_ranks=num_ranks, layers=layers)
    has_own_split = any(name in raw for name in _SPLIT_FIELDS)
    parallel_config.check_model(sizes, fields, has_own_split=has_own_split)
    _check_overlap(ddp, sizes)
    if sizes.pipeline == 1:
        fields["variable_seq_lengths"] = False
    if sizes.expert_tensor != sizes.tensor or "expert_tensor_parallel_size" in options:
        options["expert_tensor_parallel_size"] = sizes.expert_tensor
    try:
        config = PolicyConfig(
            **(
                fields
                | _expert_defaults(layers, options, has_experts=bool(fields["num_moe_experts"]))
                | _on_device()
                | _precision(dtype, has_experts=bool(fields["num_moe_experts"]))
                | options
            ),
            sizes=sizes,
            layers=layers,
            routing=routing_shape(hf),
            described=_described(fields),
            ddp_options=ddp,
            optimizer_options=optimizer,
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise SettingsError(
            f"megatron-core refuses {named} with trainer.megatron={dict(raw)!r}: {error}"
        ) from error
    if has_tensors:
        with HuggingFaceFolder(model_path) as folder:
            check_tensors(folder.shapes, config, named)
    return config


def read_config_beside(
    policy: PolicyConfig,
    folder: Path,
    settings: Settings,
    setting: str,
    *,
    has_its_tokens: bool = False,
) -> PolicyConfig:
    """The configuration of another model of the run, split over the ranks as the policy is.

    Args:
        setting: the folder's, for errors.
        has_its_tokens: its vocabulary is the policy's, but may be padded to another size.

    Raises:
        SettingsError: its vocabulary is another one than the policy's, or as `read_config`.
    """
    trainer = settings.trainer
    config = read_config(
        folder,
        trainer.megatron,
        num_ranks=trainer.num_ranks,
        layers=policy.layers,
        dtype=trainer.dtype,
        setting=setting,
    )
    if config.vocab_size != policy.vocab_size and not has_its_tokens:
        raise SettingsError(
            f"{setting}={str(folder)!r} has vocab_size={config.vocab_size}, model.path="
            f"{str(settings.model.path)!r} has {policy.vocab_size}: it would read other tokens. "
            "Give a model with the policy's tokenizer, or leave it out"
        )
    return config


def _on_device() -> dict[str, Any]:
    """Weights are made where they are trained: 8 billion on a host take over a minute."""
    return {"use_cpu_initialization": not torch.cuda.is_available()}


def _expert_defaults(
    layers: LayerKind, options: Mapping[str, Any], *, has_experts: bool
) -> dict[str, Any]:
    """What a model with experts has unless the raw table asks for something else: a router that
    rewards alone train, and one kernel for all experts of a rank where there is one."""
    has_kernel = layers == "transformer_engine"
    if options.get("moe_grouped_gemm") and not has_kernel:
        raise SettingsError(
            f'{parallel_config.TABLE}.moe_grouped_gemm=true with trainer.layers="{layers}": '
            "Megatron-core's grouped kernels are Transformer Engine's; remove it, or set "
            'trainer.layers = "transformer_engine"'
        )
    if not has_experts:
        return {}
    return {"moe_router_bias_update_rate": 0.0, "moe_grouped_gemm": has_kernel}


def _precision(dtype: Literal["float32", "bfloat16"], *, has_experts: bool) -> dict[str, Any]:
    if dtype == "float32":
        return {}
    fields: dict[str, Any] = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    if has_experts:
        # A rounded logit would send a token to another expert than the next process does.
        fields["moe_router_dtype"] = "fp32"
    return fields


def _read_json(model_path: Path, named: str) -> dict[str, Any]:
    path = model_path / "config.json"
    if not path.is_file():
        raise SettingsError(f"{named} holds no config.json; give a Hugging Face folder")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _model_fields(hf: dict[str, Any], path: str, named: str) -> dict[str, Any]:
    """From config.json, which lies at `path`."""
    architecture = (hf.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        raise SettingsError(
            f"{named} has architecture={architecture!r}; allowed: {', '.join(sorted(FAMILIES))}"
        )
    for name, allowed in _REFUSED_FEATURES.items():
        if name == "attention_bias" and architecture in _HAS_QKV_BIAS:
            continue
        if hf.get(name) not in allowed:
            raise SettingsError(
                f"{named} has {name}={hf[name]!r} in config.json; this trainer has layers for "
                f"{name}={allowed[0]!r} only"
            )
    heads = hf["num_attention_heads"]
    fields = _FIXED | {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "ffn_hidden_size": hf["intermediate_size"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "vocab_size": hf["vocab_size"],
        "is_tied": bool(hf.get("tie_word_embeddings", False)),
        "rope": rotary_parameters(hf, path),
        "num_moe_experts": None,
    }
    if hf.get("num_nextn_predict_layers"):
        fields["num_further_layers"] = hf["num_nextn_predict_layers"]
    if architecture in _HAS_QKV_BIAS:
        fields["add_qkv_bias"] = bool(hf.get("attention_bias", False))
    if "use_qk_norm" in hf:
        fields["qk_layernorm"] = bool(hf["use_qk_norm"])
    mixture = mixture_of(hf, path)
    if mixture is not None:
        fields |= _mixture_fields(mixture, fields["num_layers"])
    return fields | FAMILIES[architecture]


def _mixture_fields(mixture: Mixture, num_layers: int) -> dict[str, Any]:
    has_experts = set(mixture.layers)
    fields: dict[str, Any] = {
        "num_moe_experts": mixture.num_experts,
        "moe_ffn_hidden_size": mixture.expert_size,
        "moe_router_topk": mixture.top_k,
        # Without renormalisation the weights are the softmax over all experts.
        "moe_router_pre_softmax": not mixture.is_renormalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    if len(has_experts) < num_layers:
        fields["moe_layer_freq"] = [int(layer in has_experts) for layer in range(num_layers)]
    if mixture.shared_size:
        fields["moe_shared_expert_intermediate_size"] = mixture.shared_size
    if mixture.score == "sigmoid":
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": mixture.scale,
        }
    if mixture.num_groups > 1:
        fields |= {
            "moe_router_num_groups": mixture.num_groups,
            "moe_router_group_topk": mixture.num_chosen_groups,
        }
    return fields


def _described(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that differ between model folders; a new one is among them without being named."""
    by_family = set().union(*FAMILIES.values())
    return {name: fields[name] for name in fields if name not in _FIXED or name in by_family}


def _names(config: type) -> set[str]:
    return {item.name for item in dataclasses.fields(config)}


def _sort_options(
    raw: Mapping[str, Any], *, owned: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Options of the model, the gradient buffers and the optimizer; a name may be of two."""
    model: dict[str, Any] = {}
    ddp: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    places = (
        (TransformerConfig, model, owned),
        (DistributedDataParallelConfig, ddp, _OWNED_DDP),
        (OptimizerConfig, optimizer, _OWNED_OPTIMIZER),
    )
    known = set().union(*(_names(kind) for kind, _, _ in places))
    for name, value in raw.items():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingsError(
                f"trainer.megatron.{name} is not a field of megatron-core "
                f"{installed_release()}'s TransformerConfig, "
                f"DistributedDataParallelConfig or OptimizerConfig{hint}"
            )
        for kind, chosen, taken in places:
            if name not in _names(kind):
                continue
            if name in taken:
                raise SettingsError(
                    f"trainer.megatron.{name}={value!r}: the model folder or the trainer decides "
                    "this field; remove it"
                )
            chosen[name] = value
    return model, ddp, optimizer


def _check_overlap(ddp: Mapping[str, Any], sizes: ParallelSizes) -> None:
    if ddp.get("overlap_param_gather") or ddp.get("align_param_gather"):
        raise SettingsError(
            "trainer.megatron.overlap_param_gather=true: every step ends with a publish, which "
            "needs all weights at once, so there is nothing to overlap with; remove it"
        )
    if ddp.get("overlap_grad_reduce") and sizes.pipeline > 1:
        raise SettingsError(
            "trainer.megatron.overlap_grad_reduce=true with pipeline_model_parallel_size="
            f"{sizes.pipeline}: not tried with this trainer's loss; remove one of them"
        )
