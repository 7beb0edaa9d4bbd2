"""Samples as the tensors of a microbatch.

Owns: the packed row of some samples and what is known of their trained tokens. Does not own: which
samples share a row (pack), what is computed from them (update, scoring). Invariant: the arrays of
`Targets` are parallel: index n is the n-th trained token of the row.

Shape letters: T tokens of a packed row, N trained tokens in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outloop.buffer.records import Float32
from outloop.engine.train.data.context_parallel import ContextPlace
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.megatron.layer_kind import LayerKind
from outloop.engine.train.megatron.layers import PackedRow, pack_row


@dataclass(frozen=True, slots=True)
class Targets:
    """What is known of the trained tokens of a microbatch."""

    token_ids_N: Tensor
    """[N] int64."""
    temperature_N: Tensor | None
    """[N] float32; None when all are 1."""
    behavior_logprobs_N: Tensor | None
    """[N] float32; None for SFT."""
    advantages_N: Tensor
    """[N] float32."""
    policy_versions_N: Tensor
    """[N] int64."""
    proximal_logprobs_N: Tensor | None = None
    """[N] float32; None: behavior_logprobs_N."""
    reference_logprobs_N: Tensor | None = None
    """[N] float32."""
    correction_N: Tensor | None = None
    """[N] float32; None: all 1."""
    token_weight_N: Tensor | None = None
    """[N] float32; None: all 1."""

    def part(self, where: slice) -> Targets:
        """The same for some of the tokens."""
        part: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            values = getattr(self, item.name)
            part[item.name] = None if values is None else values[where]
        return Targets(**part)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples laid behind each other, with the facts of the tokens that are trained.

    With context parallelism T and N are this rank's share.
    """

    row: PackedRow
    num_tokens: int
    """Tokens of samples: T without padding."""
    num_samples: int
    """Padding included, on all context-parallel ranks."""
    num_trained_tokens: int
    """On all context-parallel ranks."""
    token_ids_T: Tensor
    """[T] int64."""
    predictors_N: Tensor
    """[N] int64: positions whose logits predict the trained tokens."""
    sequences_N: Tensor
    """[N] int64: which sample of the microbatch a trained token belongs to."""
    trained_N: Tensor
    """[N] int64: which of the samples' trained tokens it is, in their order."""
    targets: Targets


_ALONE = ContextPlace()


def build_microbatch(
    samples: Sequence[Sample],
    device: torch.device,
    *,
    multiple: int = 1,
    layers: LayerKind = "local",
    context: ContextPlace = _ALONE,
) -> Microbatch:
    """Lay `samples` behind each other in one packed row, padded to a multiple of `multiple`.

    Without samples the row is padding alone. Padding is a sample of its own that is not trained.
    With context parallelism each sample also has untrained tokens behind it, and the microbatch
    is this rank's share of the row: a trained token is where the token before it is.
    """
    real_lengths = [sample.num_tokens for sample in samples]
    samples = _padded(samples, context=context, multiple=multiple)
    lengths = [sample.num_tokens for sample in samples]
    real_lengths += [0] * (len(lengths) - len(real_lengths))
    places = context.places(lengths)
    mask = np.concatenate([sample.loss_mask for sample in samples])
    all_trained = np.flatnonzero(mask)
    is_here, predictors = _predictors(all_trained, places, sum(lengths))
    trained = all_trained[is_here]
    token_ids = np.concatenate([sample.token_ids for sample in samples]).astype(np.int64)
    temperature = np.concatenate([sample.temperature for sample in samples])[trained]
    versions = np.concatenate([sample.policy_versions for sample in samples])[trained]
    sequences = np.repeat(np.arange(len(samples)), lengths)[trained]
    weights = np.array([sample.token_weight for sample in samples], np.float32)[sequences]

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    def recorded(name: str) -> Tensor | None:
        """A row's field at the trained tokens, if the samples have it."""
        rows = [row for sample in samples if (row := getattr(sample, name)) is not None]
        return tensor(np.concatenate(rows)[trained]) if rows else None

    return Microbatch(
        row=pack_row(lengths, device, layers=layers, places=places),
        num_tokens=_num_real(real_lengths, lengths, places),
        num_samples=len(samples),
        num_trained_tokens=len(all_trained),
        token_ids_T=tensor(token_ids[places]),
        predictors_N=tensor(predictors),
        sequences_N=tensor(sequences),
        trained_N=tensor(np.flatnonzero(is_here)),
        targets=Targets(
            token_ids_N=tensor(token_ids[trained]),
            temperature_N=None if (temperature == 1.0).all() else tensor(temperature),
            behavior_logprobs_N=recorded("behavior_logprobs"),
            advantages_N=tensor(np.array([s.advantage for s in samples], np.float32)[sequences]),
            policy_versions_N=tensor(versions.astype(np.int64)),
            proximal_logprobs_N=recorded("proximal_logprobs"),
            reference_logprobs_N=recorded("reference_logprobs"),
            correction_N=recorded("correction"),
            token_weight_N=None if (weights == 1.0).all() else tensor(weights),
        ),
    )


def _predictors(
    trained: np.ndarray, places: np.ndarray, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which trained tokens are predicted here [bool], and from where in this rank's share."""
    local = np.full(num_tokens, -1, np.int64)
    local[places] = np.arange(len(places))
    predictors = local[trained - 1]
    is_here = predictors >= 0
    return is_here, predictors[is_here]


def _num_real(real_lengths: Sequence[int], lengths: Sequence[int], places: np.ndarray) -> int:
    """How many of the tokens at `places` are no padding."""
    is_real = [np.arange(n) < real for real, n in zip(real_lengths, lengths, strict=True)]
    return int(np.concatenate(is_real)[places].sum())


def _padded(samples: Sequence[Sample], *, context: ContextPlace, multiple: int) -> Sequence[Sample]:
    """The samples with what the row's split over ranks needs behind each and behind all."""
    samples = [_lengthened(s, context.padded_length(s.num_tokens)) for s in samples]
    unit = context.row_multiple(multiple)
    num_padding = -sum(s.num_tokens for s in samples) % unit or (0 if samples else unit)
    if not num_padding:
        return samples
    return [*samples, _padding(num_padding, like=samples[0] if samples else None)]


def _lengthened(sample: Sample, length: int) -> Sample:
    """The sample with untrained tokens behind it."""
    if length == sample.num_tokens:
        return sample
    behind = _padding(length - sample.num_tokens, like=sample)
    rows: dict[str, Any] = {}
    for item in dataclasses.fields(Sample):
        value = getattr(sample, item.name)
        if isinstance(value, np.ndarray):
            rows[item.name] = np.concatenate((value, getattr(behind, item.name)))
    return dataclasses.replace(sample, **rows)


def _padding(num_tokens: int, *, like: Sample | None) -> Sample:
    """A sample without trained tokens, with the same recorded fields as its neighbours."""
    zeros = np.zeros(num_tokens, np.float32)

    def recorded(name: str) -> Float32 | None:
        return zeros if getattr(like, name, None) is not None else None

    return Sample(
        episode_id="",
        group_id="",
        branch=0,
        token_ids=np.zeros(num_tokens, np.int32),
        loss_mask=np.zeros(num_tokens, np.bool_),
        behavior_logprobs=zeros if like is None else recorded("behavior_logprobs"),
        policy_versions=np.full(num_tokens, -1, np.int32),
        temperature=np.ones(num_tokens, np.float32),
        advantage=0.0,
        proximal_logprobs=recorded("proximal_logprobs"),
        reference_logprobs=recorded("reference_logprobs"),
        correction=recorded("correction"),
    )
