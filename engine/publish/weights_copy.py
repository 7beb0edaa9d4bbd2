"""One version's weights in host memory, apart from the model that is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.buffer.records import Float32
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.publish.verification.logprob_probe import prompts_for


class WeightsCopy:
    """A `TensorSource` that updates of the model leave as it is, until it is filled again.

    It may be read by one thread while another trains the model; not while it is filled.
    """

    def __init__(self, dtype: torch.dtype, *, is_probed: bool) -> None:
        """Hold nothing.

        Args:
            dtype: of the servers; tensors are kept in it.
            is_probed: `score_prompts` will be asked for the prompts of the probe.
        """
        self._dtype = dtype
        self._is_probed = is_probed
        self._tensors: dict[str, Tensor] = {}
        self._scored: list[tuple[tuple[int, ...], Float32]] = []
        self._specs: tuple[TensorSpec, ...] = ()

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the order in which it was read."""
        return self._specs

    @property
    def num_bytes(self) -> int:
        """What it occupies."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def fill(self, source: TensorSource) -> None:
        """Take the weights of `source` as they are now."""
        specs = list(source.specs)
        if not self._tensors:
            self._specs = tuple(dataclasses.replace(spec, dtype=self._dtype) for spec in specs)
            # Pinned memory is copied to and from a GPU at several times the speed.
            is_pinned = torch.cuda.is_available()
            self._tensors = {
                spec.name: torch.empty(spec.shape, dtype=self._dtype, pin_memory=is_pinned)
                for spec in specs
            }
        places = [self._tensors[spec.name] for spec in specs]
        for place, tensor in zip(places, source.read(specs, places), strict=True):
            if tensor is not place:
                place.copy_(tensor)
        if self._is_probed:
            prompts = prompts_for(specs)
            rows = source.score_prompts(prompts)
            self._scored = [(p, np.array(row)) for p, row in zip(prompts, rows, strict=True)]

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """As they were when it was filled; `into` is not used."""
        for spec in specs:
            yield self._tensors[spec.name]

    def leave(self) -> None:
        """It is on no device."""

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> list[Float32]:
        """As the model scored them when it was filled.

        Raises:
            PublishFailed: they are not the probe's.
        """
        scored = dict(self._scored)
        if any(tuple(prompt) not in scored for prompt in prompts):
            raise PublishFailed("a copy of weights knows the scores of the probe's prompts alone")
        return [scored[tuple(prompt)] for prompt in prompts]
