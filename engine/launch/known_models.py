"""Sizes of some models, so that `outloop check` needs no network for them.

Each is what the config.json of the repository of that name says at huggingface.co; the tests
compare the number of parameters that follows with the one that its page states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}

_GLM45: dict[str, Any] = {
    "model_type": "glm4_moe",
    "head_dim": 128,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "attention_bias": True,
    "use_qk_norm": False,
    "tie_word_embeddings": False,
}

KNOWN_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-0.6B": _QWEN3
    | {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": _QWEN3
    | {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-30B-A3B": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "zai-org/GLM-4.5-Air": _GLM45
    | {
        "num_hidden_layers": 46,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
    },
    "zai-org/GLM-4.5": _GLM45
    | {
        "num_hidden_layers": 92,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
        "use_qk_norm": True,
    },
}
"""By repository."""
