"""Where the tensors of a publish come from.

Owns: the interface between trainer ranks and publishing, and a source over tensors of this process.
Does not own: gathering of shards (engine.train), buckets (plan). Invariant: a publish reads buckets
in the order of `specs`, each tensor at most once per pass, and ends every pass it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.buffer.records import Float32
from outloop.engine.publish.buckets.plan import TensorSpec

NamedTensors = Iterable[tuple[str, Tensor]]
Score = Callable[[Sequence[Sequence[int]]], Sequence[Float32]]
"""Prompts -> logprobs [T - 1] of the ids of each, the first aside."""


class TensorSource(Protocol):
    """All tensors of a model under their Hugging Face names, gathered a bucket at a time.

    With several trainer ranks this is the face of rank 0: inside `read` it makes the other ranks
    take part in gathering that bucket, and by `end` it tells them that no more follow.
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
        next is asked for, so it need not be kept. A pass begins with the first of `specs` and goes
        on with what follows the bucket before.
        """

    def end(self) -> None:
        """The pass is over, complete or not; the next `read` begins another."""

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> Sequence[Float32]:
        """Logprobs [T - 1] at temperature 1 of every prompt's ids, the first aside.

        Under the weights as they are read. Asked for by `publish.verify = "probe"` alone.
        """


class LocalTensors:
    """A source over tensors that are all in this process."""

    def __init__(self, tensors: Callable[[], NamedTensors], score: Score | None = None) -> None:
        """`tensors()` gives every (name, tensor), each time in the same order."""
        self._tensors = tensors
        self._score = score
        self._specs: tuple[TensorSpec, ...] | None = None
        self._pass: Iterator[tuple[str, Tensor]] | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], score: Score | None = None) -> LocalTensors:
        """Over a mapping, as it is whenever it is read."""
        return cls(tensors.items, score)

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor; names, shapes and dtypes are looked at once."""
        if self._specs is None:
            self._specs = tuple(
                TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
                for name, tensor in self._tensors()
            )
        return self._specs

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """The tensors of a bucket, as they lie in this process.

        Raises:
            PublishFailed: the tensors come in another order, or shape, than `specs` said.
        """
        if self._pass is None:
            self._pass = iter(self._tensors())
        for spec in specs:
            name, tensor = next(self._pass, ("the end", None))
            if tensor is None or name != spec.name or tuple(tensor.shape) != spec.shape:
                shape = None if tensor is None else list(tensor.shape)
                raise PublishFailed(
                    f"the trainer's tensors changed: name={spec.name!r} "
                    f"shape={list(spec.shape)} was planned, {name!r} shape={shape} came"
                )
            yield tensor.detach()

    def end(self) -> None:
        """Let go of the pass."""
        self._pass = None

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> Sequence[Float32]:
        """By the function given.

        Raises:
            PublishFailed: there is none.
        """
        if self._score is None:
            raise PublishFailed(
                'this source cannot score a prompt, which publish.verify="probe" asks for; '
                'set publish.verify to "checksum" or "none"'
            )
        return self._score(prompts)
