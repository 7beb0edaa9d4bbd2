"""The weight table: each Megatron parameter's Hugging Face names, layout and split over ranks.

One table serves import, export, publish and convert, for every supported family. An unknown name is
an error that lists the nearest.

Shape letters: V vocabulary, H hidden, Q all query heads, K all key (or value) heads, D head size,
F intermediate size, E intermediate size of an expert, S of all shared experts together, X experts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from outloop.buffer.errors import SettingsError

Layout = Literal["plain", "qkv", "gate_up"]
Feature = Literal[
    "all", "untied", "qkv_bias", "qk_norm", "dense", "moe", "shared_experts", "router_bias"
]
_OF_MIXTURES = frozenset({"moe", "shared_experts", "router_bias"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One Megatron parameter: which Hugging Face tensors it holds, how they lie and split.

    `qkv` interleaves by query group: for each group its query heads, its key, its value.
    `gate_up` puts the gate before the up projection along dimension 0. Every Hugging Face tensor
    of a row is split along `shard_dim` into equal contiguous parts, one for each tensor-parallel
    rank (expert-tensor-parallel for experts); a rank's parameter is the layout of its parts.
    """

    megatron: str
    """{layer} and {expert} stand for global indices."""
    huggingface: tuple[tuple[str, str], ...]
    """(name, shape in the letters above), in the order of the layout."""
    layout: Layout = "plain"
    shard_dim: int | None = None
    only: Feature = "all"
    """Models that have it."""
    alias: str = ""
    """Megatron's name with Transformer Engine layers, where it differs."""
    is_float32: bool = False
    """Kept in float32, whatever the other weights have."""

    @property
    def is_expert(self) -> bool:
        """Split over expert-parallel and expert-tensor-parallel ranks."""
        return "{expert}" in self.megatron


_M = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
ROWS = (
    Row(
        megatron="embedding.word_embeddings.weight",
        huggingface=(("model.embed_tokens.weight", "V H"),),
        shard_dim=0,
    ),
    Row(
        megatron=_M + "input_layernorm.weight",
        huggingface=((_HF + "input_layernorm.weight", "H"),),
        alias=_M + "self_attention.linear_qkv.layer_norm_weight",
    ),
    Row(
        megatron=_M + "self_attention.linear_qkv.weight",
        huggingface=(
            (_HF + "self_attn.q_proj.weight", "Q H"),
            (_HF + "self_attn.k_proj.weight", "K H"),
            (_HF + "self_attn.v_proj.weight", "K H"),
        ),
        layout="qkv",
        shard_dim=0,
    ),
    Row(
        megatron=_M + "self_attention.linear_qkv.bias",
        huggingface=(
            (_HF + "self_attn.q_proj.bias", "Q"),
            (_HF + "self_attn.k_proj.bias", "K"),
            (_HF + "self_attn.v_proj.bias", "K"),
        ),
        layout="qkv",
        shard_dim=0,
        only="qkv_bias",
    ),
    Row(
        megatron=_M + "self_attention.q_layernorm.weight",
        huggingface=((_HF + "self_attn.q_norm.weight", "D"),),
        only="qk_norm",
    ),
    Row(
        megatron=_M + "self_attention.k_layernorm.weight",
        huggingface=((_HF + "self_attn.k_norm.weight", "D"),),
        only="qk_norm",
    ),
    Row(
        megatron=_M + "self_attention.linear_proj.weight",
        huggingface=((_HF + "self_attn.o_proj.weight", "H Q"),),
        shard_dim=1,
    ),
    Row(
        megatron=_M + "pre_mlp_layernorm.weight",
        huggingface=((_HF + "post_attention_layernorm.weight", "H"),),
        alias=_M + "mlp.linear_fc1.layer_norm_weight",
    ),
    Row(
        megatron=_M + "mlp.linear_fc1.weight",
        huggingface=((_HF + "mlp.gate_proj.weight", "F H"), (_HF + "mlp.up_proj.weight", "F H")),
        layout="gate_up",
        shard_dim=0,
        only="dense",
    ),
    Row(
        megatron=_M + "mlp.linear_fc2.weight",
        huggingface=((_HF + "mlp.down_proj.weight", "H F"),),
        shard_dim=1,
        only="dense",
    ),
    Row(
        megatron=_M + "mlp.router.weight",
        huggingface=((_HF + "mlp.gate.weight", "X H"),),
        only="moe",
    ),
    # No parameter, a buffer: no gradient reaches it.
    Row(
        megatron=_M + "mlp.router.expert_bias",
        huggingface=((_HF + "mlp.gate.e_score_correction_bias", "X"),),
        only="router_bias",
        is_float32=True,
    ),
    Row(
        megatron=_M + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        huggingface=(
            (_HF + "mlp.experts.{expert}.gate_proj.weight", "E H"),
            (_HF + "mlp.experts.{expert}.up_proj.weight", "E H"),
        ),
        layout="gate_up",
        shard_dim=0,
        only="moe",
        alias=_M + "mlp.experts.linear_fc1.weight{expert}",
    ),
    Row(
        megatron=_M + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        huggingface=((_HF + "mlp.experts.{expert}.down_proj.weight", "H E"),),
        shard_dim=1,
        only="moe",
        alias=_M + "mlp.experts.linear_fc2.weight{expert}",
    ),
    Row(
        megatron=_M + "mlp.shared_experts.linear_fc1.weight",
        huggingface=(
            (_HF + "mlp.shared_experts.gate_proj.weight", "S H"),
            (_HF + "mlp.shared_experts.up_proj.weight", "S H"),
        ),
        layout="gate_up",
        shard_dim=0,
        only="shared_experts",
    ),
    Row(
        megatron=_M + "mlp.shared_experts.linear_fc2.weight",
        huggingface=((_HF + "mlp.shared_experts.down_proj.weight", "H S"),),
        shard_dim=1,
        only="shared_experts",
    ),
    Row(megatron="decoder.final_layernorm.weight", huggingface=(("model.norm.weight", "H"),)),
    Row(
        megatron="output_layer.weight",
        huggingface=(("lm_head.weight", "V H"),),
        shard_dim=0,
        only="untied",
    ),
)
"""In the order in which a forward pass meets them."""


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name).replace(r"\{layer\}", r"(?P<layer>\d+)")
    return re.compile(escaped.replace(r"\{expert\}", r"(?P<expert>\d+)"))


