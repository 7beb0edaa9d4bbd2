"""Filling buckets: every byte as it was, two buckets held at most."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from outloop.buffer.errors import PublishFailed, SettingsError
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.buckets.plan import ALIGNMENT, PACKED, TensorSpec, largest
from outloop.engine.publish.buckets.staging import DeviceBuffer, SharedBuffer, Staging
from outloop.engine.publish.sending.orders import Begin, Fill, Outcome, Report
from outloop.engine.publish.sending.sending_rank import Packing, SendingRank
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


class Reader:
    """One share of a source, or the second of two."""

    received_bytes = 0

    def __init__(self, source: GatheredTensors, rank: int = 0) -> None:
        self._source = source
        self.rank = rank
        self.shares = [[] for _ in range(rank)] + [list(source.specs)]

    def begin(self) -> None:
        """Nothing to do."""

    def read(
        self, specs: Sequence[Sequence[TensorSpec]], into: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """By the source."""
        return self._source.read(specs[self.rank], into)


def _packing(alignment: int = ALIGNMENT) -> Packing:
    return Packing(bucket_bytes=4096, dtype=torch.float32, alignment=alignment)


@pytest.mark.parametrize("alignment", [ALIGNMENT, PACKED])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_buckets_at_most_are_held_whatever_the_model(
    rank: int, is_shared: bool, alignment: int
) -> None:
    """40 tensors in many buckets: staging holds two of them at most, and every byte is right."""
    source = GatheredTensors(_specs(*([300, 1000, 7, 1] * 10)))
    buffers = [SharedBuffer() if is_shared else DeviceBuffer(CPU) for _ in range(2)]
    reader, packing = Reader(source, rank), _packing(alignment)
    sending = SendingRank(reader, packing, Staging(*buffers))
    buckets = packing.plan(reader.shares)[rank]
    assert sending.carry_out(Begin(("torch",))) == Outcome()
    for index, places in enumerate(buckets):
        before = source.num_read
        assert sending.carry_out(Fill(index)) == Outcome()
        # The bucket after this one is not yet begun: its gathering would be memory too.
        assert source.num_read == before + len(places)
    assert len(buckets) > 10
    outcome = sending.carry_out(Report())
    least = 2 * largest(buckets) if not is_shared else 2 * (1 << 16)
    assert outcome.peak_bytes == least
    assert outcome.sent_bytes == sum(spec.num_bytes for spec in source.specs)
    expected = {
        spec.name: tensor_checksum(torch.arange(spec.shape[0], dtype=torch.float32) + index)
        for index, spec in enumerate(source.specs)
    }
    assert outcome.sums == {"torch": [expected]}
    sending.close()


def test_a_rank_without_room_says_so_before_the_ranks_wait_for_each_other() -> None:
    """An answer to the first order, not an exception in the middle of gathering."""
    specs = [TensorSpec(name="t", shape=(2**50,), dtype=torch.float32)]
    sending = SendingRank(Reader(GatheredTensors(specs)), _packing(), Staging(SharedBuffer()))
    outcome = sending.carry_out(Begin(()))
    assert "has no room for a bucket of 4503599627370496 bytes" in outcome.error


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


def test_tensors_that_repeat_or_are_missing_are_refused() -> None:
    """A name twice, of one rank or of two, or no tensor at all: found before anything is read."""
    first, second = _specs(1, 2)
    for shares in ([[first, first]], [[second, first], [first]]):
        with pytest.raises(PublishFailed, match="name='t0' was given twice"):
            _packing().plan(shares)
    with pytest.raises(PublishFailed, match="no tensor to publish"):
        _packing().plan([[], []])
