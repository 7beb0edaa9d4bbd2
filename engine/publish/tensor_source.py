"""Where the tensors of a publish come from: the interface between trainer ranks and publishing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from outloop.buffer.records import Float32
from outloop.engine.publish.buckets.plan import Place, TensorSpec


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

    def leave(self) -> None:
        """All has been read. Tensors on devices that servers share leave them now."""


@runtime_checkable
class DeviceSource(TensorSource, Protocol):
    """Tensors of trainer ranks that can each stage whole buckets on their own device."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """Of each rank, as CUDA_VISIBLE_DEVICES names it; empty where that is not known."""

    def stage(
        self, places: Sequence[Place], *, index: int, num_bytes: int, num_readers: Sequence[int]
    ) -> tuple[Tensor, list[list[str]]]:
        """Have every rank put the bucket together on its device, in room for `num_bytes`.

        The memory of bucket `index` is written again by bucket `index` + 2.

        Returns the bucket as rank 0 holds it, uint8 [bytes], and for each rank as many payloads
        (flattened_bucket.py) as it has readers.
        """

    def end_staging(self) -> None:
        """The publish is over; readers are done."""
