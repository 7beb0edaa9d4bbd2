"""The weights of one model, under Hugging Face names and in the layout that the forward needs.

`named` holds views of the fused tensors, so that a write under a Hugging Face name is a write to
the tensors of the forward pass. Derived tensors are refreshed before a set of weights is used.

Shape letters: D hidden size, F intermediate size, H query heads, K key/value heads, d head size,
V vocabulary, X experts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outloop.buffer.errors import SettingsError
from outloop.engine.models.mixture import Mixture
from outloop.engine.publish.verification.checksum import Algorithm, tensor_checksum
from outloop.engine.serve.torch_server.config import ModelConfig


class WeightsRefused(Exception):
    """A tensor's name, shape or bytes do not belong to this model; nothing was changed by it."""


class FeedForward:
    """Gate and up projection as one tensor, and the projection back."""

    def __init__(self, size: int, num_inner: int, new: Callable[..., Tensor]) -> None:
        self.gate_up = new(2 * num_inner, size)
        self.down = new(size, num_inner)

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Views under their names behind `prefix`."""
        gate, up = self.gate_up.chunk(2)
        return {
            f"{prefix}.gate_proj.weight": gate,
            f"{prefix}.up_proj.weight": up,
            f"{prefix}.down_proj.weight": self.down,
        }


class MixtureWeights:
    """A router and its experts."""

    def __init__(self, mixture: Mixture, size: int, new: Callable[..., Tensor]) -> None:
        self.router = new(mixture.num_experts, size)
        self.bias = new(mixture.num_experts, dtype=torch.float32) if mixture.has_bias else None
        """[X] float32, whatever the other weights have."""
        self.experts = [
            FeedForward(size, mixture.expert_size, new) for _ in range(mixture.num_experts)
        ]
        self.shared = FeedForward(size, mixture.shared_size, new) if mixture.shared_size else None

    def named(self) -> dict[str, Tensor]:
        """Views under the names that follow `model.layers.N.`."""
        found = {"mlp.gate.weight": self.router}
        if self.bias is not None:
            found["mlp.gate.e_score_correction_bias"] = self.bias
        for index, expert in enumerate(self.experts):
            found |= expert.named(f"mlp.experts.{index}")
        return found | (self.shared.named("mlp.shared_experts") if self.shared else {})


class LayerWeights:
    """Fused tensors of one layer."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        size, d = config.hidden_size, config.head_dim
        num_qk = config.num_heads + config.num_kv_heads
        num_rows = (num_qk + config.num_kv_heads) * d
        self.input_norm = new(size)
        self.mlp_norm = new(size)
        self.qkv = new(num_rows, size)
        self.qkv_bias = new(num_rows) if config.has_qkv_bias else None
        self.output = new(size, config.num_heads * d)
        self.output_bias = new(size) if config.has_output_bias else None
        mixture = config.mixture
        self.mixture = (
            MixtureWeights(mixture, size, new)
            if mixture is not None and index in mixture.layers
            else None
        )
        """None: a dense layer, which has `dense`."""
        self.dense = (
            FeedForward(size, config.intermediate_size, new) if self.mixture is None else None
        )
        self.gate_up_bias = new(2 * config.intermediate_size) if config.has_mlp_bias else None
        self.down_bias = new(size) if config.has_mlp_bias else None
        self.q_norm = new(d) if config.has_qk_norm else None
        self.k_norm = new(d) if config.has_qk_norm else None
        self.qk_norm = new(num_qk, d) if config.has_qk_norm else None
        """[H + K, d]: q_norm and k_norm repeated, so both are applied at once."""

    def named(self, config: ModelConfig) -> dict[str, Tensor]:
        """Views under the names that follow `model.layers.N.`."""
        d, num_inner = config.head_dim, config.intermediate_size
        sizes = [config.num_heads * d, config.num_kv_heads * d, config.num_kv_heads * d]
        found = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            "self_attn.o_proj.weight": self.output,
        }
        if self.mixture is not None:
            found |= self.mixture.named()
        if self.dense is not None:
            found |= self.dense.named("mlp")
        for fused, suffix in ((self.qkv, "weight"), (self.qkv_bias, "bias")):
            if fused is not None:
                for letter, part in zip("qkv", fused.split(sizes), strict=True):
                    found[f"self_attn.{letter}_proj.{suffix}"] = part
        if self.gate_up_bias is not None:
            found["mlp.gate_proj.bias"] = self.gate_up_bias[:num_inner]
            found["mlp.up_proj.bias"] = self.gate_up_bias[num_inner:]
        optional = {
            "self_attn.o_proj.bias": self.output_bias,
            "mlp.down_proj.bias": self.down_bias,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
        }
        return found | {name: t for name, t in optional.items() if t is not None}

    def refresh(self, num_heads: int) -> None:
        """Recompute what is derived from the named tensors."""
        if self.qk_norm is not None and self.q_norm is not None and self.k_norm is not None:
            self.qk_norm[:num_heads] = self.q_norm
            self.qk_norm[num_heads:] = self.k_norm


