"""This rank's share of one version's weights, in host memory, apart from the model that is trained
on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.sending.sending_rank import ShareReader


class WeightsCopy:
    """A `ShareReader` that updates of the model leave as it is, until it is filled again.

    It may be read by one thread while another trains the model; not while it is filled.
    """

    def __init__(self, model: ShareReader, dtype: torch.dtype) -> None:
        """Hold nothing.

        Args:
            dtype: of the servers; tensors are kept in it.
        """
        self._model = model
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        self.rank = model.rank
        self.shares = model.shares

    @property
    def num_bytes(self) -> int:
        """What it occupies."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def received_bytes(self) -> int:
        """What came from other ranks when it was filled."""
        return self._model.received_bytes

    def begin(self) -> None:
        """Nothing to do."""

    def fill(self) -> None:
        """Take this rank's share of the weights as they are now; all ranks together."""
        mine = self.shares[self.rank]
        if not self._tensors:
            # Pinned memory is copied to and from a GPU at several times the speed.
            is_pinned = torch.cuda.is_available()
            self._tensors = {
                spec.name: torch.empty(spec.shape, dtype=self._dtype, pin_memory=is_pinned)
                for spec in mine
            }
        places = [self._tensors[spec.name] for spec in mine]
        self._model.begin()
        for place, tensor in zip(places, self._model.read(self.shares, places), strict=True):
            if tensor is not place:
                place.copy_(tensor)

    def read(
        self, specs: Sequence[Sequence[TensorSpec]], into: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """As they were when it was filled; `into` is not used."""
        for spec in specs[self.rank]:
            yield self._tensors[spec.name]
