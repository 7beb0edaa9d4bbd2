"""A source of tensors that are all in this process."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.buffer.records import Float32
from outloop.engine.publish.buckets.plan import TensorSpec

Score = Callable[[Sequence[Sequence[int]]], Sequence[Float32]]
"""Prompts -> logprobs [T - 1] of the ids of each, the first aside."""


class LocalTensors:
    """A `TensorSource` over a mapping, whose values may change between publishes."""

    def __init__(self, tensors: Mapping[str, Tensor], score: Score | None = None) -> None:
        self._tensors = tensors
        self._score = score
        self.num_left = 0
        """Times that they were told to leave a shared device."""
        self.specs: Sequence[TensorSpec] = tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in tensors.items()
        )

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """The tensors of a bucket, in this process's own memory."""
        for spec in specs:
            yield self._tensors[spec.name].detach()

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> Sequence[Float32]:
        """By the function given."""
        if self._score is None:
            raise PublishFailed("this source cannot score a prompt")
        return self._score(prompts)

    def leave(self) -> None:
        """They are on no device."""
        self.num_left += 1
