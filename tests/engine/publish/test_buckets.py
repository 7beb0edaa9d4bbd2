"""Filling buckets: every byte as it was, two buckets held at most."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from outloop.buffer.errors import PublishFailed, SettingsError
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.buckets.pipeline import Filled, Filler, OnFilled, Sent
from outloop.engine.publish.buckets.plan import ALIGNMENT, PACKED, Bucket, TensorSpec
from outloop.engine.publish.buckets.staging import DeviceBuffer, SharedBuffer, Staging
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.publish.transports.registry import build_transport
from outloop.engine.publish.verification.checksum import tensor_checksum

CPU = torch.device("cpu")


class GatheredTensors:
    """A source that makes each tensor when it is asked for, and says what it has made."""

    def __init__(self, specs: list[TensorSpec]) -> None:
        self.specs: Sequence[TensorSpec] = specs
        self.num_read = 0

    def read(
        self, specs: Sequence[TensorSpec], into: Sequence[torch.Tensor] | None = None
    ) -> Iterator[torch.Tensor]:
        """Tensors whose elements count up from their position; every other one in its place."""
        for index, spec in enumerate(specs):
            made = torch.arange(spec.shape[0], dtype=spec.dtype) + self.num_read
            yield into[index].copy_(made) if into is not None and self.num_read % 2 else made
            self.num_read += 1


def _specs(*sizes: int) -> list[TensorSpec]:
    return [
        TensorSpec(name=f"t{index}", shape=(size,), dtype=torch.float32)
        for index, size in enumerate(sizes)
    ]


def _ignore(bucket: Filled) -> None:
    """There are no other ranks."""


def _filler(
    source: GatheredTensors,
    staging: Staging,
    alignment: int = ALIGNMENT,
    on_filled: OnFilled = _ignore,
) -> Filler:
    return Filler(
        source,
        staging,
        bucket_bytes=4096,
        dtype=torch.float32,
        alignment=alignment,
        on_filled=on_filled,
    )


class Recorded:
    """An account of every tensor's checksum."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}

    def add(self, content: torch.Tensor, places: Bucket) -> None:
        """Keep the checksums."""
        for place in places:
            self.sums[place.spec.name] = tensor_checksum(content[place.start : place.end])

    def verify(self, client: ServerClient, deadline: float) -> None:
        """It is not called."""
        raise AssertionError


@pytest.mark.parametrize("alignment", [ALIGNMENT, PACKED])
@pytest.mark.parametrize("is_shared", [True, False])
def test_two_buckets_at_most_are_held_whatever_the_model(is_shared: bool, alignment: int) -> None:
    """40 tensors in many buckets: staging holds two of them at most, and every byte is right."""
    source = GatheredTensors(_specs(*([300, 1000, 7, 1] * 10)))
    buffers = [SharedBuffer() if is_shared else DeviceBuffer(CPU) for _ in range(2)]
    staging = Staging(*buffers)
    account = Recorded()
    sent = Sent({"any": account})
    filler = _filler(source, staging, alignment, sent.account)
    filler.fill_first()
    for bucket in filler.filled():
        sent.count(bucket)
        # The bucket after this one is not yet begun: its gathering would be memory too.
        assert source.num_read == len(account.sums)
    assert sent.num_buckets > 10
    least = 2 * filler.max_bytes if not is_shared else 2 * (1 << 16)
    assert filler.peak_bytes == least
    expected = {
        spec.name: tensor_checksum(torch.arange(spec.shape[0], dtype=torch.float32) + index)
        for index, spec in enumerate(source.specs)
    }
    assert account.sums == expected
    staging.close()


def test_exported_memory_lives_for_one_publish() -> None:
    """Freeing a storage that was exported 20,000 times ends the process; others are kept."""
    exported, kept = DeviceBuffer(CPU, is_exported=True), DeviceBuffer(CPU)
    staging = Staging(exported, kept)
    for _ in range(2):
        staging.reserve(0, 1000)
        staging.reserve(1, 1000)
        staging.end()
        assert (exported.num_bytes, kept.num_bytes) == (0, 1000)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_that_cannot_be_exported_is_refused(
    num_ranks: int, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the name of the variable that asked for it, from one trainer rank and from several."""
    tree = {
        "model": {"path": "m"},
        "server": {"device": "cuda"},
        "trainer": {"num_ranks": num_ranks, "is_colocated": True},
        "publish": {"transport": "cuda_ipc"},
    }
    run = create_run(build_settings(tree, source="test"), tmp_path / "run", "unix:///none")
    monkeypatch.setenv(variable, "expandable_segments:True")
    with pytest.raises(SettingsError, match=f"{variable}=.* leave expandable_segments"):
        build_transport(run, "cuda_ipc")


def test_the_first_bucket_can_be_filled_before_anybody_is_paused() -> None:
    """fill_first reads one bucket, which is then given first, once."""
    source = GatheredTensors(_specs(1000, 1000, 1000))
    filler = _filler(source, Staging(DeviceBuffer(CPU), DeviceBuffer(CPU)))
    filler.fill_first()
    assert source.num_read == 1
    names = [place.spec.name for bucket in filler.filled() for place in bucket.places]
    assert names == ["t0", "t1", "t2"]


def test_tensors_that_repeat_or_are_missing_are_refused() -> None:
    """A name twice, or no tensor at all, is found before anything is read."""
    specs = _specs(1, 2)
    source = GatheredTensors([specs[0], specs[0]])
    with pytest.raises(PublishFailed, match="name='t0' was given twice"):
        _filler(source, Staging(DeviceBuffer(CPU)))
    with pytest.raises(PublishFailed, match="no tensor to publish"):
        _filler(GatheredTensors([]), Staging(DeviceBuffer(CPU)))
    assert source.num_read == 0
