"""Checksums of a model as SGLang holds it: some parameters fused, padded, or cut by rank.

Tensors may come in any order and each is read once. Only tensors that wait for their predecessor
inside one fused parameter are kept.

Compared with SGLang 0.5.23 for Llama, Qwen2.5, Qwen3, Qwen3-MoE and GLM-4.5. A parameter of several
tensors is their rows one after the other, those of all experts of a layer too, so that its checksum
needs no copy of it. Experts that are spread over ranks (SGLang's ep_size) are not supported, nor
shared experts that SGLang fuses with the others (`disable_shared_experts_fusion` off, on GPUs).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.publish.verification.checksum import Sha256
from outloop.engine.publish.verification.sglang_gpu_hash import GpuHash

_VOCAB_MULTIPLE = 64
"""SGLang pads the rows of embedding and head to this many, with zeros."""
_PARTS = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
_EXPERT_PARTS = {"gate_proj": ("w13", 0, 2), "up_proj": ("w13", 1, 2), "down_proj": ("w2", 0, 1)}
"""SGLang's parameter, place in an expert and places of an expert."""
_BY_COLUMNS = frozenset({"o_proj", "down_proj"})
_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_PART = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$")
_VOCAB = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


class _Digest(Protocol):
    def update(self, content: Tensor) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(slots=True)
class _Parameter:
    """One parameter on one rank, hashed as its parts come."""

    num_parts: int
    digest: _Digest
    num_hashed: int = 0
    waiting: dict[int, Tensor] = field(default_factory=dict)

    def add(self, part: int, content: Tensor) -> None:
        if part != self.num_hashed:
            self.waiting[part] = content.clone()
            return
        self._hash(content)
        while self.num_hashed in self.waiting:
            self._hash(self.waiting.pop(self.num_hashed))

    def _hash(self, content: Tensor) -> None:
        self.digest.update(content)
        self.num_hashed += 1


class _Place(NamedTuple):
    """Which part of which of SGLang's parameters a tensor is."""

    name: str
    part: int
    num_parts: int
    """0: as many as there are tensors of the parameter."""


class FusedChecksums:
    """The account of one publish for SGLang servers of `num_ranks` tensor-parallel ranks."""

    def __init__(
        self, num_ranks: int, specs: Sequence[TensorSpec], *, is_gpu: bool = False
    ) -> None:
        """`specs` are all tensors that will come; `is_gpu`: as SGLang hashes on a GPU."""
        self._num_ranks = num_ranks
        self._is_gpu = is_gpu
        self._num_tensors = Counter(_place(spec.name).name for spec in specs)
        self._ranks: list[dict[str, _Parameter]] = [{} for _ in range(num_ranks)]

    def add(self, spec: TensorSpec, content: Tensor) -> None:
        """Account for a tensor's bytes as sent (uint8).

        Raises:
            PublishFailed: it cannot be cut into `num_ranks` equal shards.
        """
        name, part, num_parts = _place(spec.name)
        num_parts = num_parts or self._num_tensors[name]
        is_rows = num_parts > 1 and not spec.name.endswith("down_proj.weight")
        content = content if self._is_gpu else content.cpu()
        tensor = content.view(spec.dtype).view(spec.shape)
        for rank, parameters in enumerate(self._ranks):
            shard = self._shard(spec.name, tensor, rank, is_rows=is_rows)
            flat = shard.contiguous().reshape(-1).view(torch.uint8)
            if name not in parameters:
                digest: _Digest = GpuHash() if self._is_gpu else Sha256()
                parameters[name] = _Parameter(num_parts, digest)
            parameters[name].add(part, flat)

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
                'set publish.verify to "probe", or take a size that divides it'
            )
        return tensor.chunk(num, dim)[rank]


def _place(name: str) -> _Place:
    found = _EXPERT.search(name)
    if found is not None:
        fused, part, num_parts = _EXPERT_PARTS[found[2]]
        whole = f"{name[: found.start()]}.experts.{fused}_weight"
        return _Place(whole, int(found[1]) * num_parts + part, 0)
    found = _PART.search(name)
    if found is not None:
        fused, part, num_parts = _PARTS[found[1]]
        return _Place(f"{name[: found.start()]}.{fused}.{found[2]}", part, num_parts)
    return _Place(name, 0, 1)


def _finished(name: str, parameter: _Parameter) -> str:
    if parameter.num_hashed != parameter.num_parts:
        raise PublishFailed(
            f"SGLang's parameter name={name!r} got {parameter.num_hashed} of its "
            f"{parameter.num_parts} parts; publish all of the model's tensors"
        )
    return parameter.digest.hexdigest()
