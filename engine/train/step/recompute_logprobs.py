"""Proximal and reference logprobs of recorded tokens, and the off-policy weights of samples.

Rows are packed, computed and cut into chunks as in an update, in the same precision, so that before
the first update the ratio policy / proximal is 1 to rounding (6.1 rule 12).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from outloop.buffer.records import Float32
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.algorithms.importance_weights import (
    Correction,
    correct,
    correction_metrics,
)
from outloop.engine.train.data.microbatch import Microbatch
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import PolicyModel
from outloop.engine.train.megatron.parallel_rank import data_rank, is_reporting_rank
from outloop.engine.train.megatron.pipeline_schedule import deal_rows, run_microbatches
from outloop.engine.train.ranks.collectives import gather_bytes
from outloop.engine.train.step.policy_update import trained_statistics


def logprobs_of(model: PolicyModel, microbatch: Microbatch, hidden_NH: Tensor) -> Tensor:
    """[N] at the recorded temperature."""
    targets = dataclasses.replace(microbatch.targets, teacher_top_ids_NK=None)
    return trained_statistics(model, targets, hidden_NH)[0]


@torch.no_grad()
def score(
    model: PolicyModel,
    batch: TrainBatch,
    *,
    rows: Sequence[int] | None = None,
    max_tokens: int,
    on_microbatch: Callable[[], None],
    statistic: Callable[[Any, Microbatch, Tensor], Tensor] = logprobs_of,
    width: int = 0,
) -> Float32:
    """One number for each of the rows' trained tokens, on every rank: their logprobs, unless
    something else is asked for.

    Args:
        rows: which rows to compute; None: all.
        statistic: of the model, a microbatch and its hidden states [N, H] -> [N] float32, or
            [N, width].
        width: numbers for each token; 0: one, without a dimension of its own.
        max_tokens: trainer.max_microbatch_tokens, as in the update.
        on_microbatch: called before every forward, for heartbeats.

    Returns:
        [T] or [T, width] float32, a column of `batch`: 0 at context tokens and in other rows.
    """
    shape = (width,) if width else ()
    rows = range(len(batch)) if rows is None else rows
    mine: list[bytes] = []

    def on_hidden(microbatch: Microbatch, hidden: Tensor) -> None:
        found = hidden.new_zeros((microbatch.num_trained_tokens, *shape), dtype=torch.float32)
        found[microbatch.trained_N] = statistic(model, microbatch, hidden)
        mine.append(found.cpu().numpy().tobytes())

    all_lengths = batch.lengths
    dealt = [
        [[rows[index] for index in part] for part in members]
        for members in deal_rows(
            [all_lengths[row] for row in rows], model.config, max_tokens=max_tokens
        )
    ]
    run_microbatches(
        model,
        model.config,
        batch,
        dealt[data_rank()],
        on_hidden,
        on_microbatch=on_microbatch,
        forward_only=True,
    )
    share = msgspec.msgpack.encode((data_rank(), b"".join(mine))) if is_reporting_rank() else b""
    column = np.zeros((*batch.token_ids.shape, *shape), np.float32)
    for data in filter(None, gather_bytes(share)):
        rank, logprobs = msgspec.msgpack.decode(data, type=tuple[int, bytes])
        numbers = np.frombuffer(logprobs, np.float32).reshape(-1, *shape)
        _fill(column, batch, dealt[rank], numbers)
    return column


def _fill(
    column: Float32,
    batch: TrainBatch,
    members: Sequence[Sequence[int]],
    logprobs: Float32,
) -> None:
    """Add a rank's logprobs, in the order of its microbatches, to their rows.

    They are 0 at tokens that another context-parallel rank computed.
    """
    first = 0
    for row in chain.from_iterable(members):
        where = slice(batch.starts[row], batch.starts[row + 1])
        mask = batch.loss_mask[where]
        last = first + int(mask.sum())
        column[where][mask] += logprobs[first:last]
        first = last


def with_proximal(
    batch: TrainBatch,
    proximal: Float32,
    settings: TrainerSettings,
    *,
    rows: Sequence[int],
    policy_version: int = 0,
) -> tuple[TrainBatch, dict[str, float]]:
    """The batch with proximal logprobs and the correction's weights, and its metrics.

    Args:
        proximal: [T] of the weights before the take's first update.
        rows: those that were computed; the others are not corrected.
        policy_version: of those weights; masked shares are told by age from it.
    """
    assert batch.behavior_logprobs is not None
    weights = np.ones(batch.token_ids.shape, np.float32)
    corrections: list[Correction] = []
    for row in rows:
        start, end = batch.starts[row : row + 2].tolist()
        mask = batch.loss_mask[start:end]
        if batch.is_imitated[row] or not mask.any():
            continue
        correction = correct(
            proximal[start:end][mask].astype(np.float64),
            batch.behavior_logprobs[start:end][mask].astype(np.float64),
            kind=settings.correction,
            cap=settings.correction_cap,
            floor=settings.correction_floor,
            veto=settings.correction_veto,
            ages=policy_version - batch.policy_versions[start:end][mask].astype(np.int64),
        )
        weights[start:end][mask] = correction.weights
        corrections.append(correction)
    columns = {"proximal_logprobs": proximal}
    if settings.correction != "none":
        columns["correction"] = weights
    return batch.with_columns(**columns), correction_metrics(corrections)