_PATTERNS = tuple(
    (_pattern(name), row) for row in ROWS for name in (row.megatron, row.alias) if name
)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The Hugging Face tensors of one parameter, with names filled in."""

    row: Row
    names: tuple[str, ...]
    dims: tuple[str, ...]


def find_row(name: str) -> Tensors:
    """The row of a Megatron parameter under its global name, local or Transformer Engine spelling.

    Raises:
        SettingsError: the table has no such name; the nearest are listed.
    """
    for pattern, row in _PATTERNS:
        match = pattern.fullmatch(name)
        if match:
            return Tensors(
                row,
                tuple(part.format(**match.groupdict()) for part, _ in row.huggingface),
                tuple(dims for _, dims in row.huggingface),
            )
    near = difflib.get_close_matches(name, [row.megatron for row in ROWS], n=3, cutoff=0.3)
    raise SettingsError(f"Megatron parameter {name!r} is not in the weight table; nearest: {near}")


def sizes(config: Any) -> dict[str, int]:
    """What the shape letters stand for in a PolicyConfig."""
    return {
        "V": config.vocab_size,
        "H": config.hidden_size,
        "Q": config.num_attention_heads * config.kv_channels,
        "K": config.num_query_groups * config.kv_channels,
        "D": config.kv_channels,
        "F": config.ffn_hidden_size,
        "E": config.moe_ffn_hidden_size or 0,
        "S": config.moe_shared_expert_intermediate_size or 0,
        "X": config.num_moe_experts or 0,
    }


def features(config: Any) -> frozenset[Feature]:
    """Which rows a PolicyConfig's model has."""
    found: set[Feature] = {"all"}
    if config.num_moe_experts:
        found.add("moe")
    if not all(mixture_layers(config)):
        found.add("dense")
    if config.moe_shared_expert_intermediate_size:
        found.add("shared_experts")
    if config.moe_router_enable_expert_bias:
        found.add("router_bias")
    if not config.is_tied:
        found.add("untied")
    if config.add_qkv_bias:
        found.add("qkv_bias")
    if config.qk_layernorm:
        found.add("qk_norm")
    return frozenset(found)


