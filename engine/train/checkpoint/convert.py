"""Converts between a Hugging Face folder and a Megatron distributed checkpoint.

There and back is bit-equal, from whatever layout of ranks the checkpoint was written by. Only a
parameter or two of the model are in memory at once. OUT appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import pickle
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from outloop.buffer.errors import SettingsError
from outloop.engine.models.safetensors_folder import (
    MAX_SHARD_BYTES,
    HuggingFaceFolder,
    copy_description,
    folder_dtype,
    write_folder,
)
from outloop.engine.models.weight_map import (
    expected_tensors,
    find_row,
    float32_tensors,
    merge,
    split,
)
from outloop.engine.publish.buckets.plan import TensorSpec
from outloop.engine.train.checkpoint import checkpoint_format
from outloop.engine.train.checkpoint.async_writer import (
    Saving,
    Shards,
    ShardStrategy,
    writing_folder,
)
from outloop.engine.train.megatron import model_and_optimizer
from outloop.engine.train.megatron.import_weights import weights_of

_DESCRIPTION = "huggingface"
"""Folder in a converted checkpoint with config.json and tokenizer."""
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_INDEX_TYPES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MCoreMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        _MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
        PosixPath,
    )
}
"""What an index is made of, beside torch's dtypes."""
_NO_WEIGHTS = (
    *("optimizer.", "random", "rng_state", "rerun_state", "opt_param_scheduler"),
    "critic.",
)
"""Beginnings of keys that are not of the model."""


def is_huggingface(folder: Path) -> bool:
    """Whether it is a Hugging Face folder.

    Raises:
        SettingsError: it is neither that nor a Megatron checkpoint.
    """
    if (folder / "config.json").is_file():
        return True
    _shards_of(folder)
    return False


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A model on one rank without memory behind its parameters."""

    model: model_and_optimizer.PolicyModel
    state: dict[str, Any]
    """Megatron's sharded state of it."""
    mode: FakeTensorMode

    @property
    def config(self) -> model_and_optimizer.PolicyConfig:
        """Configuration of the model."""
        config: model_and_optimizer.PolicyConfig = self.model.config
        return config

    def names(self) -> list[str]:
        """Names of its parameters, without a tied output layer."""
        copies = {"output_layer.weight"} if self.config.is_tied else set()
        return [name for name, _ in weights_of(self.model) if name not in copies]


@contextlib.contextmanager
def _skeleton(folder: Path, *, has_tensors: bool) -> Iterator[_Skeleton]:
    """The model that a folder's config.json describes, in a process group of one."""
    config = model_and_optimizer.read_config(folder, {}, has_tensors=has_tensors)
    # Nothing is behind its parameters, so no device is asked for them.
    config.use_cpu_initialization = True
    model_and_optimizer.join_process_group(seed=0)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = model_and_optimizer.PolicyModel(config)
        state = model.sharded_state_dict()
    yield _Skeleton(model, state, mode)


def to_megatron(source: Path, out: Path) -> None:
    """Write a Hugging Face folder's weights as a Megatron checkpoint, in float32.

    Raises:
        SettingsError: a tensor is missing, unknown or of another shape, or OUT is there already.
        CheckpointFailed: OUT could not be written.
    """
    _refuse_existing(out)
    with _skeleton(source, has_tensors=True) as skeleton, HuggingFaceFolder(source) as tensors:
        shards = _ReadWhenWritten(writing_folder(out) / "shards", skeleton, tensors)
        shutil.rmtree(writing_folder(out), ignore_errors=True)
        (writing_folder(out) / "shards").mkdir(parents=True)
        dist_checkpointing.save(
            {"model": skeleton.state},
            str(writing_folder(out) / "shards"),
            sharded_strategy=ShardStrategy(shards),
        )
        copy_description(source, writing_folder(out) / _DESCRIPTION)
        facts = {
            "schema": checkpoint_format.SCHEMA,
            "step": 0,
            "num_updates": 0,
            "mark": {"fence": 0, "group_ids": [], "next_slot": 0, "policy_version": 0},
            "model": skeleton.config.described,
            "reference_hash": "",
            "layout": {},
        }
        saving = Saving(shards, out, facts, keep=None, timeout_s=0.0)
        saving.run()
        saving.result()


