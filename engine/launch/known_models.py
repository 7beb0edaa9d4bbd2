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
}
"""By repository."""
