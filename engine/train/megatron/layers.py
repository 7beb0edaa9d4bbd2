"""The Megatron-core layers of a policy, Megatron's local ones or Transformer Engine's.

Attention never crosses samples, and a sample's positions start at zero wherever it lies in the row.

Shape letters: T tokens of a row, B samples of a length class, L its padded length, H heads,
K key/value heads, D head size, R rotated dimensions of a head.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from outloop.engine.models.rotary import inverse_frequencies
from outloop.engine.models.weight_map import mixture_layers
from outloop.engine.train.megatron.layer_kind import LayerKind
from outloop.engine.train.megatron.routing_replay import with_replay

_MAX_PADDING_SHARE = 0.02
"""Samples share one padded attention call while at most this share of it is padding."""
_KERNEL_DTYPE = torch.bfloat16


@dataclass(kw_only=True)
class PackedRow(PackedSeqParams):
    """How samples lie in one packed row of T tokens; travels through Megatron to the attention.

    `classes` groups samples of similar length: each is an index [B, L] into the row, where padding
    points at position T, one past the end. `order` [T] puts the classes' real tokens back in place.
    Kernels of variable length need neither: they read `cu_seqlens_q` and `cu_seqlens_kv`
    [samples + 1] int32, where each sample begins, and last T.
    """

    positions: Tensor
    """[T] int64, position of each token in its sample."""
    classes: tuple[Tensor, ...]
    order: Tensor
    num_tokens: int = field(default=0)
    """T, on this rank."""
    routes: Tensor | None = None
    """[T, L, k] int16: experts that servers sent tokens to, by layer of the whole model; -1 where
    that is not known. None: of no token."""
    rotation: tuple[dict[str, Any], Tensor, Tensor] | None = None
    """Parameters of the rotary embedding, its cosines and sines [T, R/2], once a layer has them."""

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that attention computes, its padding included."""
        return sum(index.numel() for index in self.classes) if self.classes else self.num_tokens


def pack_row(
    lengths: Sequence[int],
    device: torch.device,
    *,
    layers: LayerKind = "local",
    places: npt.NDArray[np.int64] | None = None,
    routes: npt.NDArray[np.int16] | None = None,
) -> PackedRow:
    """Lay samples of the given lengths one after the other, for the attention of `layers`.

    Args:
        places: of this rank's tokens in the row, with context parallelism; None: all are here.
        routes: `PackedRow.routes`, of this rank's tokens.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    classes: list[Tensor] = []
    order = torch.empty(0, dtype=torch.int64)
    if layers == "local":
        classes, order = _length_classes(lengths, starts)
    # Of the whole row on every rank: the kernels know which part of it a rank has.
    boundaries = torch.tensor(starts, dtype=torch.int32).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths])
    is_split = places is not None and len(places) < starts[-1]
    if places is not None:
        positions = positions[torch.from_numpy(places)]
    return PackedRow(
        qkv_format="thd",
        positions=positions.to(device),
        classes=tuple(index.to(device) for index in classes),
        order=order.to(device),
        num_tokens=len(positions),
        routes=None if routes is None else torch.from_numpy(routes).to(device),
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        # Not every kernel takes the boundaries for those with padding when it splits them.
        cu_seqlens_q_padded=boundaries if is_split else None,
        cu_seqlens_kv_padded=boundaries if is_split else None,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _length_classes(lengths: Sequence[int], starts: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """`PackedRow.classes` and `PackedRow.order` of samples that begin at `starts`."""
    total = starts[-1]
    by_length = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    classes: list[Tensor] = []
    seen: list[Tensor] = []
    begin = 0
    while begin < len(by_length):
        longest = lengths[by_length[begin]]
        end, num_real = begin, 0
        while end < len(by_length):
            num_real += lengths[by_length[end]]
            if num_real < (1.0 - _MAX_PADDING_SHARE) * longest * (end + 1 - begin):
                break
            end += 1
        members = by_length[begin:end]
        index = torch.full((len(members), longest), total, dtype=torch.int64)
        for row, sample in enumerate(members):
            index[row, : lengths[sample]] = torch.arange(starts[sample], starts[sample + 1])
        classes.append(index)
        seen.append(index.reshape(-1))
        begin = end
    places = torch.cat(seen)
    real = (places < total).nonzero().squeeze(1)
    order = torch.empty(total, dtype=torch.int64)
    order[places[real]] = real
    return classes, order


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm computed in float32; its weight is marked for sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; dtype is kept."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _RowAttention(MegatronModule):
    """The part that every attention over a PackedRow shares: rotary frequencies and the row."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        frequencies = inverse_frequencies(config.rope, config.kv_channels)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def _rotated(self, query: Tensor, key: Tensor, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Rotary embedding of [T, heads, D] at the row's positions."""
        rope = self.config.rope
        if row.rotation is None or row.rotation[0] != rope:
            # A model's layers have the same frequencies: the first of them computes for all.
            angles = row.positions.float()[:, None] * self.inv_freq
            row.rotation = rope, angles.cos(), angles.sin()
        cos, sin = (part[:, None].to(query.dtype) for part in row.rotation[1:])
        return _Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin)

    def _require_row(self, row: PackedRow | None) -> PackedRow:
        if not isinstance(row, PackedRow):
            raise TypeError(f"{type(self).__name__} needs a PackedRow; build one with pack_row")
        return row


