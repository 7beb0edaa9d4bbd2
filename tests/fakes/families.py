"""Tiny random Hugging Face models, one of every family that the trainer supports."""

from pathlib import Path
from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""As in Llama 3.1, for a context short enough that every band of frequencies matters."""
FAMILIES = ("qwen3", "llama", "llama3", "qwen2", "smollm2", "qwen3_moe", "glm4_moe")
GLM4_MOE: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
}
"""Every part that GLM-4.5 or GLM-4.6 has, and groups of experts, which theirs have one of."""


def make_family(kind: str, folder: Path, *, is_tied: bool, **more: Any) -> None:
    """Write a random model of a family into `folder`; `more` replaces its sizes."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 400,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": is_tied,
        "rms_norm_eps": 1e-6,
    } | more
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    without_head_dim = {k: v for k, v in sizes.items() if k != "head_dim"}
    config, model = {
        "qwen3": (transformers.Qwen3Config(**sizes), transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig(**sizes), transformers.LlamaForCausalLM),
        "llama3": (
            transformers.LlamaConfig(**sizes, rope_theta=500.0, rope_scaling=LLAMA3_ROPE),
            transformers.LlamaForCausalLM,
        ),
        # SmolLM2 is a Llama with as many key/value as query heads in some of its sizes.
        "smollm2": (
            transformers.LlamaConfig(**(sizes | {"num_key_value_heads": 4})),
            transformers.LlamaForCausalLM,
        ),
        "qwen2": (transformers.Qwen2Config(**without_head_dim), transformers.Qwen2ForCausalLM),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig(**(experts | sizes)),
            transformers.Qwen3MoeForCausalLM,
        ),
        "glm4_moe": (
            transformers.Glm4MoeConfig(**(GLM4_MOE | sizes)),
            transformers.Glm4MoeForCausalLM,
        ),
    }[kind]
    made = model(config)
    with torch.no_grad():
        for parameter in made.parameters():
            # Norms and biases begin as ones and zeros, which would hide a swap of two of them.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, bias in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.add_(torch.randn_like(bias) * 0.1)
    made.save_pretrained(folder)