def mixture_layers(config: Any) -> list[bool]:
    """For each layer of a PolicyConfig's model whether it has experts."""
    if not config.num_moe_experts:
        return [False] * config.num_layers
    if isinstance(config.moe_layer_freq, int):
        return [layer % config.moe_layer_freq == 0 for layer in range(config.num_layers)]
    return [bool(is_mixture) for is_mixture in config.moe_layer_freq]


def expected_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor of a PolicyConfig's model, in table order."""
    letters, has = sizes(config), features(config)
    found: dict[str, tuple[int, ...]] = {}

    def add(row: Row, **indices: int) -> None:
        for part, dims in row.huggingface:
            shape = tuple(letters[letter] for letter in dims.split())
            found[part.format(**indices)] = shape

    rows = [row for row in ROWS if row.only in has]
    is_mixture = mixture_layers(config)
    for is_per_layer, group in groupby(rows, key=lambda row: "{layer}" in row.megatron):
        members = list(group)
        for layer in range(config.num_layers) if is_per_layer else (0,):
            for row in members:
                if row.only == "dense" and is_mixture[layer]:
                    continue
                if row.only in _OF_MIXTURES and not is_mixture[layer]:
                    continue
                for expert in range(letters["X"]) if row.is_expert else (0,):
                    add(row, layer=layer, expert=expert)
    return found


def float32_tensors(config: Any) -> frozenset[str]:
    """Names of the Hugging Face tensors that stay in float32."""
    if not config.moe_router_enable_expert_bias:
        return frozenset()
    return frozenset(
        part.format(layer=layer)
        for row in ROWS
        if row.is_float32
        for part, _ in row.huggingface
        for layer, is_mixture in enumerate(mixture_layers(config))
        if is_mixture
    )


def check_tensors(found: Mapping[str, tuple[int, ...]], config: Any, source: str) -> None:
    """Refuse a folder whose tensors are not those of its configuration.

    Layers that predict further tokens, which come behind a model's own, are left out.

    Args:
        found: name and shape of what is there.
        source: what to call it in the error, for example "model.path='m'".

    Raises:
        SettingsError: a tensor is missing, unknown or of another shape; the nearest names.
    """
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in found]
    if missing:
        near = difflib.get_close_matches(missing[0], list(found), n=3)
        raise SettingsError(
            f"{source} lacks {len(missing)} tensors, the first is {missing[0]!r}; nearest there: "
            f"{near}. Give the folder that config.json belongs to"
        )
    tied_head = {"lm_head.weight"} if config.is_tied else set()
    further = tuple(
        f"model.layers.{config.num_layers + index}." for index in range(config.num_further_layers)
    )
    unknown = sorted(
        name for name in found.keys() - expected.keys() - tied_head if not name.startswith(further)
    )
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(expected), n=3)
        raise SettingsError(
            f"{source} holds {len(unknown)} tensors that its config.json has no place for, the "
            f"first is {unknown[0]!r}; nearest that have one: {near}"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise SettingsError(
                f"{source}: {name!r} has shape {tuple(found[name])}, config.json asks for {shape}"
            )


def merge(parts: tuple[Tensor, ...], layout: Layout, *, num_groups: int) -> Tensor:
    """Lay a rank's parts of Hugging Face tensors into its Megatron parameter.

    Args:
        num_groups: query groups that the parts hold.
    """
    if layout == "plain":
        return parts[0]
    if layout == "gate_up":
        return torch.cat(parts)
    return torch.cat([p.view(num_groups, -1, *p.shape[1:]) for p in parts], dim=1).flatten(0, 1)


def split(whole: Tensor, layout: Layout, *, num_groups: int, head_dim: int) -> tuple[Tensor, ...]:
    """Take a rank's Megatron parameter apart; inverse of `merge`; views where the layout allows."""
    if layout == "plain":
        return (whole,)
    if layout == "gate_up":
        return tuple(whole.chunk(2))
    grouped = whole.view(num_groups, -1, *whole.shape[1:])
    per_group = grouped.shape[1] - 2 * head_dim
    return tuple(
        part.flatten(0, 1) for part in grouped.split([per_group, head_dim, head_dim], dim=1)
    )
