"""The body of SGLang's update_weights_from_tensor with load_format "flattened_bucket".

What is written names SGLang's own class without importing SGLang. What is read is resolved by an
exact list of names, so that a payload can name nothing else.

This is the one place where pickle is used, because SGLang's wire is a pickle:
{"flattened_tensor": uint8 tensor in shared or CUDA memory, "metadata":
[FlattenedTensorMetadata(name, shape, dtype, start_idx, end_idx, numel)]}, with all three numbers in
bytes. Shared memory must go by file name: torch's other way of sharing needs related processes and
kills SGLang.
"""

from __future__ import annotations

import base64
import binascii
import copyreg
import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from outloop.engine.publish.buckets.plan import Place

_METADATA_NAME = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
_CUDA_DEVICE_AT = 6
"""Position of the device among the arguments of torch's rebuild_cuda_tensor."""
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
}


class PayloadRefused(Exception):
    """The payload is not a bucket; nothing was taken from it."""


@dataclass
class BucketEntry:
    """SGLang's FlattenedTensorMetadata: bytes [start_idx, end_idx) of the bucket are `name`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


_FIELDS = BucketEntry.__dataclass_fields__.keys()


class CudaHandles:
    """torch's CUDA-IPC handles and this process's CUDA devices.

    A handle is the tuple of arguments of torch's rebuild_cuda_tensor, with the index of a device.
    """

    def uuids(self) -> list[str]:
        """Of each device, by index."""
        count = torch.cuda.device_count()
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]

    def share(self, tensor: Tensor) -> tuple[Any, ...]:
        """A handle to the memory of `tensor`."""
        _, arguments = reductions.reduce_tensor(tensor)
        return arguments

    def open(self, handle: tuple[Any, ...]) -> Tensor:
        """The tensor of another process's handle."""
        rebuild: Callable[..., Tensor] = reductions.rebuild_cuda_tensor
        return rebuild(*handle)


