"""Logprobs of a prompt's own ids.

The forward over one prompt uses no cache and leaves nothing in it.
"""

from __future__ import annotations

import torch

from outloop.engine.serve.torch_server.kv_cache import KVCache
from outloop.engine.serve.torch_server.transformer import Transformer
from outloop.engine.serve.torch_server.weights import Weights


@torch.inference_mode()
def prompt_logprobs(weights: Weights, ids: list[int]) -> list[float]:
    """log_softmax(logits) [T - 1] of `ids` [T], the first aside."""
    num, device = len(ids), weights.device
    cache = KVCache(
        weights.config, max_running=1, max_tokens=num, dtype=weights.dtype, device=device
    )
    cache.reserve(num)
    row = torch.tensor([ids], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    logits = Transformer(weights.config, max_tokens=num + 1, device=device).forward(
        weights, cache, row, zero, zero, zero + num, num_seen=num, every=True
    )
    table = torch.log_softmax(logits[:-1], dim=-1)
    found: list[float] = table.gather(1, row[0, 1:, None]).squeeze(1).tolist()
    return found
