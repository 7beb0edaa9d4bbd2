"""Rows of a batch as the tensors of a microbatch.

The arrays of `Targets` are parallel: index n is the n-th trained token of the row.

Shape letters: T tokens of a packed row, N trained tokens in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outloop.buffer.errors import RecordError
from outloop.buffer.records import Float32, Int32
from outloop.buffer.routed_experts import RoutingShape
from outloop.engine.train.data.context_parallel import ContextPlace
from outloop.engine.train.data.supports import Supports
from outloop.engine.train.data.train_batch import TrainBatch
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
    teacher_logprobs_N: Tensor | None = None
    """[N] float32; None without a teacher."""
    teacher_top_ids_NK: Tensor | None = None
    """[N, K] int64; None: not asked for."""
    teacher_top_logprobs_NK: Tensor | None = None
    """[N, K] float32."""
    values_N: Tensor | None = None
    """[N] float32; None without a critic."""
    returns_N: Tensor | None = None
    """[N] float32; None without a critic."""
    supports_N: Supports | None = None
    """[N]: among which ids each was sampled; None: all among the whole vocabulary."""
    places_N: Tensor | None = None
    """[N] int64: which token of the batch each is; None: not of a batch."""

    @property
    def scored_ids(self) -> Tensor:
        """[N] the trained tokens, or [N, 1 + K] with the teacher's behind each."""
        if self.teacher_top_ids_NK is None:
            return self.token_ids_N
        return torch.cat([self.token_ids_N[:, None], self.teacher_top_ids_NK], dim=1)

    def part(self, where: slice) -> Targets:
        """The same for some of the tokens."""
        supports = None if self.supports_N is None else self.supports_N[where]
        return dataclasses.replace(self._tensors(where), supports_N=supports)

    def at(self, where: Tensor) -> Targets:
        """The same for tokens where `where` [N] is True, without their supports."""
        return self._tensors(where)

    def _tensors(self, where: slice | Tensor) -> Targets:
        part: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            values = getattr(self, item.name)
            part[item.name] = values[where] if isinstance(values, Tensor) else None
        return Targets(**part)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples laid behind each other, with the facts of the tokens that are trained.

    With context parallelism T and N are this rank's share.
    """

    row: PackedRow
    num_tokens: int
    """Tokens of samples: T without padding."""
    rows: tuple[int, ...]
    """Which rows of the batch the samples are; padding, if there is any, is one sample more."""
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
    batch: TrainBatch,
    rows: Sequence[int],
    device: torch.device,
    *,
    multiple: int = 1,
    layers: LayerKind = "local",
    context: ContextPlace = _ALONE,
    routing: RoutingShape | None = None,
) -> Microbatch:
    """Lay `rows` of `batch` behind each other, padded to a multiple of `multiple`.

    Without rows there is padding alone. Padding is a sample of its own that is not trained. With
    context parallelism each sample also has untrained tokens behind it, and the microbatch is this
    rank's share of the row: a trained token is where the token before it is.

    Args:
        routing: of the model's routers, where it has experts.
    """
    sources = _sources(batch, rows, context=context, multiple=multiple)
    lengths = [len(source) for source in sources]
    source = np.concatenate(sources)
    is_real = source >= 0
    places = context.places(lengths)
    mask = np.zeros(len(source), np.bool_)
    mask[is_real] = batch.loss_mask[source[is_real]]
    all_trained = np.flatnonzero(mask)
    is_here, predictors = _predictors(all_trained, places, len(source))
    trained = all_trained[is_here]
    token_ids = np.zeros(len(source), np.int64)
    token_ids[is_real] = batch.token_ids[source[is_real]]
    temperature = batch.temperature[source[trained]]

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    def known(column: Float32 | Int32 | None) -> Tensor | None:
        """A column at the trained tokens, if there is one."""
        return None if column is None else tensor(column[source[trained]])

    top_ids = known(batch.teacher_top_ids)
    return Microbatch(
        row=pack_row(
            lengths,
            device,
            layers=layers,
            places=places,
            routes=_routes(batch, source[places], routing),
        ),
        num_tokens=int(is_real[places].sum()),
        rows=tuple(rows),
        num_samples=len(sources),
        num_trained_tokens=len(all_trained),
        token_ids_T=tensor(token_ids[places]),
        predictors_N=tensor(predictors),
        sequences_N=tensor(np.repeat(np.arange(len(sources)), lengths)[trained]),
        trained_N=tensor(np.flatnonzero(is_here)),
        targets=Targets(
            token_ids_N=tensor(token_ids[trained]),
            temperature_N=None if (temperature == 1.0).all() else tensor(temperature),
            behavior_logprobs_N=known(batch.behavior_logprobs),
            advantages_N=tensor(batch.advantages[source[trained]]),
            policy_versions_N=tensor(batch.policy_versions[source[trained]].astype(np.int64)),
            proximal_logprobs_N=known(batch.proximal_logprobs),
            reference_logprobs_N=known(batch.reference_logprobs),
            correction_N=known(batch.correction),
            teacher_logprobs_N=known(batch.teacher_logprobs),
            teacher_top_ids_NK=None if top_ids is None else top_ids.long(),
            teacher_top_logprobs_NK=known(batch.teacher_top_logprobs),
            values_N=known(batch.values),
            returns_N=known(batch.returns),
            supports_N=_supports(batch, source[trained]),
            places_N=tensor(source[trained]),
        ),
    )


def _supports(batch: TrainBatch, places: npt.NDArray[np.int64]) -> Supports | None:
    """Among which ids the tokens at `places` were sampled, if any of them was among some."""
    found = None if batch.supports is None else batch.supports.at(places)
    return found if found is not None and len(found.ids) else None


def _routes(
    batch: TrainBatch, source: npt.NDArray[np.int64], routing: RoutingShape | None
) -> npt.NDArray[np.int16] | None:
    """[T, layers, top_k], -1 where it is not known: where tokens from places `source` were sent."""
    column = batch.routed_experts
    if column is None or routing is None:
        return None
    if column.dtype.itemsize != routing.row_bytes:
        raise RecordError(
            f"routed_experts have {column.dtype.itemsize} bytes a token, {routing} has "
            f"{routing.row_bytes}: they are of another model"
        )
    experts = column.view(routing.dtype).reshape(-1, routing.num_layers, routing.top_k)
    found = np.full((len(source), *experts.shape[1:]), -1, np.int16)
    is_real = source >= 0
    rows = experts[source[is_real]]
    found[is_real] = np.where(rows == routing.unknown, -1, rows.astype(np.int32))
    return found


def _sources(
    batch: TrainBatch, rows: Sequence[int], *, context: ContextPlace, multiple: int
) -> list[npt.NDArray[np.int64]]:
    """Where in `batch` each token of each sample of the row is; -1: padding."""
    sources = []
    for row in rows:
        start, end = batch.starts[row : row + 2].tolist()
        source = np.full(context.padded_length(end - start), -1, np.int64)
        source[: end - start] = np.arange(start, end)
        sources.append(source)
    unit = context.row_multiple(multiple)
    num_padding = -sum(map(len, sources)) % unit or (0 if sources else unit)
    if num_padding:
        sources.append(np.full(num_padding, -1, np.int64))
    return sources


def _predictors(
    trained: np.ndarray, places: np.ndarray, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which trained tokens are predicted here [bool], and from where in this rank's share."""
    local = np.full(num_tokens, -1, np.int64)
    local[places] = np.arange(len(places))
    predictors = local[trained - 1]
    is_here = predictors >= 0
    return is_here, predictors[is_here]
