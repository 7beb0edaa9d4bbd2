"""Hugging Face folders and Megatron-core models: one table of names and layouts, both directions.

Owns: the table, reading a folder into a model, streaming a model out under Hugging Face names,
writing a folder. Does not own: who receives the tensors. Invariant: import then export is
bit-equal; a missing or unknown name is an error that lists the nearest ones.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outloop.buffer.errors import SettingsError
from outloop.engine.train.mcore import PolicyConfig, PolicyModel

Layout = Literal["plain", "qkv", "gate_up"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One Megatron parameter: which Hugging Face tensors it holds, and how they lie in it.

    `qkv` interleaves by query group: for each group its query heads, its key, its value.
    `gate_up` puts the gate before the up projection along dimension 0.
    """

    megatron: str
    huggingface: tuple[str, ...]
    layout: Layout = "plain"


_GLOBAL = (
    Row(megatron="embedding.word_embeddings.weight", huggingface=("model.embed_tokens.weight",)),
    Row(megatron="decoder.final_layernorm.weight", huggingface=("model.norm.weight",)),
    Row(megatron="output_layer.weight", huggingface=("lm_head.weight",)),
)
_LAYER = (
    Row(megatron="input_layernorm.weight", huggingface=("input_layernorm.weight",)),
    Row(
        megatron="self_attention.linear_qkv.weight",
        huggingface=tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
        layout="qkv",
    ),
    Row(
        megatron="self_attention.linear_qkv.bias",
        huggingface=tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
        layout="qkv",
    ),
    Row(megatron="self_attention.q_layernorm.weight", huggingface=("self_attn.q_norm.weight",)),
    Row(megatron="self_attention.k_layernorm.weight", huggingface=("self_attn.k_norm.weight",)),
    Row(megatron="self_attention.linear_proj.weight", huggingface=("self_attn.o_proj.weight",)),
    Row(megatron="pre_mlp_layernorm.weight", huggingface=("post_attention_layernorm.weight",)),
    Row(
        megatron="mlp.linear_fc1.weight",
        huggingface=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        layout="gate_up",
    ),
    Row(megatron="mlp.linear_fc2.weight", huggingface=("mlp.down_proj.weight",)),
)
_ROWS = {row.megatron: row for row in (*_GLOBAL, *_LAYER)}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def table_row(name: str) -> Row:
    """The row of a Megatron parameter, with full Hugging Face names.

    Raises:
        SettingsError: the table has no such name; the nearest are listed.
    """
    match = _LAYER_NAME.fullmatch(name)
    row = _ROWS.get(match[2] if match else name)
    if row is None:
        near = difflib.get_close_matches(name, list(_ROWS), n=3, cutoff=0.3)
        raise SettingsError(
            f"Megatron parameter {name!r} is not in the weight table; nearest: {near}"
        )
    if match is None:
        return row
    prefix = f"model.layers.{match[1]}."
    return Row(
        megatron=name,
        huggingface=tuple(prefix + part for part in row.huggingface),
        layout=row.layout,
    )


def merge(parts: tuple[Tensor, ...], layout: Layout, config: PolicyConfig) -> Tensor:
    """Lay Hugging Face tensors into one Megatron parameter."""
    if layout == "plain":
        return parts[0]
    if layout == "gate_up":
        return torch.cat(parts)
    groups = config.num_query_groups
    return torch.cat([p.view(groups, -1, *p.shape[1:]) for p in parts], dim=1).flatten(0, 1)


def split(whole: Tensor, layout: Layout, config: PolicyConfig) -> tuple[Tensor, ...]:
    """Take a Megatron parameter apart into its Hugging Face tensors; inverse of `merge`."""
    if layout == "plain":
        return (whole,)
    if layout == "gate_up":
        return tuple(whole.chunk(2))
    groups, head = config.num_query_groups, config.kv_channels
    per_group = config.num_attention_heads // groups * head
    grouped = whole.view(groups, per_group + 2 * head, *whole.shape[1:])
    return tuple(p.flatten(0, 1) for p in grouped.split([per_group, head, head], dim=1))


def load_huggingface(model: PolicyModel, folder: Path) -> None:
    """Copy a folder's tensors into the model.

    Raises:
        SettingsError: a tensor is missing, unknown or of another shape.
    """
    tensors = _read_folder(folder)
    unused = set(tensors)
    config: PolicyConfig = model.config
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            row = table_row(name)
            missing = [part for part in row.huggingface if part not in tensors]
            if missing:
                near = difflib.get_close_matches(missing[0], list(tensors), n=3)
                raise SettingsError(
                    f"model.path={str(folder)!r} lacks tensor {missing[0]!r}; nearest there: {near}"
                )
            whole = merge(tuple(tensors[part] for part in row.huggingface), row.layout, config)
            if whole.shape != parameter.shape:
                raise SettingsError(
                    f"model.path={str(folder)!r}: {row.huggingface} give shape "
                    f"{tuple(whole.shape)}, config.json asks for {tuple(parameter.shape)}"
                )
            parameter.copy_(whole)
            unused -= set(row.huggingface)
    unused -= {"lm_head.weight"} if config.is_tied else set()
    if unused:
        raise SettingsError(
            f"model.path={str(folder)!r} holds tensors that its config.json has no place for: "
            f"{sorted(unused)[:5]}"
        )


def named_huggingface_tensors(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name, one at a time, as views of the parameters."""
    for name, parameter in model.named_parameters():
        row = table_row(name)
        parts = split(parameter.detach(), row.layout, model.config)
        yield from zip(row.huggingface, parts, strict=True)


def save_huggingface(model: PolicyModel, folder: Path, *, source: Path) -> None:
    """Write the model as a Hugging Face folder; configuration and tokenizer come from `source`.

    Tensors have the dtype that the configuration names. The folder appears complete or not at all.
    """
    config = json.loads((source / "config.json").read_text())
    dtype = getattr(torch, config.get("torch_dtype") or config.get("dtype") or "float32")
    temporary = folder.with_name(folder.name + ".writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in source.iterdir():
        is_weights = path.name == "model.safetensors.index.json"
        if path.suffix in {".json", ".txt", ".jinja", ".model"} and not is_weights:
            shutil.copy(path, temporary / path.name)
    tensors = {
        name: tensor.to(dtype, copy=True).contiguous()
        for name, tensor in named_huggingface_tensors(model)
    }
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _read_folder(folder: Path) -> Mapping[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.exists()
        else ["model.safetensors"]
    )
    tensors: dict[str, Tensor] = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                tensors[key] = file.get_tensor(key).float()
    return tensors
