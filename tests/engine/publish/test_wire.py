"""SGLang's payload, written without SGLang and read by an exact list of names."""

import base64
import os
import pickle
import pickletools
import sys
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outloop.engine.publish.buckets.plan import TensorSpec, plan_buckets
from outloop.engine.publish.buckets.staging import SharedBuffer
from outloop.engine.publish.flattened_bucket import (
    CudaHandles,
    PayloadRefused,
    read_bucket,
    write_bucket,
)


def _payload(buffer: SharedBuffer, tensors: dict[str, torch.Tensor]) -> str:
    specs = [
        TensorSpec(name=name, shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors.items()
    ]
    (bucket,) = plan_buckets(specs, 1 << 20)
    staged = buffer.reserve(bucket[-1].end)
    for place, tensor in zip(bucket, tensors.values(), strict=True):
        staged[place.start : place.end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return write_bucket(staged, bucket)


TENSORS = {
    "a": torch.arange(7, dtype=torch.float32),
    "b": torch.randn(3, 5).to(torch.bfloat16),
    "c": torch.tensor(3.0),
}


def test_what_is_written_is_read_and_nothing_is_left() -> None:
    """Values, shapes and dtypes survive; closing leaves nothing in shared memory."""
    mark = f"torch_{os.getpid()}_"
    before = {name for name in os.listdir("/dev/shm") if name.startswith(mark)}
    buffer = SharedBuffer()
    for _ in range(3):
        read = dict(read_bucket(_payload(buffer, TENSORS)))
        assert read.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)
    del read
    _payload(buffer, TENSORS)
    buffer.close()
    after = {name for name in os.listdir("/dev/shm") if name.startswith(mark)}
    assert after == before


def test_the_payload_names_sglangs_class_in_byte_units() -> None:
    """The names in the pickle are the ones that SGLang's reader allows; SGLang is not imported."""
    buffer = SharedBuffer()
    raw = base64.b64decode(_payload(buffer, TENSORS))
    strings = [a for op, a, _ in pickletools.genops(raw) if isinstance(a, str)]
    at = strings.index("sglang.srt.weight_sync.tensor_bucket")
    assert strings[at + 1] == "FlattenedTensorMetadata"
    for word in ("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename"):
        assert word in strings
    assert not any(name.startswith("outloop") for name in strings)
    assert "sglang" not in sys.modules

    class Entry:
        def __setstate__(self, state: dict) -> None:
            self.state = state

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if module.startswith("sglang"):
                return Entry
            return super().find_class(module, name)

    import io

    entries = Reader(io.BytesIO(raw)).load()["metadata"]
    assert [e.state["name"] for e in entries] == ["a", "b", "c"]
    assert entries[0].state["numel"] == 28
    assert entries[1].state == {
        "name": "b",
        "shape": torch.Size([3, 5]),
        "dtype": torch.bfloat16,
        "start_idx": 64,
        "end_idx": 94,
        "numel": 30,
    }
    buffer.close()


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class _Devices(CudaHandles):
    """CUDA devices of these UUIDs; every handle is of the memory of `content`."""

    def __init__(self, content: torch.Tensor, uuids: list[str]) -> None:
        self.opened: list[tuple[Any, ...]] = []
        self._content = content
        self._uuids = uuids

    def uuids(self) -> list[str]:
        return self._uuids

    def share(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        place = (torch.Tensor, tensor.size(), tensor.stride(), 0)
        handle = (b"handle", 64, 0, False, b"counter", 0, b"event", True)
        return (*place, torch.TypedStorage, torch.uint8, 1, *handle)

    def open(self, handle: tuple[Any, ...]) -> torch.Tensor:
        self.opened.append(handle)
        return self._content


def test_a_cuda_handle_is_written_as_torch_writes_it_and_read() -> None:
    """Every name that torch's reduction of a CUDA tensor brings is in the list; devices by UUID."""
    content = torch.arange(64, dtype=torch.uint8)
    sender = _Devices(content, ["GPU-a", "GPU-b"])
    reader = _Devices(content, ["GPU-c", "GPU-d", "GPU-b"])
    (bucket,) = plan_buckets([TensorSpec(name="a", shape=(64,), dtype=torch.uint8)], 64)
    payload = write_bucket(content.as_subclass(_OnGpu), bucket, cuda=sender)
    ((name, tensor),) = read_bucket(payload, cuda=reader)
    assert (name, tensor.data_ptr(), torch.equal(tensor, content)) == (
        "a",
        content.data_ptr(),
        True,
    )
    handle = sender.share(content)
    assert reader.opened == [(*handle[:6], 2, *handle[7:])]
    with pytest.raises(PayloadRefused, match="uuid='GPU-b', which is not here"):
        read_bucket(payload, cuda=_Devices(content, ["GPU-a"]))


class _Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "content",
    [
        _Evil(),
        {"flattened_tensor": 1, "metadata": []},
        {"flattened_tensor": _Evil(), "metadata": []},
        [1, 2],
    ],
)
def test_other_content_is_refused(content: object) -> None:
    """Nothing outside the list is called, and other shapes are no bucket."""
    with pytest.raises(PayloadRefused):
        read_bucket(base64.b64encode(pickle.dumps(content)).decode())


@pytest.mark.medium
@given(st.floats(0, 1), st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=4))
@example(0.0, [(0.49609375, 1)])  # moves the tensor's first byte off its alignment
@settings(max_examples=60, deadline=None)
def test_damaged_payloads_are_refused_or_harmless(
    kept: float, written: list[tuple[float, int]]
) -> None:
    """Truncated or overwritten bytes never raise anything but PayloadRefused."""
    buffer = SharedBuffer()
    raw = bytearray(base64.b64decode(_payload(buffer, TENSORS)))
    for place, value in written:
        raw[int(place * len(raw))] = value
    if not written:
        raw = raw[: int(kept * len(raw))]
    try:
        for _, tensor in read_bucket(base64.b64encode(raw).decode()):
            tensor.clone()
    except PayloadRefused:
        pass
    finally:
        buffer.close()
