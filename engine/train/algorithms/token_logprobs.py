"""Logprobs and entropies of tokens from logits, without a second tensor of the logits' size.

Beside the logits at most a block of numbers in float32 are alive. The vocabulary may be split over
ranks and is never gathered.

Shape letters: N tokens, V vocabulary, or this rank's part of it, M ids asked for at each token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BLOCK = {"cpu": 2**18, "cuda": 2**24}
"""Numbers computed at once: what fits in a core's cache, what fills a GPU."""


def logprobs_and_entropies(
    logits: Tensor,
    token_ids: Tensor,
    temperature: Tensor | None,
    *,
    has_entropy_gradient: bool = False,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / temperature) at `token_ids`, and the distribution's entropy in nats.

    With gradients the backward pass overwrites `logits` with theirs, so they must be nobody
    else's: the output of a matrix product, not a leaf. Backward runs once.

    Args:
        logits: [N, V], any float dtype; computed in float32.
        token_ids: [N] or [N, M] int64, in the whole vocabulary.
        temperature: [N] float32; None: 1.
        has_entropy_gradient: False: entropies are constants.
        vocab_start: the first id of this rank's part of the vocabulary.
        group: ranks that hold the other parts; None: this one holds all of it.
        block_size: numbers computed at once; None: what suits the device.

    The entropy is that of the bonus of A3C, arXiv:1602.01783, section 4: exact, over the whole
    vocabulary, not an estimate from sampled tokens.

    Returns:
        Logprobs of the shape of `token_ids` and entropies [N], both float32, the same on every rank
        of `group`.
    """
    ids_NM = token_ids if token_ids.dim() == 2 else token_ids[:, None]
    logprobs_NM, entropies = _TokenStatistics.apply(
        logits, ids_NM, temperature, has_entropy_gradient, vocab_start, group, block_size
    )
    return logprobs_NM.view(token_ids.shape), entropies


def renormalised(logprobs: Tensor, among: Tensor, is_kept: Tensor) -> Tensor:
    """log p(token | one of the kept ids) = log p(token) - log of the sum of p over the kept ids.

    Where top-p, top-k, min-p or a grammar cut the distribution that a token was sampled from, this
    is its logprob under the same cut of other weights: DeepSeek-V3.2, arXiv:2512.02556, "keep
    sampling mask". The gradient is exact; none reaches an id that was cut off.

    Args:
        logprobs: [N], over the whole vocabulary.
        among: [N, K], of the ids that the tokens were sampled among, the token's own included.
        is_kept: [N, K] bool, False for padding; a row without True keeps its logprob.
    """
    has_any = is_kept.any(-1, keepdim=True)
    # Rows without any get zeros, not -inf, whose gradient would be NaN.
    kept = among.masked_fill(~is_kept, -torch.inf).masked_fill(~has_any, 0.0)
    return logprobs - kept.logsumexp(-1).masked_fill(~has_any.squeeze(-1), 0.0)


@torch.no_grad()
def top_ids(
    logits: Tensor,
    count: int,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The ids of the `count` highest logits of each row, highest first: [N, count] int64.

    Args:
        logits: [N, V].
        vocab_size: ids from there on are left out; at least `count`.
        vocab_start, group: see `logprobs_and_entropies`.
    """
    own = logits[:, : max(0, vocab_size - vocab_start)]
    here = min(count, own.shape[1])
    values = logits.new_full((len(logits), count), -torch.inf, dtype=torch.float32)
    ids = torch.zeros_like(values, dtype=torch.int64)
    found = own.topk(here, dim=-1)
    values[:, :here], ids[:, :here] = found.values.float(), found.indices + vocab_start
    if group is None:
        return ids
    size = dist.get_world_size(group)
    all_values = [torch.empty_like(values) for _ in range(size)]
    all_ids = [torch.empty_like(ids) for _ in range(size)]
    dist.all_gather(all_values, values, group=group)
    dist.all_gather(all_ids, ids, group=group)
    best = torch.cat(all_values, 1).topk(count, dim=-1).indices
    return torch.cat(all_ids, 1).gather(1, best)


class _TokenStatistics(torch.autograd.Function):
    """See `logprobs_and_entropies`; with p the softmax, l the logprob, H the entropy, by logit j:
    dl/dj = [j sampled] - p_j and dH/dj = -p_j (log p_j + H), both over the temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        token_ids: Tensor,
        temperature: Tensor | None,
        has_entropy_gradient: bool,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        block_size: int | None,
    ) -> tuple[Tensor, Tensor]:
        num_ids = token_ids.shape[1]
        sums = logits.new_zeros((2 + num_ids, len(logits)), dtype=torch.float32)
        places, is_here = _places(token_ids, vocab_start, logits.shape[1])
        highest = _highest(logits, temperature, group)
        for rows in _blocks(logits, block_size):
            block = _scaled(logits, temperature, rows).sub_(highest[rows, None])
            sums[2:, rows] = block.gather(1, places[rows]).mul_(is_here[rows]).T
            weights = block.exp()
            sums[0, rows] = weights.sum(-1)
            # exp(-inf) * -inf is 0 here: a token that cannot be sampled adds nothing.
            sums[1, rows] = weights.mul_(block.clamp_(min=torch.finfo(torch.float32).min)).sum(-1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        logprobs = (sums[2:] - log_total).T.contiguous()
        entropies = log_total - sums[1] / sums[0]
        ctx.save_for_backward(logits, places, is_here, temperature, highest + log_total, entropies)
        ctx.has_entropy_gradient = has_entropy_gradient
        ctx.block_size = block_size
        if not has_entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, places, is_here, temperature, log_total, entropies = ctx.saved_tensors
        total = by_logprob.sum(-1)
        for rows in _blocks(logits, ctx.block_size):
            log_p = _scaled(logits, temperature, rows).sub_(log_total[rows, None])
            p = log_p.exp()
            if ctx.has_entropy_gradient:
                log_p.clamp_(min=torch.finfo(torch.float32).min).add_(entropies[rows, None])
                factor = log_p.mul_(by_entropy[rows, None]).add_(total[rows, None])
                p.mul_(factor.neg_())
            else:
                p.mul_(-total[rows, None])
            p.scatter_add_(1, places[rows], by_logprob[rows] * is_here[rows])
            if temperature is not None:
                p.div_(temperature[rows, None])
            logits[rows] = p
        return logits, None, None, None, None, None, None


def _places(token_ids: Tensor, vocab_start: int, size: int) -> tuple[Tensor, Tensor]:
    """Each token's column in this rank's part, and 1 where it has one, else 0."""
    columns = token_ids - vocab_start
    is_here = (columns >= 0) & (columns < size)
    return columns.clamp(0, max(0, size - 1)), is_here.float()


def _highest(logits: Tensor, temperature: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
    """The largest scaled logit of every row [N], over all parts; a part may have no columns."""
    highest = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
    if logits.numel():
        highest = logits.max(-1).values.float()
    if temperature is not None:
        highest = highest / temperature
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest


def _scaled(logits: Tensor, temperature: Tensor | None, rows: slice) -> Tensor:
    """A block in float32, over its temperatures; a copy."""
    block = logits[rows].to(torch.float32, copy=True)
    return block if temperature is None else block.div_(temperature[rows, None])


def _blocks(logits: Tensor, block_size: int | None) -> list[slice]:
    if not logits.numel():
        return []
    num_numbers = block_size or _BLOCK.get(logits.device.type, _BLOCK["cuda"])
    size = max(1, num_numbers // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
