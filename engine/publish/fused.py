"""Checksums of a model as SGLang holds it: some parameters fused, padded, or cut by rank.

Owns: which Hugging Face tensors make up which of SGLang's parameters. Does not own: SGLang's
checksum (the first 8 bytes of a SHA-256 where it runs without a GPU), what is compared (verify).
Invariant: tensors may come in any order and each is read once; no more is kept than what waits for
its predecessor inside one fused parameter.

Held for Llama, Qwen2.5 and Qwen3 against SGLang 0.5.23. A parameter of several tensors is their
rows one after the other, so its checksum needs no copy of it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.plan import TensorSpec

_NUM_HEX = 16
_VOCAB_MULTIPLE = 64
"""SGLang pads the rows of embedding and head to this many, with zeros."""
_PARTS = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
_BY_COLUMNS = frozenset({"o_proj", "down_proj"})
_PART = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$")
_VOCAB = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(slots=True)
class _Parameter:
    """One parameter on one rank, hashed as its parts come."""

    num_parts: int
    digest: Any = field(default_factory=hashlib.sha256)
    num_hashed: int = 0
    waiting: dict[int, bytes] = field(default_factory=dict)

    def add(self, part: int, content: Tensor) -> None:
        if part == self.num_hashed:
            self._hash(content.numpy().data)
        else:
            self.waiting[part] = content.numpy().tobytes()
        while self.num_hashed in self.waiting:
            self._hash(memoryview(self.waiting.pop(self.num_hashed)))

    def _hash(self, content: memoryview) -> None:
        self.digest.update(content)
        self.num_hashed += 1


class FusedChecksums:
    """The account of one publish for SGLang servers of `num_ranks` tensor-parallel ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: list[dict[str, _Parameter]] = [{} for _ in range(num_ranks)]

    def add(self, spec: TensorSpec, content: Tensor) -> None:
        """Account for a tensor's bytes as sent (uint8).

        Raises:
            PublishFailed: it cannot be cut into `num_ranks` equal shards.
        """
        found = _PART.search(spec.name)
        name, part, num_parts = spec.name, 0, 1
        if found is not None:
            fused, part, num_parts = _PARTS[found[1]]
            name = f"{spec.name[: found.start()]}.{fused}.{found[2]}"
        tensor = content.cpu().view(spec.dtype).view(spec.shape)
        for rank, parameters in enumerate(self._ranks):
            shard = self._shard(spec.name, tensor, rank, is_rows=found is not None)
            flat = shard.contiguous().reshape(-1).view(torch.uint8)
            parameters.setdefault(name, _Parameter(num_parts)).add(part, flat)

    def result(self) -> list[dict[str, str]]:
        """Per rank, the checksum of every parameter by SGLang's name.

        Raises:
            PublishFailed: a part of a fused parameter never came.
        """
        return [
            {name: _finished(name, parameter) for name, parameter in parameters.items()}
            for parameters in self._ranks
        ]

    def _shard(self, name: str, tensor: Tensor, rank: int, *, is_rows: bool) -> Tensor:
        num = self._num_ranks
        if name in _VOCAB:
            rows = -(-len(tensor) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
            padding = tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])
            tensor, dim = torch.cat([tensor, padding]), 0
        elif is_rows:
            dim = 0
        elif tensor.ndim > 1 and name.rpartition(".")[0].endswith(tuple(_BY_COLUMNS)):
            dim = 1
        else:
            return tensor
        if tensor.shape[dim] % num:
            raise PublishFailed(
                f"name={name!r} shape={list(tensor.shape)} cannot be cut into "
                f"server.tensor_parallel_size={num} equal shards along dim={dim}; "
                "set publish.verify to false, or take a size that divides it"
            )
        return tensor.chunk(num, dim)[rank]


def _finished(name: str, parameter: _Parameter) -> str:
    if parameter.num_hashed != parameter.num_parts:
        raise PublishFailed(
            f"SGLang's parameter name={name!r} got {parameter.num_hashed} of its "
            f"{parameter.num_parts} parts; give all of the model's tensors"
        )
    digest: str = parameter.digest.hexdigest()
    return digest[:_NUM_HEX]
