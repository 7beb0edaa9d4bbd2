"""Bytes between trainer ranks, and agreement on a failure.

No object is pickled. All ranks call the same function in the same order, and all of them fail
where one does. Bytes travel on the CPU, over gloo: a rank that waits in NCCL keeps a kernel
spinning on its GPU, which servers may share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from outloop.buffer.errors import OutloopError, PartFailed, RankKilled, SettingsError
from outloop.engine.machine.memory_shortage import is_memory_shortage

Result = TypeVar("Result")


def broadcast_bytes(data: bytes) -> bytes:
    """Rank 0's bytes, on every rank; the other ranks' argument is ignored."""
    if dist.get_world_size() == 1:
        return data
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, src=0)
    payload = (
        _as_tensor(data) if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    )
    if len(payload):
        dist.broadcast(payload, src=0)
    return payload.numpy().tobytes()


def gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's bytes in order of rank, on every rank."""
    world = dist.get_world_size()
    if world == 1:
        return [data]
    sizes = torch.zeros(world, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(data)]))
    longest = int(sizes.max())
    if longest == 0:
        return [b""] * world
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = _as_tensor(data)
    everything = torch.empty(world * longest, dtype=torch.uint8)
    dist.all_gather_into_tensor(everything, padded)
    rows = everything.view(world, longest).numpy()
    return [rows[rank, :size].tobytes() for rank, size in enumerate(sizes.tolist())]


def meet() -> None:
    """Return when every rank has called it: where what follows on one, or in a server, needs what
    all of them did before."""
    gather_bytes(b"")


def agree(phase: str, function: Callable[[], Result]) -> Result:
    """The function's result, if it succeeds on every rank.

    For work in which ranks do not wait for each other. A rank that fails reports it to the
    others, and all of them raise, so that none is left waiting.

    Raises:
        SettingsError: on every rank, when any rank raised one; its sentence.
        RankKilled: on the other ranks, when the system gave a rank no more memory.
        PartFailed: on the other ranks, when a rank failed otherwise.
    """
    failure: Exception | None = None
    result: list[Result] = []
    try:
        result.append(function())
    except Exception as error:  # noqa: BLE001 - sent to the other ranks, then raised
        failure = error
    sentences = gather_bytes(_sentence(failure))
    if failure is not None:
        raise failure
    for rank, sentence in enumerate(sentences):
        if sentence:
            kind, text = chr(sentence[0]), sentence[1:].decode()
            if kind == "s":
                raise SettingsError(text)
            if kind == "k":
                raise RankKilled(
                    f"the system gave trainer rank {rank} no more memory in phase={phase!r}: {text}"
                )
            raise PartFailed(f"trainer rank {rank} failed in phase={phase!r}: {text}")
    return result[0]


def _sentence(error: Exception | None) -> bytes:
    if error is None:
        return b""
    text = str(error) if isinstance(error, OutloopError) else repr(error)
    kind = "k" if is_memory_shortage(error) else "f"
    return (("s" if isinstance(error, SettingsError) else kind) + text).encode()


def _as_tensor(data: bytes) -> Tensor:
    # frombuffer refuses an empty buffer, and a read-only one gives a warning.
    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
