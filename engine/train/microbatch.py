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
from outloop.engine.train.layer_kind import LayerKind
from outloop.engine.train.layers import PackedRow, pack_row
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
    num_tokens: int
    """Tokens of samples: T without padding."""
    token_ids_T: Tensor
    """[T] int64."""
    predictors_N: Tensor
    """[N] int64: positions whose logits predict the trained tokens."""
    sequences_N: Tensor
    """[N] int64: which sample of the microbatch a trained token belongs to."""
    targets: Targets


def build_microbatch(
    samples: Sequence[Sample],
    device: torch.device,
    *,
    multiple: int = 1,
    layers: LayerKind = "local",
) -> Microbatch:
    """Lay `samples` behind each other in one packed row, padded to a multiple of `multiple`.

    Without samples the row is padding alone. Padding is a sample of its own that is not trained.
    """
    num_real = sum(sample.num_tokens for sample in samples)
    num_padding = -num_real % multiple or (0 if samples else multiple)
    lengths = [sample.num_tokens for sample in samples]
    if num_padding:
        samples = [*samples, _padding(num_padding, like=samples[0] if samples else None)]
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
        row=pack_row([*lengths, num_padding] if num_padding else lengths, device, layers=layers),
        num_tokens=num_real,
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
