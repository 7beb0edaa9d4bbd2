"""A model's shape and stop ids, read from a Hugging Face folder's JSON files.

A feature that the forward pass does not have is refused here, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outloop.buffer.chat_format import end_ids_of
from outloop.buffer.errors import SettingsError
from outloop.engine.models.mixture import Mixture, mixture_of
from outloop.engine.models.rotary import rotary_parameters

ARCHITECTURES = (
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer with RMSNorm, rotary positions and gated SiLU."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: dict[str, Any]
    """See `outloop.engine.models.rotary.rotary_parameters`."""
    max_positions: int
    is_tied: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    eos_token_ids: frozenset[int]
    mixture: Mixture | None = None
    """Of layers with experts; None: all are dense."""

    @property
    def routing(self) -> tuple[int, int] | None:
        """Layers and experts of a token, as servers report its routing; None: dense."""
        return None if self.mixture is None else (self.num_layers, self.mixture.top_k)


def read_config(folder: Path) -> ModelConfig:
    """The configuration of `folder`.

    Raises:
        SettingsError: no config.json, an architecture or a feature that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise SettingsError(
            f"model folder path={str(folder)!r} holds no config.json; "
            "give a Hugging Face folder with config.json and *.safetensors"
        )
    raw: dict[str, Any] = json.loads(path.read_text())
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise SettingsError(
            f"{path}: architectures={architecture!r} is not supported by the torch server; "
            f"allowed: {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(raw, path)
    rope = rotary_parameters(raw, str(path))
    attention_bias = bool(raw.get("attention_bias", False))
    num_heads = int(raw["num_attention_heads"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        has_qk_norm=architecture.startswith("Qwen3") or bool(raw.get("use_qk_norm")),
        has_qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        has_output_bias=attention_bias
        and architecture not in ("Qwen2ForCausalLM", "Glm4MoeForCausalLM"),
        has_mlp_bias=bool(raw.get("mlp_bias", False)),
        eos_token_ids=frozenset(end_ids_of(folder)),
        mixture=mixture_of(raw, str(path)),
    )


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    if raw.get("use_sliding_window"):
        raise SettingsError(
            f"{path}: use_sliding_window=true is not supported by the torch server; allowed: false"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise SettingsError(
            f"{path}: hidden_act={activation!r} is not supported by the torch server; allowed: silu"
        )
