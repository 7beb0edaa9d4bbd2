"""Checksums taken while weights are stored: of what is there, and only as long as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.tensor_source import LocalTensors
from outloop.engine.publish.verification import hashed_copy
from outloop.engine.publish.verification.checksum import tensor_checksum
from outloop.engine.publish.verification.hashed_copy import copy_hashed, copy_tensor
from outloop.engine.serve.torch_server.checksums import Sums
from outloop.engine.serve.torch_server.weight_update import UpdateSession

PIECE = 1 << 18
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("num_bytes", [0, 4, PIECE - 4, PIECE, PIECE + 4, 3 * PIECE + 8])
def test_a_copy_is_exact_and_its_checksum_is_of_the_whole(
    num_bytes: int, dtype: torch.dtype
) -> None:
    """Below, at and over the size of a piece, cast, strided or in place: as torch copies."""
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    content[1::2] &= 0x3F  # No float is a NaN, whatever its size.
    tensor = content.view(dtype)
    strided = torch.stack([tensor, tensor], dim=1)[:, 0]
    for source in (tensor, strided, tensor.to(torch.float64)):
        target, plain = torch.zeros_like(tensor), torch.zeros_like(tensor)
        assert copy_hashed(target, source) == tensor_checksum(tensor)
        copy_tensor(plain, source)
        assert torch.equal(target, tensor)
        assert torch.equal(plain, tensor)
        assert copy_hashed(target, target) == tensor_checksum(tensor)
    if num_bytes:
        into = torch.zeros(2, *tensor.shape, dtype=dtype).t()
        assert copy_hashed(into, strided[:, None].expand(-1, 2)) == tensor_checksum(into)
        assert torch.equal(into[:, 1], tensor)


@pytest.mark.parametrize("size", [1000, PIECE])
def test_what_was_written_is_hashed_and_not_what_was_to_be(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that leaves one byte as it was has another checksum than its source."""
    copyto = np.copyto

    def forget_last(target: Any, source: Any) -> None:
        copyto(target[:-1], source[:-1])

    source, target = torch.ones(size), torch.zeros(size)
    monkeypatch.setattr(hashed_copy.np, "copyto", forget_last)
    assert copy_hashed(target, source) == tensor_checksum(target) != tensor_checksum(source)


def _tensors() -> Tensors:
    """Parts of one fused tensor and others, as servers hold them."""
    fused = torch.zeros(48, 64)
    names = dict(zip("qkv", fused.split([16, 16, 16]), strict=True))
    return names | {f"t{index}": torch.zeros(64, 64) for index in range(20)}


def _stored(sums: Sums, tensors: Tensors, transaction: str) -> dict[str, str]:
    """Store random tensors; their checksums."""
    sums.begin(transaction)
    sent = {name: torch.randn(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in sent.items():
        sums.write(name, tensor)
    return {name: tensor_checksum(tensor) for name, tensor in sent.items()}


def _seasoned(tensors: Tensors) -> Sums:
    """After a first transaction, which is read again in full."""
    sums = Sums(tensors)
    sent = _stored(sums, tensors, "first")
    assert sums.of("xxh3_128", "first") == sent
    return sums


def _spoil(tensor: torch.Tensor) -> None:
    """A write that torch does not count."""
    tensor.numpy().reshape(-1)[0] += 1


def test_the_first_transaction_is_read_again_in_full() -> None:
    """Whatever became of a tensor behind torch's back is found, also that names share memory."""
    for name in ("q", "t7", "t19"):
        tensors = _tensors()
        sums = Sums(tensors)
        sent = _stored(sums, tensors, "first")
        _spoil(tensors[name])
        for _ in range(2):
            held = sums.of("xxh3_128", "first")
            assert [each for each in sent if held[each] != sent[each]] == [name]
    shared = _tensors()
    shared["t1"] = shared["t0"]
    sums = Sums(shared)
    sent = _stored(sums, shared, "first")
    assert sums.of("xxh3_128", "first")["t0"] != sent["t0"]


def test_a_write_that_torch_counts_is_always_found() -> None:
    """To any tensor, to the fused one that it is part of, or to one beside it."""
    tensors = _tensors()
    sums = _seasoned(tensors)
    for index, name in enumerate(tensors):
        sent = _stored(sums, tensors, f"next-{index}")
        tensors[name].view(-1)[-1] += 1
        held = sums.of("xxh3_128", f"next-{index}")
        assert [each for each in sent if held[each] != sent[each]] == [name]


def test_other_writes_are_found_before_long() -> None:
    """One that spoils a tensor every time is met by the sample, which is another each time."""
    tensors = _tensors()
    sums = _seasoned(tensors)
    for name in ("k", "t3"):
        num_found, num_read = 0, set()
        for index in range(200):
            sent = _stored(sums, tensors, f"{name}-{index}")
            _spoil(tensors[name])
            held = sums.of("xxh3_128", f"{name}-{index}")
            num_found += held[name] != sent[name]
            num_read.add(tuple(sums._some(tensors, f"{name}-{index}")))
        # Names are drawn by the transactions', so always the same: about a sixteenth of 200.
        assert num_found >= 2
        assert len(num_read) > 20


@pytest.mark.parametrize("asked", ["other", "", None])
def test_checksums_are_remembered_for_their_transaction_alone(asked: str | None) -> None:
    """Asked for another, or for none, everything is read as it lies there; so by other hashes."""
    tensors = _tensors()
    sums = _seasoned(tensors)
    for spoiled in tensors.values():
        _stored(sums, tensors, "next")
        _spoil(spoiled)
        now = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
        assert sums.of("xxh3_128", asked) == now
        now = {name: tensor_checksum(tensor, "sha256") for name, tensor in tensors.items()}
        assert sums.of("sha256", "next") == now
    sums.begin(None)
    sums.write("q", torch.ones(16, 64))
    assert sums.of("xxh3_128", None)["q"] == tensor_checksum(torch.ones(16, 64))


def test_a_tensor_that_was_not_sent_or_sent_twice() -> None:
    """What stayed from before is read; of two writes the last one counts."""
    tensors = _tensors()
    sums = _seasoned(tensors)
    sums.begin("next")
    for value in (1.0, 2.0):
        sums.write("t0", torch.full((64, 64), value))
    held = sums.of("xxh3_128", "next")
    assert held == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_server_that_spoils_its_weights_after_storing_them_is_quarantined(
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    num_before: int,
) -> None:
    """One element, between the last bucket and the checksums: at once, and after good publishes."""
    registry.add("server-0", start_torch_server(make_model()).url)
    publisher = make_publisher()
    for version in range(num_before):
        publisher.publish(LocalTensors.of(other_weights), version)
    end = UpdateSession.end
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil_and_end(session: UpdateSession) -> None:
        assert session._staged is not None
        session._staged.named[name].view(-1)[5] += 1
        end(session)

    monkeypatch.setattr(UpdateSession, "end", spoil_and_end)
    with pytest.raises(PublishFailed, match=f"1 tensors differ.*{name}"):
        publisher.publish(LocalTensors.of(other_weights), 8)
    assert registry.state("server-0") == (None, True)
    monkeypatch.setattr(UpdateSession, "end", end)
    publisher.publish(LocalTensors.of(other_weights), 9)
    assert registry.state("server-0") == (9, False)
