"""Samples as the tensors of a microbatch.

Owns: the packed row of some samples and what is known of their trained tokens. Does not own: which
samples share a row (pack), what is computed from them (update, scoring). Invariant: the arrays of
`Targets` are parallel: index n is the n-th trained token of the row.

Shape letters: T tokens of a packed row, N trained tokens in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outloop.engine.train.layers import PackedRow, pack_row
from outloop.engine.train.pack import pack
from outloop.engine.train.samples import Sample


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
    sequence_log_ratios_N: Tensor | None = None
    """[N] float32, mean of policy - proximal logprobs over the token's sequence; GSPO only."""

    def part(self, where: slice) -> Targets:
        """The same for some of the tokens."""
        part: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            values = getattr(self, item.name)
            part[item.name] = None if values is None else values[where]
        return Targets(**part)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples laid behind each other, with the facts of the tokens that are trained."""

    row: PackedRow
    token_ids_T: Tensor
    """[T] int64."""
    predictors_N: Tensor
    """[N] int64: positions whose logits predict the trained tokens."""
    sequences_N: Tensor
    """[N] int64: which sample of the microbatch a trained token belongs to."""
    targets: Targets


def build_microbatch(samples: Sequence[Sample], device: torch.device) -> Microbatch:
    """Lay `samples` behind each other in one packed row."""
    mask = np.concatenate([sample.loss_mask for sample in samples])
    trained = np.flatnonzero(mask)
    token_ids = np.concatenate([sample.token_ids for sample in samples]).astype(np.int64)
    temperature = np.concatenate([sample.temperature for sample in samples])[trained]
    advantages = np.repeat(
        np.array([sample.advantage for sample in samples], np.float32),
        [sample.num_trained_tokens for sample in samples],
    )
    versions = np.concatenate([sample.policy_versions for sample in samples])[trained]
    counts = [sample.num_trained_tokens for sample in samples]
    weights = np.repeat(np.array([s.token_weight for s in samples], np.float32), counts)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    def recorded(name: str) -> Tensor | None:
        """A row's field at the trained tokens, if the samples have it."""
        rows = [row for sample in samples if (row := getattr(sample, name)) is not None]
        return tensor(np.concatenate(rows)[trained]) if rows else None

    return Microbatch(
        row=pack_row([sample.num_tokens for sample in samples], device),
        token_ids_T=tensor(token_ids),
        predictors_N=tensor(trained - 1),
        sequences_N=tensor(np.repeat(np.arange(len(samples)), counts)),
        targets=Targets(
            token_ids_N=tensor(token_ids[trained]),
            temperature_N=None if (temperature == 1.0).all() else tensor(temperature),
            behavior_logprobs_N=recorded("behavior_logprobs"),
            advantages_N=tensor(advantages),
            policy_versions_N=tensor(versions.astype(np.int64)),
            proximal_logprobs_N=recorded("proximal_logprobs"),
            reference_logprobs_N=recorded("reference_logprobs"),
            correction_N=recorded("correction"),
            token_weight_N=None if (weights == 1.0).all() else tensor(weights),
        ),
    )


def microbatches(
    samples: Sequence[Sample], *, max_tokens: int, device: torch.device
) -> Iterator[Microbatch]:
    """The update's samples, packed; built one at a time."""
    for members in pack([sample.num_tokens for sample in samples], max_tokens=max_tokens):
        yield build_microbatch([samples[index] for index in members], device)
