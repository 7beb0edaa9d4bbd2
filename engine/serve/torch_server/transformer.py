"""The forward pass of Llama, Qwen and GLM-4.5 models over a slot cache, in plain torch.

Rows of a pass do not see each other; a query sees the cached positions up to its own and no others.

Shape letters: B rows, S new ids per row (right-padded), D hidden size, H query heads, K key/value
heads, G = H / K, T cached positions that are looked at, d head size, r rotated dimensions of it,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from outloop.engine.models.rotary import inverse_frequencies
from outloop.engine.serve.torch_server.config import ModelConfig
from outloop.engine.serve.torch_server.experts import mix
from outloop.engine.serve.torch_server.kv_cache import KVCache
from outloop.engine.serve.torch_server.weights import LayerWeights, Weights


@dataclass(slots=True)
class _Pass:
    """What every layer of one pass shares."""

    num_rows: int
    num_new: int
    cosine: Tensor
    """[B * S, 1, r]"""
    sine: Tensor
    """[B * S, 1, r], the first half negated."""
    positions: Tensor
    """[B, S] or, for one new id a row, [B, 1]."""
    written: Tensor
    """[B * S * K] where each new key lies in a layer's cache, seen as rows of d."""
    slots: Tensor
    """[B]"""
    num_seen: int
    mask: Tensor
    """[B, 1, S, T], 0 where a query may look and -inf elsewhere."""


