"""This rank's part of a model's weights: reading it from a folder, finding it by name.

A rank reads only its own parts. Import then export is bit-equal under every layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor

from outloop.engine.models.safetensors_folder import HuggingFaceFolder
from outloop.engine.models.weight_map import check_tensors, find_row, merge, sizes, split
from outloop.engine.train.megatron.model_and_optimizer import (
    PolicyConfig,
    PolicyModel,
    ValueModel,
)

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_EXPERT = re.compile(r"(.+\.local_experts\.|.+\.experts\.linear_fc[12]\.weight)(\d+)(\..+|)")
_ROUTER_BIAS = ".router.expert_bias"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A slice of one Hugging Face tensor, as a parameter of this rank holds it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int | None
    """Along which it is split; None: this rank holds all of it."""
    start: int
    stop: int
    parameter: str
    """Megatron's local name of the parameter, or of the router's bias, that holds it."""
    index: int
    """Which of the parameter's tensors it is."""


def weights_of(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """By name what a folder has tensors for: parameters, and the biases of routers, buffers that no
    gradient reaches."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(_ROUTER_BIAS):
            yield name, buffer


def local_parts(model: PolicyModel) -> list[Part]:
    """What this rank holds: of its parameters, in their order, then of its routers' biases."""
    found: list[Part] = []
    letters = sizes(model.config)
    for local_name, _ in weights_of(model):
        is_head = isinstance(model, ValueModel) and local_name.startswith("output_layer.")
        if is_head or _is_copy(model, local_name):
            continue
        tensors = find_row(global_name(model, local_name))
        rank, size = _place(is_expert=tensors.row.is_expert)
        for index, (name, dims) in enumerate(zip(tensors.names, tensors.dims, strict=True)):
            shape = tuple(letters[letter] for letter in dims.split())
            dim = tensors.row.shard_dim if size > 1 else None
            start, stop = 0, shape[0]
            if dim is not None:
                # Rounded up: the vocabulary's last part is shorter, Megatron's rows are not.
                width = -(-shape[dim] // size)
                start, stop = min(rank * width, shape[dim]), min((rank + 1) * width, shape[dim])
            found.append(
                Part(
                    name=name,
                    shape=shape,
                    dim=dim,
                    start=start,
                    stop=stop,
                    parameter=local_name,
                    index=index,
                )
            )
    return found


def global_name(model: PolicyModel, name: str) -> str:
    """A parameter's name with the indices that its layer and expert have in the whole model."""
    layer = _LAYER.fullmatch(name)
    if layer:
        number = model.decoder.layers[int(layer[2])].layer_number - 1
        name = f"{layer[1]}{number}{layer[3]}"
    expert = _EXPERT.fullmatch(name)
    if expert:
        per_rank = model.config.num_moe_experts // model.config.expert_model_parallel_size
        first = per_rank * parallel_state.get_expert_model_parallel_rank()
        name = f"{expert[1]}{first + int(expert[2])}{expert[3]}"
    return name


def read_part(model: PolicyModel, part: Part) -> Tensor:
    """The part's values, a view of the parameter if its layout allows, without gradient."""
    parameter = _tensor(model, part.parameter).detach()
    row = find_row(global_name(model, part.parameter)).row
    config: PolicyConfig = model.config
    whole = split(
        parameter,
        row.layout,
        num_groups=config.num_query_groups // config.tensor_model_parallel_size,
        head_dim=config.kv_channels,
    )[part.index]
    return whole[: part.stop - part.start] if part.dim == 0 else whole


def load_huggingface(model: PolicyModel, folder: Path) -> None:
    """Copy this rank's parts of a folder's tensors into the model, one parameter at a time.

    Raises:
        SettingsError: a tensor is missing, unknown or of another shape; nothing is copied.
    """
    config: PolicyConfig = model.config
    groups = config.num_query_groups // config.tensor_model_parallel_size
    with HuggingFaceFolder(folder) as source, torch.no_grad():
        check_tensors(source.shapes, config, f"model.path={str(folder)!r}")
        for name, parts in _by_parameter(local_parts(model)):
            parameter = _tensor(model, name)
            row = find_row(global_name(model, name)).row
            read = tuple(source.read(p.name, p.dim, p.start, p.stop) for p in parts)
            whole = merge(read, row.layout, num_groups=groups)
            parameter[: len(whole)].copy_(whole)
            parameter[len(whole) :].zero_()
        is_shared = model.share_embeddings_and_output_weights
        if is_shared and model.post_process and not model.pre_process:
            _copy_head(model, source)


def _tensor(model: PolicyModel, name: str) -> Tensor:
    """One of `weights_of`."""
    if name.endswith(_ROUTER_BIAS):
        return model.get_buffer(name)
    return model.get_parameter(name)


def _copy_head(model: PolicyModel, source: HuggingFaceFolder) -> None:
    """The last pipeline stage's own copy of a tied embedding."""
    part = model.vocab_part
    weight = model.output_weight
    rows = source.read("model.embed_tokens.weight", 0, part.start, part.stop)
    weight[: len(rows)].copy_(rows)
    weight[len(rows) :].zero_()


def _by_parameter(parts: list[Part]) -> Iterator[tuple[str, list[Part]]]:
    grouped: dict[str, list[Part]] = {}
    for part in parts:
        grouped.setdefault(part.parameter, []).append(part)
    yield from grouped.items()


def _is_copy(model: PolicyModel, name: str) -> bool:
    """A tied model's output layer: the embedding's weight, or the last stage's copy of it."""
    return bool(model.config.is_tied) and name == "output_layer.weight"


def _place(*, is_expert: bool) -> tuple[int, int]:
    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
