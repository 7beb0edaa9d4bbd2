"""A source of tensors in which things happen between one tensor and the next."""

from collections.abc import Callable, Iterator, Sequence

import torch

from fakes.local_tensors import LocalTensors
from outloop.engine.publish.buckets.plan import TensorSpec


class InterruptedTensors:
    """A source that calls `before(index)` before it gives tensor `index`."""

    def __init__(self, tensors: dict[str, torch.Tensor], before: Callable[[int], None]) -> None:
        self._tensors = LocalTensors(tensors)
        self._before = before
        self._index = 0

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """As planned."""
        return self._tensors.specs

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[torch.Tensor] | None = None
    ) -> Iterator[torch.Tensor]:
        """One tensor after the other."""
        for tensor in self._tensors.read(specs, into):
            self._before(self._index)
            self._index += 1
            yield tensor

    def leave(self) -> None:
        """They are on no device."""