class Weights:
    """One complete set of weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = torch.zeros(shape, dtype=dtype, device=device)
        self.final_norm = torch.zeros(config.hidden_size, dtype=dtype, device=device)
        self.head = self.embedding if config.is_tied else torch.zeros_like(self.embedding)
        self.layers = [
            LayerWeights(config, index, dtype, device) for index in range(config.num_layers)
        ]
        self.named: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.final_norm,
        }
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.named(config).items():
                self.named[f"model.layers.{index}.{name}"] = tensor
        if not config.is_tied:
            self.named["lm_head.weight"] = self.head

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy `tensor` in under its Hugging Face name; `refresh` must follow before use.

        As SGLang does, a tied model skips `lm_head.weight`, and every model the frequencies of
        rotation that old checkpoints hold.

        Raises:
            WeightsRefused: unknown name or another shape.
        """
        if name == "lm_head.weight" and self.config.is_tied:
            return
        if name.endswith("rotary_emb.inv_freq"):
            return
        target = self.named.get(name)
        if target is None:
            near = difflib.get_close_matches(name, self.named, n=1)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise WeightsRefused(f"tensor name={name!r} is not in this model{hint}")
        if target.shape != tensor.shape:
            raise WeightsRefused(
                f"tensor name={name!r} has shape={list(tensor.shape)}; "
                f"this model has {list(target.shape)}"
            )
        target.copy_(tensor)

    def copy_from(self, other: Weights, names: Iterable[str]) -> None:
        """Take over the values of these names from another set of the same model."""
        for name in names:
            self.named[name].copy_(other.named[name])

    def refresh(self) -> None:
        """Recompute derived tensors after writes."""
        for layer in self.layers:
            layer.refresh(self.config.num_heads)

    def checksums(self, algorithm: Algorithm) -> dict[str, str]:
        """Checksum of every named tensor's bytes as they are in memory now."""
        return {name: tensor_checksum(tensor, algorithm) for name, tensor in self.named.items()}


def read_folder(weights: Weights, folder: Path) -> None:
    """Fill `weights` from the *.safetensors of `folder`, all of them or none of the names missing.

    Raises:
        WeightsRefused: no file, an unreadable file, or names and shapes that do not fit.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightsRefused(f"folder path={str(folder)!r} holds no *.safetensors")
    seen: set[str] = set()
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                    weights.write(name, file.get_tensor(name))
                    seen.add(name)
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"{path} cannot be read: {error}") from error
    _require_all(weights, seen, folder)
    weights.refresh()


def load_weights(
    config: ModelConfig, folder: Path, *, dtype: torch.dtype, device: torch.device
) -> Weights:
    """The weights of a Hugging Face folder.

    Raises:
        SettingsError: the folder does not hold this model.
    """
    weights = Weights(config, dtype, device)
    try:
        read_folder(weights, folder)
    except WeightsRefused as error:
        raise SettingsError(f"model folder path={str(folder)!r}: {error}") from error
    return weights


def _require_all(weights: Weights, seen: Iterable[str], folder: Path) -> None:
    missing = sorted(weights.named.keys() - set(seen))
    if missing:
        raise WeightsRefused(
            f"folder path={str(folder)!r} lacks {len(missing)} tensors, among them {missing[:3]}"
        )