_CUDA_FUNCTION = ("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
_READABLE: dict[tuple[str, str], Any] = {
    _METADATA_NAME: BucketEntry,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
    (
        "torch.multiprocessing.reductions",
        "rebuild_typed_storage",
    ): reductions.rebuild_typed_storage,
    (
        "torch.multiprocessing.reductions",
        "rebuild_storage_filename",
    ): reductions.rebuild_storage_filename,
    ("torch", "Tensor"): torch.Tensor,
    ("torch", "Size"): torch.Size,
    ("torch.storage", "TypedStorage"): torch.TypedStorage,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


def write_bucket(
    staging: Tensor,
    places: Sequence[Place],
    *,
    num_readers: int = 1,
    cuda: CudaHandles | None = None,
) -> str:
    """The payload (base64) for tensors that lie in `staging` [bytes] uint8 as `places` say.

    `staging` begins a storage in shared memory or, then for one reader only, on a CUDA device (see
    staging). Each reader takes over a reference to the memory; `num_readers` are counted. `cuda`
    makes the handles; None: torch.
    """
    entries = [
        BucketEntry(
            name=place.spec.name,
            shape=torch.Size(place.spec.shape),
            dtype=place.spec.dtype,
            start_idx=place.start,
            end_idx=place.end,
            numel=place.end - place.start,
        )
        for place in places
    ]
    file = io.BytesIO()
    writer = _Writer(file, num_readers=num_readers, cuda=cuda or CudaHandles())
    writer.dump({"flattened_tensor": staging, "metadata": entries})
    return base64.b64encode(file.getvalue()).decode()


def read_bucket(payload: str, *, cuda: CudaHandles | None = None) -> list[tuple[str, Tensor]]:
    """The bucket's named tensors, as views of the sender's memory; `cuda` opens handles.

    Raises:
        PayloadRefused: not base64, not such a pickle, names outside the list, or offsets that
            leave the bucket.
    """
    try:
        # Whatever a damaged pickle makes its reader raise means one thing here.
        file = io.BytesIO(base64.b64decode(payload, validate=True))
        content = _Reader(file, cuda or CudaHandles()).load()
    except PayloadRefused:
        raise
    except (binascii.Error, pickle.UnpicklingError, EOFError, OSError) as error:
        raise PayloadRefused(f"the payload is not a flattened bucket: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
        raise PayloadRefused(f"the payload cannot be read: {error}") from error
    except (TypeError, ValueError, MemoryError) as error:
        raise PayloadRefused(f"the payload is damaged: {error}") from error
    flat, entries = _parts(content)
    return [(entry.name, _view(flat, entry)) for entry in entries]


def _parts(content: object) -> tuple[Tensor, list[BucketEntry]]:
    if isinstance(content, dict) and content.keys() == {"flattened_tensor", "metadata"}:
        flat, entries = content["flattened_tensor"], content["metadata"]
        is_flat = isinstance(flat, Tensor) and flat.dtype == torch.uint8 and flat.ndim == 1
        # Views of other dtypes need an aligned first byte and no gaps.
        is_flat = is_flat and flat.storage_offset() == 0 and flat.is_contiguous()
        is_list = isinstance(entries, list) and all(isinstance(e, BucketEntry) for e in entries)
        if is_flat and is_list:
            return flat, entries
    raise PayloadRefused(
        "the payload is not a flattened bucket; expected flattened_tensor (uint8, one dimension, "
        "from the first byte of its storage) "
        "and metadata (a list)"
    )


def _view(flat: Tensor, entry: BucketEntry) -> Tensor:
    """The entry's tensor in the bucket.

    Raises:
        PayloadRefused: fields of other names or types, or bytes that are not the bucket's.
    """
    fields = vars(entry)
    if fields.keys() != _FIELDS:
        raise PayloadRefused(f"metadata has fields {sorted(fields)}")
    name, shape, dtype = entry.name, entry.shape, entry.dtype
    start, end = entry.start_idx, entry.end_idx
    is_typed = isinstance(dtype, torch.dtype) and isinstance(shape, tuple)
    is_typed = is_typed and isinstance(name, str)
    is_typed = is_typed and all(isinstance(size, int) and size >= 0 for size in shape)
    if not (is_typed and isinstance(start, int) and isinstance(end, int)):
        raise PayloadRefused(f"metadata of name={name!r} has fields of a wrong type")
    size = math.prod(shape) * dtype.itemsize
    if not (0 <= start <= end <= len(flat) and end - start == size):
        raise PayloadRefused(
            f"name={name!r} claims bytes [{start}, {end}) for shape={list(shape)} "
            f"dtype={dtype}; the bucket holds {len(flat)} bytes and the tensor needs {size}"
        )
    if start % dtype.itemsize:
        raise PayloadRefused(f"name={name!r} starts at byte {start}, which is not aligned")
    return flat[start:end].view(dtype).view(shape)


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, cuda: CudaHandles) -> None:
        super().__init__(file)
        self._cuda = cuda

    def find_class(self, module: str, name: str) -> Any:
        """Exactly the names in the list."""
        if (module, name) == _CUDA_FUNCTION:
            return self._open_cuda
        found = _READABLE.get((module, name))
        if found is None:
            raise PayloadRefused(f"the payload names {module}.{name}, which is not allowed")
        return found

    def _open_cuda(self, *arguments: Any) -> Tensor:
        """The tensor of a handle, on the device that it names by UUID."""
        at, wanted = _CUDA_DEVICE_AT, str(arguments[_CUDA_DEVICE_AT])
        uuids = self._cuda.uuids()
        if wanted not in uuids:
            raise PayloadRefused(
                f"the payload lies on CUDA device uuid={wanted!r}, which is not here"
            )
        return self._cuda.open((*arguments[:at], uuids.index(wanted), *arguments[at + 1 :]))


class _Storage:
    """A storage in shared memory, on its way into a pickle."""

    def __init__(self, storage: torch.UntypedStorage, num_readers: int) -> None:
        self.storage = storage
        self.num_readers = num_readers


# The C pickler resolves every class by importing it, which would import SGLang.
_PythonPickler: Any = pickle._Pickler


class _Writer(_PythonPickler):
    """Writes BucketEntry under SGLang's name and tensors as torch.multiprocessing does."""

    def __init__(self, file: io.BytesIO, *, num_readers: int, cuda: CudaHandles) -> None:
        super().__init__(file, protocol=4)
        self._num_readers = num_readers
        self._cuda = cuda

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Name a class; BucketEntry by its counterpart."""
        if obj is BucketEntry:
            self.save(_METADATA_NAME[0])
            self.save(_METADATA_NAME[1])
            self.write(pickle.STACK_GLOBAL)
            self.memoize(obj)
            return
        super().save_global(obj, name)

    def reducer_override(self, obj: Any) -> Any:
        """How tensors, storages and entries are rebuilt by the reader."""
        if isinstance(obj, BucketEntry):
            return copyreg.__newobj__, (BucketEntry,), dict(vars(obj))  # type: ignore[attr-defined]
        if isinstance(obj, Tensor):
            if obj.is_cuda:
                return self._reduce_cuda(obj)
            place = (obj.storage_offset(), obj.size(), obj.stride(), False)
            typed = _Typed(_Storage(obj.untyped_storage(), self._num_readers), obj.dtype)
            return reductions.rebuild_tensor, (torch.Tensor, typed, place)
        if isinstance(obj, _Typed):
            return reductions.rebuild_typed_storage, (obj.storage, obj.dtype)
        if isinstance(obj, _Storage):
            manager, handle, size = obj.storage._share_filename_cpu_()
            for _ in range(obj.num_readers):
                obj.storage._shared_incref()
            return reductions.rebuild_storage_filename, (
                torch.UntypedStorage,
                manager,
                handle,
                size,
            )
        return NotImplemented

    def _reduce_cuda(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """A handle with its device by UUID: processes may number devices differently."""
        handle, at = self._cuda.share(tensor), _CUDA_DEVICE_AT
        device = self._cuda.uuids()[handle[at]]
        return reductions.rebuild_cuda_tensor, (*handle[:at], device, *handle[at + 1 :])


class _Typed:
    """A storage and its element type, as torch.multiprocessing sends them."""

    def __init__(self, storage: _Storage, dtype: torch.dtype) -> None:
        self.storage = storage
        self.dtype = dtype
