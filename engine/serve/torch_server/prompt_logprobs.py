"""Logprobs of a prompt's own ids.

The forward over one prompt uses no cache and leaves nothing in it.
"""

from __future__ import annotations

import torch

from outloop.engine.serve.torch_server.kv_cache import KVCache
from outloop.engine.serve.torch_server.sampling import Top
from outloop.engine.serve.torch_server.transformer import Transformer
from outloop.engine.serve.torch_server.weights import Weights


@torch.inference_mode()
def prompt_logprobs(
    weights: Weights, ids: list[int], num_top: int = 0
) -> tuple[list[float], list[Top]]:
    """log_softmax(logits) [T - 1] of `ids` [T], the first aside; and at each place as many of the
    most probable ids as are asked for, the most probable first."""
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
    if not num_top:
        return found, []
    top = table.topk(min(num_top, table.shape[1]), dim=-1)
    return found, [
        list(zip(values, ids_of, strict=True))
        for values, ids_of in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]
