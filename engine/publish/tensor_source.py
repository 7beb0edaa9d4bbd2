"""Where the tensors of a publish come from.

Owns: the interface between trainer ranks and publishing, and a source over tensors of this process.
Does not own: gathering of shards (engine.train), buckets (plan).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.buffer.records import Float32
from outloop.engine.publish.buckets.plan import TensorSpec

Score = Callable[[Sequence[Sequence[int]]], Sequence[Float32]]
"""Prompts -> logprobs [T - 1] of the ids of each, the first aside."""


class TensorSource(Protocol):
    """All tensors of a model under their Hugging Face names, gathered a bucket at a time.

    With several trainer ranks this is rank 0's: inside `read` it makes the other ranks take part in
    gathering that bucket.
    """

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the order in which it will be read; the dtype is the trainer's."""

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[Tensor] | None = None
    ) -> Iterable[Tensor]:
        """The full tensors of one bucket, one at a time and in this order.

        `into` is where each will be copied, of its shape and any dtype: a source that puts a tensor
        together writes it there and gives that very place. Any other tensor is copied before the
        next is asked for, so it need not be kept.
        """

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> Sequence[Float32]:
        """Logprobs [T - 1] at temperature 1 of every prompt's ids, the first aside.

        Under the weights as they are read. Asked for by `publish.verify = "probe"` alone.
        """


class LocalTensors:
    """A source over tensors that are all in this process."""

    def __init__(self, tensors: Mapping[str, Tensor], score: Score | None = None) -> None:
        """Over a mapping, whose values may change between publishes."""
        self._tensors = tensors
        self._score = score
        self.specs: Sequence[TensorSpec] = tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in tensors.items()
        )

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], score: Score | None = None) -> LocalTensors:
        """Over a mapping."""
        return cls(tensors, score)

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """The tensors of a bucket, in this process's own memory.

        Raises:
            PublishFailed: a tensor is gone, or has another shape than `specs` said.
        """
        for spec in specs:
            tensor = self._tensors.get(spec.name)
            if tensor is None or tuple(tensor.shape) != spec.shape:
                shape = None if tensor is None else list(tensor.shape)
                raise PublishFailed(
                    f"the trainer's tensors changed: name={spec.name!r} "
                    f"shape={list(spec.shape)} was planned, shape={shape} is there"
                )
            yield tensor.detach()

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> Sequence[Float32]:
        """By the function given.

        Raises:
            PublishFailed: no function was given.
        """
        if self._score is None:
            raise PublishFailed(
                'this source cannot score a prompt, which publish.verify="probe" asks for; '
                'set publish.verify to "checksum" or "none"'
            )
        return self._score(prompts)