class PackedAttention(_RowAttention):
    """Causal attention over a PackedRow, rotary embedding included.

    Takes query [T, H, D], key and value [T, K, D]; returns [T, H * D]. Rotation happens here, from
    `positions`, because Megatron's own packed rotation loops over samples in Python.
    """

    def __init__(self, config: Any, layer_number: int, *unused: Any, **more: Any) -> None:
        super().__init__(config)
        self.scale = more.get("softmax_scale") or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:
        """Attention of every sample to itself, causally."""
        row = self._require_row(packed_seq_params)
        query, key = self._rotated(query, key, row)
        parts = []
        q, k, v = (torch.cat((x, x.new_zeros(1, *x.shape[1:]))) for x in (query, key, value))
        for index in row.classes:
            out = functional.scaled_dot_product_attention(
                q[index].transpose(1, 2),
                k[index].transpose(1, 2),
                v[index].transpose(1, 2),
                is_causal=True,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            parts.append(out.transpose(1, 2).reshape(-1, query.shape[1] * query.shape[2]))
        return torch.cat(parts)[row.order]


class VarlenAttention(_RowAttention):
    """Causal attention over a PackedRow by a kernel that reads where samples begin.

    Takes and returns what PackedAttention does, rotary embedding included. The kernel gets
    bfloat16, since neither torch nor Transformer Engine has kernels of variable length for float32;
    all the rest of a layer keeps its dtype. It is called as Megatron-core calls
    TEDotProductAttention.
    """

    def __init__(
        self, config: Any, layer_number: int, *, kernel: Callable[..., Any], **more: Any
    ) -> None:
        super().__init__(config)
        self.kernel = kernel(config=config, layer_number=layer_number, **more)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:
        """Attention of every sample to itself, causally."""
        row = self._require_row(packed_seq_params)
        query, key = self._rotated(query, key, row)
        out: Tensor = self.kernel(
            query.to(_KERNEL_DTYPE),
            key.to(_KERNEL_DTYPE),
            value.to(_KERNEL_DTYPE),
            attention_mask,
            attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=row,
        )
        return out.to(value.dtype).reshape(len(query), -1)


class TorchVarlenKernel(torch.nn.Module):
    """torch's flash attention of variable length, called as Megatron-core calls its kernels."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        softmax_scale: float | None = None,
        attend: Callable[..., Any] = varlen_attn,
        **unused: Any,
    ) -> None:
        """`attend`: as torch's varlen_attn."""
        super().__init__()
        self._attend = attend
        self._takes_grouped_heads = "enable_gqa" in inspect.signature(attend).parameters
        """torch 2.11's varlen_attn needs as many key as query heads."""
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        *,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRow,
    ) -> Tensor:
        """[T, H, D], of query [T, H, D], key and value [T, K, D] in bfloat16."""
        options: dict[str, Any] = {"scale": self._scale, "window_size": (-1, 0)}
        num_groups = query.shape[1] // key.shape[1]
        if num_groups > 1 and self._takes_grouped_heads:
            options["enable_gqa"] = True
        elif num_groups > 1:
            key, value = (x.repeat_interleave(num_groups, dim=1) for x in (key, value))
        row = packed_seq_params
        out = self._attend(
            query,
            key,
            value,
            row.cu_seqlens_q,
            row.cu_seqlens_kv,
            row.max_seqlen_q,
            row.max_seqlen_kv,
            **options,
        )
        assert isinstance(out, Tensor)
        return out


