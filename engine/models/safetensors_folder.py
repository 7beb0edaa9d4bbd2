"""Hugging Face folders of safetensors: reading slices, writing shard by shard.

Only the slice that is asked for is read. One tensor is in memory while a folder is written, and the
folder appears complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outloop.buffer.errors import RecordError, SettingsError
from outloop.engine.publish.buckets.plan import TensorSpec, plan_buckets
from outloop.engine.publish.verification.checksum import tensor_bytes

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MAX_SHARD_BYTES = 4 * 2**30
_INDEX = "model.safetensors.index.json"
_COPIED = frozenset({".json", ".txt", ".jinja", ".model"})


class HuggingFaceFolder:
    """The tensors of a folder, by name; a context manager."""

    def __init__(self, path: Path) -> None:
        """Open every weight file's header.

        Raises:
            SettingsError: no weight file, or one that cannot be read.
        """
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = path / _INDEX
        try:
            names = (
                sorted(set(json.loads(index.read_text())["weight_map"].values()))
                if index.is_file()
                else ["model.safetensors"]
            )
            for name in names:
                file = self._stack.enter_context(safe_open(path / name, framework="pt"))
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    self._files[key] = file
                    self.shapes[key] = tuple(file.get_slice(key).get_shape())
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            self._stack.close()
            raise SettingsError(
                f"model folder path={str(path)!r} cannot be read: {error}; give a folder with "
                "config.json and model.safetensors, or shards with their index"
            ) from error

    def __enter__(self) -> HuggingFaceFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """A tensor in the file's dtype, or its part [start, stop) along `dim` 0 or 1."""
        part = self._files[name].get_slice(name)
        if dim is None:
            whole: Tensor = part[:] if self.shapes[name] else self._files[name].get_tensor(name)
            return whole
        cut: Tensor = part[start:stop] if dim == 0 else part[:, start:stop]
        return cut


def folder_dtype(source: Path) -> torch.dtype:
    """The dtype that a folder's config.json names; float32 where it names none."""
    config = json.loads((source / "config.json").read_text())
    found = getattr(torch, str(config.get("torch_dtype") or config.get("dtype") or "float32"))
    assert isinstance(found, torch.dtype)
    return found


def write_folder(
    folder: Path,
    specs: Sequence[TensorSpec],
    gather: Callable[[Sequence[str]], Iterator[Tensor]],
    *,
    source: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors as a Hugging Face folder; configuration and tokenizer come from `source`.

    Args:
        specs: every tensor, in the order of writing, with the dtype to write.
        gather: the tensors of those names, one after the other; asked shard by shard.
    """
    temporary = folder.with_name(folder.name + ".writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    copy_description(source, temporary)
    shards = [[place.spec for place in shard] for shard in plan_buckets(specs, max_shard_bytes)]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        _write_shard(temporary / name, shard, gather([spec.name for spec in shard]))
        weight_map |= {spec.name: name for spec in shard}
    if len(shards) > 1:
        _write_index(temporary / _INDEX, specs, weight_map)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def copy_description(source: Path, folder: Path) -> None:
    """Copy what a folder holds beside its tensors: configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in _COPIED and path.name != _INDEX:
            shutil.copy(path, folder / path.name)


def _write_shard(path: Path, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> None:
    """One safetensors file, tensor by tensor; the library would want all of them at once.

    The format: the header's size in 8 bytes, the header as JSON filled up to 8 bytes, the tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        header[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for spec, tensor in zip(specs, tensors, strict=True):
            data = tensor.detach().to("cpu", spec.dtype).contiguous().reshape(-1)
            if data.nbytes != spec.num_bytes:
                raise RecordError(
                    f"tensor {spec.name!r} has shape {tuple(tensor.shape)}, {spec.shape} was "
                    "announced"
                )
            file.write(tensor_bytes(data))


def _write_index(path: Path, specs: Sequence[TensorSpec], weight_map: Mapping[str, str]) -> None:
    total = sum(spec.num_bytes for spec in specs)
    path.write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    )