class Transformer:
    """Computes logits; one instance per engine."""

    def __init__(self, config: ModelConfig, *, max_tokens: int, device: torch.device) -> None:
        self._config = config
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        angles = torch.outer(torch.arange(max_tokens).float(), frequencies)
        sine = angles.sin()
        self._cosine = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device)
        self._sine = torch.cat((-sine, sine), dim=-1).to(device)

    def forward(
        self,
        weights: Weights,
        cache: KVCache,
        ids: Tensor,
        slots: Tensor,
        starts: Tensor,
        lengths: Tensor,
        *,
        num_seen: int,
        every: bool = False,
    ) -> Tensor:
        """Logits [B, V] float32 after each row's last new id; fills the cache.

        With `every`, [B * S, V]: after every new id, padding included.

        Args:
            ids: [B, S] int64, row b holds `lengths[b]` new ids and then padding.
            slots, starts, lengths: [B] int64; the new ids take positions
                starts[b] .. starts[b] + lengths[b] - 1 of their slot.
            num_seen: the largest starts[b] + lengths[b].
        """
        plan = self._plan(weights, cache, ids, slots, starts, num_seen)
        config = self._config
        hidden = functional.embedding(ids.reshape(-1), weights.embedding)
        size = (config.hidden_size,)
        for index, layer in enumerate(weights.layers):
            normed = functional.rms_norm(hidden, size, layer.input_norm, config.rms_eps)
            attended = self._attention(layer, cache.keys[index], cache.values[index], normed, plan)
            hidden = hidden + functional.linear(attended, layer.output, layer.output_bias)
            normed = functional.rms_norm(hidden, size, layer.mlp_norm, config.rms_eps)
            hidden = hidden + self._feed_forward(layer, cache, index, normed, plan)
        if plan.num_new > 1 and not every:
            rows = torch.arange(plan.num_rows, device=ids.device) * plan.num_new
            hidden = hidden.index_select(0, rows + lengths - 1)
        hidden = functional.rms_norm(hidden, size, weights.final_norm, config.rms_eps)
        return functional.linear(hidden, weights.head).float()

    def _plan(
        self,
        weights: Weights,
        cache: KVCache,
        ids: Tensor,
        slots: Tensor,
        starts: Tensor,
        num_seen: int,
    ) -> _Pass:
        num_rows, num_new = ids.shape
        device = ids.device
        positions = starts[:, None]
        if num_new > 1:
            positions = positions + torch.arange(num_new, device=device)
            # Padding may reach past the slot's end: it goes to the scratch position.
            positions = positions.clamp_(max=cache.capacity - 1)
        flat = positions.reshape(-1)
        heads = torch.arange(self._config.num_kv_heads, device=device)
        rows = slots[:, None, None] * self._config.num_kv_heads + heads
        written = (rows * cache.capacity + positions[:, :, None]).reshape(-1)
        hidden_keys = torch.arange(num_seen, device=device) > positions[:, :, None]
        mask = torch.zeros((num_rows, 1, num_new, num_seen), dtype=weights.dtype, device=device)
        mask.masked_fill_(hidden_keys[:, None], float("-inf"))
        return _Pass(
            num_rows=num_rows,
            num_new=num_new,
            cosine=self._cosine.index_select(0, flat).to(weights.dtype)[:, None],
            sine=self._sine.index_select(0, flat).to(weights.dtype)[:, None],
            written=written,
            positions=positions,
            slots=slots,
            num_seen=num_seen,
            mask=mask,
        )

    def _feed_forward(
        self, layer: LayerWeights, cache: KVCache, index: int, normed: Tensor, plan: _Pass
    ) -> Tensor:
        """[B * S, D]; a mixture writes where its tokens went into the cache."""
        mixture = self._config.mixture
        if mixture is not None and layer.mixture is not None:
            mixed, experts = mix(mixture, layer.mixture, normed)
            routes = experts.view(*plan.positions.shape, -1).to(cache.routes.dtype)
            cache.routes[index, plan.slots[:, None], plan.positions] = routes
            return mixed
        assert layer.dense is not None
        gate_up = functional.linear(normed, layer.dense.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.linear(functional.silu(gate).mul_(up), layer.dense.down, layer.down_bias)

    def _attention(
        self, layer: LayerWeights, keys: Tensor, values: Tensor, normed: Tensor, plan: _Pass
    ) -> Tensor:
        """[B * S, H * d]; writes the new keys and values into the layer's cache [N, K, T, d]."""
        config = self._config
        d, num_kv = config.head_dim, config.num_kv_heads
        num_qk = config.num_heads + num_kv
        fused = functional.linear(normed, layer.qkv, layer.qkv_bias).view(-1, num_qk + num_kv, d)
        query_key, value = fused[:, :num_qk], fused[:, num_qk:]
        if layer.qk_norm is not None:
            query_key = functional.rms_norm(query_key, (d,), None, config.rms_eps) * layer.qk_norm
        num_rotated = plan.cosine.shape[-1]
        rotated, half = query_key[..., :num_rotated], num_rotated // 2
        swapped = torch.cat((rotated[..., half:], rotated[..., :half]), dim=-1)
        rotated = torch.addcmul(rotated * plan.cosine, swapped, plan.sine)
        if num_rotated < d:
            rotated = torch.cat((rotated, query_key[..., num_rotated:]), dim=-1)
        query_key = rotated
        query, key = query_key[:, : config.num_heads], query_key[:, config.num_heads :]
        keys.view(-1, d).index_copy_(0, plan.written, key.reshape(-1, d))
        values.view(-1, d).index_copy_(0, plan.written, value.reshape(-1, d))
        seen_keys = keys[:, :, : plan.num_seen].index_select(0, plan.slots)
        seen_values = values[:, :, : plan.num_seen].index_select(0, plan.slots)
        if plan.num_new == 1:
            # The heads of a group share keys, so they can be the queries of one attention.
            grouped = query.reshape(plan.num_rows, num_kv, -1, d)
            attended = functional.scaled_dot_product_attention(
                grouped, seen_keys, seen_values, plan.mask
            )
            return attended.reshape(plan.num_rows, -1)
        query = query.view(plan.num_rows, plan.num_new, config.num_heads, d).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            query,
            seen_keys,
            seen_values,
            plan.mask,
            enable_gqa=config.num_heads != num_kv,
        )
        return attended.transpose(1, 2).reshape(plan.num_rows * plan.num_new, -1)
