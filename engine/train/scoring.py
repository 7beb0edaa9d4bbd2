"""Logprobs of recorded tokens under fixed weights, and what the take's samples make of them.

Owns: proximal and reference logprobs, and the off-policy weights of samples. Does not own: the
weights that score, the formulas (corrections, losses). Invariant: rows are packed, computed and
cut into chunks as in an update, in the same precision, so that before the first update the ratio
policy / proximal is 1 to rounding (6.1 rule 12).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from outloop.buffer.records import Float32
from outloop.buffer.settings_trainer import TrainerSettings
from outloop.engine.train.corrections import Correction, correct, correction_metrics
from outloop.engine.train.mcore import PolicyModel
from outloop.engine.train.microbatch import build_microbatch
from outloop.engine.train.pack import pack
from outloop.engine.train.samples import Sample
from outloop.engine.train.update import trained_logprobs

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
    """Logprobs of the samples' trained tokens at their recorded temperature.

    Args:
        max_tokens: trainer.max_microbatch_tokens, as in the update.
        on_microbatch: called after every forward, for heartbeats.

    Returns:
        [T] float32 for every sample, 0 at context tokens.
    """
    device = next(model.parameters()).device
    results = [np.zeros(sample.num_tokens, np.float32) for sample in samples]
    for members in pack([sample.num_tokens for sample in samples], max_tokens=max_tokens):
        batch = build_microbatch([samples[index] for index in members], device)
        hidden = model(batch.token_ids_T, batch.row, batch.predictors_N)
        logprobs = trained_logprobs(model, batch, hidden).cpu().numpy()
        start = 0
        for index in members:
            end = start + samples[index].num_trained_tokens
            results[index][samples[index].loss_mask] = logprobs[start:end]
            start = end
        on_microbatch()
    return results


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