class _Rotation(torch.autograd.Function):
    """Rotary embedding of [T, heads, D] by cosines and sines [T, 1, R/2]; keeps neither input nor
    output for the way back, which is the rotation by the opposite angles. Dimensions from R on stay
    as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    num_rotated = 2 * cos.shape[-1]
    first, second = x[..., :num_rotated].chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    to_first, to_second = out[..., :num_rotated].chunk(2, dim=-1)
    out[..., num_rotated:] = x[..., num_rotated:]
    torch.mul(first, cos, out=to_first)
    to_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second)
    to_second.addcmul_(first, sin)
    return out


def block_spec(config: Any) -> TransformerBlockSubmodules:
    """This stage's layers, of the configured kind."""
    if config.layers == "transformer_engine":
        return _transformer_engine_spec(config)
    return _local_spec(config)


def _transformer_engine_spec(config: Any) -> TransformerBlockSubmodules:
    """Transformer Engine's layers; norms are part of the linear layer that follows them, and the
    experts of a rank are computed by one grouped kernel, unless the raw table says otherwise."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

    def layer(num_experts: int | None) -> ModuleSpec:
        spec: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=config.moe_grouped_gemm and num_experts is not None,
            qk_layernorm=config.qk_layernorm,
        )
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = partial(VarlenAttention, kernel=TEDotProductAttention)
        return spec

    return TransformerBlockSubmodules(layer_specs=_of_stage(config, layer), layer_norm=TENorm)


def _local_spec(config: Any) -> TransformerBlockSubmodules:
    """Megatron-core's local layers with our norm and attention; experts one after the other."""

    def layer(num_experts: int | None) -> ModuleSpec:
        spec: ModuleSpec = get_gpt_layer_local_spec(
            num_experts=num_experts,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            normalization="RMSNorm",
        )
        spec.submodules.input_layernorm = RMSNorm
        spec.submodules.pre_mlp_layernorm = RMSNorm
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.layers == "local_varlen":
            attention.core_attention = partial(VarlenAttention, kernel=TorchVarlenKernel)
        if config.qk_layernorm:
            attention.q_layernorm = RMSNorm
            attention.k_layernorm = RMSNorm
        return spec

    return TransformerBlockSubmodules(layer_specs=_of_stage(config, layer), layer_norm=RMSNorm)


def _of_stage(config: Any, layer: Callable[[int | None], ModuleSpec]) -> list[ModuleSpec]:
    """The specification of each layer of this pipeline stage, by its number of experts."""
    is_mixture = mixture_layers(config)
    specs = {False: layer(None)} if not all(is_mixture) else {}
    if any(is_mixture):
        specs[True] = with_replay(layer(config.num_moe_experts))
    first, number = get_transformer_layer_offset(config), get_num_layers_to_build(config)
    return [specs[is_mixture[index]] for index in range(first, first + number)]