class _ReadWhenWritten(Shards):
    """Shards whose data is read from a folder at the moment it is written."""

    def __init__(self, folder: Path, skeleton: _Skeleton, tensors: HuggingFaceFolder) -> None:
        super().__init__(folder)
        self._skeleton = skeleton
        self._tensors = tensors
        # What Megatron makes of a parameter are views of it, also where nothing is behind them.
        self._names = {_storage(weight): name for name, weight in weights_of(skeleton.model)}
        self._whole: tuple[str, Tensor] | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Remember where each part comes from."""
        self._plan, self._source = plan, self
        self._planned = planner
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def resolve_data(self, write_item: WriteItem) -> Any:
        """A part of the last parameter that was read, or of the next."""
        data = self._planned.resolve_data(write_item)
        if not isinstance(data, Tensor):
            return data
        name = self._names[_storage(data)]
        if self._whole is None or self._whole[0] != name:
            self._whole = None
            self._whole = name, self._read(name)
        return self._whole[1].as_strided(data.shape, data.stride(), data.storage_offset())

    def _read(self, name: str) -> Tensor:
        config = self._skeleton.config
        tensors = find_row(name)
        names = tensors.names
        if name == "output_layer.weight" and config.is_tied:
            names = find_row("embedding.word_embeddings.weight").names
        whole = merge(
            tuple(self._tensors.read(part) for part in names),
            tensors.row.layout,
            num_groups=config.num_query_groups,
        )
        return whole.to(config.params_dtype).contiguous()


def to_huggingface(
    source: Path, out: Path, *, config: Path | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a Megatron checkpoint's weights as a Hugging Face folder, in the dtype of its config.

    Args:
        config: folder with config.json and tokenizer; None: the checkpoint has one.

    Raises:
        SettingsError: there is no config, a tensor is missing, unknown or of another shape, or OUT
            is there already.
    """
    _refuse_existing(out)
    shards = _shards_of(source)
    description = config or source / _DESCRIPTION
    if not (description / "config.json").is_file():
        raise SettingsError(
            f"{description} holds no config.json; name a folder that does with --config"
        )
    with _skeleton(description, has_tensors=False) as skeleton:
        stored = _Checkpoint(shards)
        _check_keys(shards, stored.shapes, skeleton)
        dtype = folder_dtype(description)
        shapes = expected_tensors(skeleton.config)
        in_float32 = float32_tensors(skeleton.config)
        specs = [
            TensorSpec(name=n, shape=shape, dtype=torch.float32 if n in in_float32 else dtype)
            for n, shape in shapes.items()
        ]
        write_folder(
            out,
            specs,
            _Reader(stored, skeleton).read,
            source=description,
            max_shard_bytes=max_shard_bytes,
        )


class _Reader:
    """Hugging Face tensors of a Megatron checkpoint, by name; holds one parameter at a time."""

    def __init__(self, stored: _Checkpoint, skeleton: _Skeleton) -> None:
        self._checkpoint = stored
        self._skeleton = skeleton
        self._parameter_of = {
            part: (name, index)
            for name in skeleton.names()
            for index, part in enumerate(find_row(name).names)
        }
        self._whole: tuple[str, tuple[Tensor, ...]] | None = None

    def read(self, names: Sequence[str]) -> Iterator[Tensor]:
        """The tensors of `names`, one after the other."""
        for name in names:
            parameter, index = self._parameter_of[name]
            if self._whole is None or self._whole[0] != parameter:
                self._whole = None
                self._whole = parameter, self._load(parameter)
            yield self._whole[1][index]

    def _load(self, name: str) -> tuple[Tensor, ...]:
        config = self._skeleton.config
        parts = [self._checkpoint.read(part) for part in _parts(self._skeleton, name)]
        entry = self._skeleton.state[name]
        is_built = isinstance(entry, ShardedTensorFactory)
        return split(
            entry.merge_fn(parts) if is_built else parts[0],
            find_row(name).row.layout,
            num_groups=config.num_query_groups,
            head_dim=config.kv_channels,
        )


