"""Logprobs of recorded tokens under fixed weights, and what the take's samples make of them.

Owns: proximal and reference logprobs, and the off-policy weights of samples. Does not own: the
weights that score, the formulas (corrections, losses). Invariant: rows are packed, computed and
cut into chunks as in an update, in the same precision, so that before the first update the ratio
policy / proximal is 1 to rounding (6.1 rule 12).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain

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
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.megatron.model_and_optimizer import PolicyModel
from outloop.engine.train.megatron.parallel_rank import data_rank, is_reporting_rank
from outloop.engine.train.megatron.pipeline_schedule import deal_samples, run_microbatches
from outloop.engine.train.ranks.collectives import gather_bytes
from outloop.engine.train.step.policy_update import trained_statistics

Score = Callable[[Sequence[Sample]], list[Float32]]
"""Samples -> logprobs [T] of each; 0 at context tokens."""


@torch.no_grad()
def score(
    model: PolicyModel,
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    on_microbatch: Callable[[], None],
) -> list[Float32]:
    """Logprobs of the samples' trained tokens at their recorded temperature, on every rank.

    Args:
        max_tokens: trainer.max_microbatch_tokens, as in the update.
        on_microbatch: called before every forward, for heartbeats.

    Returns:
        [T] float32 for every sample, 0 at context tokens.
    """
    mine: list[bytes] = []

    def on_hidden(batch: Microbatch, hidden: Tensor) -> None:
        found = hidden.new_zeros(batch.num_trained_tokens, dtype=torch.float32)
        logprobs, _ = trained_statistics(model, batch, hidden)
        found[batch.trained_N] = logprobs
        mine.append(found.cpu().numpy().tobytes())

    dealt = deal_samples(samples, model.config, max_tokens=max_tokens)
    run_microbatches(
        model,
        model.config,
        samples,
        dealt[data_rank()],
        on_hidden,
        on_microbatch=on_microbatch,
        forward_only=True,
    )
    told = msgspec.msgpack.encode((data_rank(), b"".join(mine))) if is_reporting_rank() else b""
    results = [np.zeros(sample.num_tokens, np.float32) for sample in samples]
    for data in filter(None, gather_bytes(told)):
        rank, logprobs = msgspec.msgpack.decode(data, type=tuple[int, bytes])
        _fill(results, samples, dealt[rank], np.frombuffer(logprobs, np.float32))
    return results


def _fill(
    results: Sequence[Float32],
    samples: Sequence[Sample],
    members: Sequence[Sequence[int]],
    logprobs: Float32,
) -> None:
    """Add a rank's logprobs, in the order of its microbatches, to their rows.

    They are 0 at tokens that another context-parallel rank computed.
    """
    start = 0
    for index in chain.from_iterable(members):
        end = start + samples[index].num_trained_tokens
        results[index][samples[index].loss_mask] += logprobs[start:end]
        start = end


def with_references(samples: Sequence[Sample], score_reference: Score) -> list[Sample]:
    """The samples with reference_logprobs."""
    return [
        dataclasses.replace(sample, reference_logprobs=logprobs)
        for sample, logprobs in zip(samples, score_reference(samples), strict=True)
    ]


def with_proximals(
    updates: Sequence[Sequence[Sample]], settings: TrainerSettings, score_policy: Score
) -> tuple[list[list[Sample]], dict[str, float]]:
    """The samples of a take's updates with proximal_logprobs and correction, and its metrics.

    To be called before the first of the updates.
    """
    corrections: list[Correction] = []
    results: list[list[Sample]] = []
    for samples in updates:
        results.append([])
        for sample, proximal in zip(samples, score_policy(samples), strict=True):
            correction = _correction(sample, proximal, settings)
            corrections.append(correction)
            weights = np.ones(sample.num_tokens, np.float32)
            weights[sample.loss_mask] = correction.weights
            results[-1].append(
                dataclasses.replace(
                    sample,
                    proximal_logprobs=proximal,
                    correction=None if settings.correction == "none" else weights,
                )
            )
    return results, correction_metrics(corrections)


def _correction(sample: Sample, proximal: Float32, settings: TrainerSettings) -> Correction:
    assert sample.behavior_logprobs is not None
    return correct(
        proximal[sample.loss_mask].astype(np.float64),
        sample.behavior_logprobs[sample.loss_mask].astype(np.float64),
        kind=settings.correction,
        cap=settings.correction_cap,
        floor=settings.correction_floor,
        veto=settings.correction_veto,
    )


def mean_kl(samples: Sequence[Sample]) -> float:
    """Mean over trained tokens of behavior - reference logprob (k1); NaN without tokens."""
    gaps = [
        (sample.behavior_logprobs - sample.reference_logprobs)[sample.loss_mask]
        for sample in samples
        if sample.behavior_logprobs is not None and sample.reference_logprobs is not None
    ]
    values = np.concatenate(gaps) if gaps else np.zeros(0)
    return float(values.mean(dtype=np.float64)) if len(values) else float("nan")