class _Checkpoint:
    """The tensors of a distributed checkpoint, of which any part may be read alone.

    Megatron's own reader wants all parts of a key at once: one matrix of every layer.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index.

        Raises:
            SettingsError: it cannot be read.
        """
        self._reader = FileSystemReader(folder)
        metadata = _read_index(folder / ".metadata")
        self._reader.set_up_storage_reader(metadata, True)
        self._entries = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.shapes = {key: tuple(entry.size) for key, entry in self._entries.items()}

    def read(self, part: ShardedTensor) -> Tensor:
        """A part as `part` describes it, whichever parts it was written in."""
        whole = torch.empty(part.local_shape, dtype=part.dtype)
        sizes = torch.Size((1,) * part.prepend_axis_num + tuple(part.local_shape))
        wanted = ChunkStorageMetadata(offsets=torch.Size(part.global_offset), sizes=sizes)
        items = create_read_items_for_chunk_list(part.key, self._entries[part.key], [wanted])
        into = cast(LoadPlanner, _Into(whole.view(sizes)))
        self._reader.read_data(LoadPlan(items), into).wait()
        return whole


class _IndexUnpickler(pickle.Unpickler):
    """Builds the records of a checkpoint's index and nothing else.

    torch and Megatron pickle the index, so whoever made a checkpoint could name any function in it;
    the tensors' files are read by torch with `weights_only`.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The class or constant, if it is of an index.

        Raises:
            UnpicklingError: it is not.
        """
        found = _INDEX_TYPES.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None) if name.isidentifier() else None
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return found


def _read_index(path: Path) -> Metadata:
    """The index of a distributed checkpoint; nothing that it names is called.

    Raises:
        SettingsError: it cannot be read, names what does not belong into an index, or a file that
            does not lie beside it.
    """
    try:
        metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise SettingsError(f"checkpoint index {path} cannot be read: {error!r}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise SettingsError(f"checkpoint index {path} holds no index but {type(metadata)!r}")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise SettingsError(
                f"checkpoint index {path} names the file {info.relative_path!r}; names of files "
                "beside it are allowed"
            )
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


class _Into:
    """Where torch's reader puts the pieces of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a piece that was written as one goes."""
        place = self._tensor
        where = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (offset, length) in enumerate(where):
            place = place.narrow(dim, offset, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is in place."""


def _check_keys(shards: Path, found: dict[str, tuple[int, ...]], skeleton: _Skeleton) -> None:
    """Refuse a checkpoint of another model before anything is written.

    Raises:
        SettingsError: names the first missing, unknown or misshapen tensor and the nearest ones.
    """
    wanted = {
        part.key: tuple(part.global_shape)
        for name in skeleton.names()
        for part in _parts(skeleton, name)
    }
    missing = [key for key in wanted if key not in found]
    unknown = sorted(
        key
        for key in found.keys() - wanted.keys() - {"output_layer.weight"}
        if not key.startswith(_NO_WEIGHTS) and not key.endswith("_extra_state")
    )
    if missing:
        raise SettingsError(
            f"checkpoint {shards} lacks {len(missing)} tensors of the model that config.json "
            f"describes, the first is {missing[0]!r}; nearest there: {_near(missing[0], found)}"
        )
    if unknown:
        raise SettingsError(
            f"checkpoint {shards} holds {len(unknown)} tensors that the model of config.json has "
            f"no place for, the first is {unknown[0]!r}; nearest that have one: "
            f"{_near(unknown[0], wanted)}"
        )
    for key, shape in wanted.items():
        # Ranks that split the vocabulary may have filled it up to equal parts.
        is_filled_up = key in _VOCABULARY and found[key][1:] == shape[1:] and found[key] > shape
        if found[key] != shape and not is_filled_up:
            raise SettingsError(
                f"checkpoint {shards}: {key!r} has shape {found[key]}, config.json asks for {shape}"
            )


def _parts(skeleton: _Skeleton, name: str) -> list[ShardedTensor]:
    """What a checkpoint holds of a parameter, as if one rank had written it."""
    entry = skeleton.state[name]
    if isinstance(entry, ShardedTensorFactory):
        with skeleton.mode:
            return list(entry.build())
    return [entry]


def _near(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(names), n=3, cutoff=0.3)


def _shards_of(folder: Path) -> Path:
    """Where the distributed checkpoint of a folder lies.

    Raises:
        SettingsError: there is none.
    """
    for place in (folder / "shards", folder):
        if (place / "metadata.json").is_file() and (place / ".metadata").is_file():
            return place
    raise SettingsError(
        f"{folder} is neither a Hugging Face folder (it has no config.json) nor a complete "
        "Megatron checkpoint (no .metadata); give one of the two"
    )


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise SettingsError(f"{out} is there already; name a folder that is not")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
