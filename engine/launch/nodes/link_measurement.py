"""`python -m outloop.engine.launch.nodes.link_measurement`: clocks and bandwidth between nodes.

One process on each node. Rank 0 prints a Meeting, the others are told its address. All exchange the
time with rank 0; then the first `num_measured` send tensors over the backend of the trainer's
ranks. Rank 0 prints a LinkReport, others Joined, and who cannot go on Missing. The exchange has no
key and listens on all interfaces for as long as it lasts, as the trainer's own.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outloop.buffer.settings import build_settings
from outloop.engine.launch.nodes.answers import (
    Answer,
    ClockOffset,
    Joined,
    LinkReport,
    Meeting,
    Missing,
    SendRate,
    line_of,
)
from outloop.engine.machine.network_interface import name_network

_NUM_EXCHANGES = 8
_FIRST_BYTES = 2**20
_LAST_BYTES = 2**28
_ENOUGH_S = 0.2
"""A transfer that takes so long is long enough to be judged by; shorter ones are made larger."""


class _Unreachable(Exception):
    """The others do not meet; `ranks`: that did not come."""

    def __init__(self, sentence: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(sentence)
        self.ranks = ranks


@click.command()
@click.option("--rank", type=int, required=True)
@click.option("--num-ranks", type=int, required=True)
@click.option("--num-measured", type=int, required=True, help="The first so many send tensors.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), required=True)
@click.option("--timeout-s", type=float, required=True, help="Of each wait for another rank.")
@click.option("--meet", metavar="HOST:PORT", help="Where rank 0 is; rank 0 says it itself.")
@click.option("--advertise", metavar="HOST", help="Of rank 0: where others reach it.")
@click.argument("settings_json")
def main(
    rank: int,
    num_ranks: int,
    num_measured: int,
    backend: str,
    timeout_s: float,
    meet: str | None,
    advertise: str | None,
    settings_json: str,
) -> None:
    """Take part in the measurement as one rank."""
    name_network(build_settings(json.loads(settings_json), source="settings"))
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _open_store(meet, advertise or socket.gethostname(), timeout)
        _meet(store, rank, num_ranks, timeout)
        answer = _measure(store, rank, num_ranks, num_measured, backend, timeout)
    except _Unreachable as error:
        _print(Missing(rank=rank, sentence=str(error), ranks=error.ranks))
        sys.exit(1)
    except RuntimeError as error:
        # What torch, gloo and NCCL raise for what they cannot reach; its first line says it.
        _print(Missing(rank=rank, sentence=" ".join(str(error).splitlines()[0].split())[:300]))
        sys.exit(1)
    _print(answer)


def _print(answer: Answer) -> None:
    sys.stdout.write(line_of(answer))
    sys.stdout.flush()


def _open_store(meet: str | None, host: str, timeout: timedelta) -> Any:
    """The place where ranks find each other; rank 0 opens it and says where it is."""
    if meet is None:
        store = TCPStore("127.0.0.1", 0, None, True, timeout=timeout, wait_for_workers=False)
        _print(Meeting(address=f"{host}:{store.port}"))
        return store
    there, _, port = meet.rpartition(":")
    try:
        # TCPStore would try until the end of its time without saying why.
        socket.create_connection((there, int(port)), timeout.total_seconds()).close()
    except OSError as error:
        raise _Unreachable(f"{socket.gethostname()} cannot reach {meet} ({error})") from error
    return TCPStore(there, int(port), None, False, timeout=timeout, wait_for_workers=False)


def _meet(store: Any, rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Wait until every rank is there."""
    keys = [f"here/{number}" for number in range(num_ranks)]
    store.set(keys[rank], b"1")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        ranks = tuple(number for number, key in enumerate(keys) if not store.check([key]))
        raise _Unreachable("not all nodes came to the meeting", ranks) from error


def _measure(
    store: Any, rank: int, num_ranks: int, num_measured: int, backend: str, timeout: timedelta
) -> LinkReport | Joined:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        clocks = _exchange_times(rank, num_ranks)
        links = _Links(rank, num_measured, backend, timeout)
        sends = tuple(
            SendRate(rank=other, bytes_per_s=links.send_rate(other))
            for other in range(1, num_measured)
        )
        reduced = links.reduce_rate() if num_measured > 1 else 0.0
        # So that no rank ends while another one still needs its store or its connections.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank:
        return Joined(rank=rank)
    return LinkReport(backend=backend, clocks=clocks, sends=sends, reduce_bytes_per_s=reduced)


def _exchange_times(rank: int, num_ranks: int) -> tuple[ClockOffset, ...]:
    """The clocks of the others, as rank 0 sees them by its shortest exchange with each."""
    found = []
    for other in range(1, num_ranks):
        exchanges = []
        for _ in range(_NUM_EXCHANGES if rank in (0, other) else 0):
            told = torch.zeros(1, dtype=torch.float64)
            if rank:
                dist.recv(told, 0)
                told[0] = time.time()
                dist.send(told, 0)
                continue
            before, began = time.time(), time.monotonic()
            dist.send(told, other)
            dist.recv(told, other)
            round_trip_s = time.monotonic() - began
            exchanges.append((round_trip_s, told.item() - before - round_trip_s / 2))
        if exchanges:
            round_trip_s, ahead_s = min(exchanges)
            found.append(ClockOffset(rank=other, ahead_s=ahead_s, round_trip_s=round_trip_s))
    return tuple(found)


class _Links:
    """Transfers over the backend among the first ranks; every one of these calls the same ones."""

    def __init__(self, rank: int, num_measured: int, backend: str, timeout: timedelta) -> None:
        self._rank = rank
        self._num_measured = num_measured
        self._device = torch.device("cuda:0" if backend == "nccl" else "cpu")
        if backend == "nccl" and rank < num_measured:
            torch.cuda.set_device(self._device)
        ranks = list(range(num_measured))
        # Beside the group of all: every rank makes it, only members use it.
        self._group = dist.new_group(ranks, timeout=timeout, backend=backend)

    def send_rate(self, other: int) -> float:
        """Bytes per second from rank 0 to `other`."""

        def send(tensor: torch.Tensor) -> None:
            # An answer shows that all has arrived.
            received = torch.zeros(1, device=self._device)
            if self._rank == 0:
                dist.send(tensor, other, group=self._group)
                dist.recv(received, other, group=self._group)
            elif self._rank == other:
                dist.recv(tensor, 0, group=self._group)
                dist.send(received, 0, group=self._group)

        return self._rate(send)

    def reduce_rate(self) -> float:
        """Bytes per second over the link of each node in an all-reduce."""

        def reduce(tensor: torch.Tensor) -> None:
            dist.all_reduce(tensor, group=self._group)

        return self._rate(reduce) * 2 * (self._num_measured - 1) / self._num_measured

    def _rate(self, transfer: Callable[[torch.Tensor], None]) -> float:
        """Bytes of the largest tensor by its time; it grows until that is long enough."""
        if self._rank >= self._num_measured:
            return math.nan
        size = _FIRST_BYTES
        # Connections are made by the first transfer.
        self._timed(transfer, size)
        while True:
            took_s = self._timed(transfer, size)
            told = torch.tensor([took_s], dtype=torch.float64, device=self._device)
            dist.broadcast(told, 0, group=self._group)
            took_s = told.item()
            if took_s >= _ENOUGH_S or size >= _LAST_BYTES:
                return size / took_s
            # Not above the last size, nor by so much that a slow network needs seconds.
            size = min(_LAST_BYTES, size * max(2, min(16, int(_ENOUGH_S / took_s))))

    def _timed(self, transfer: Callable[[torch.Tensor], None], size: int) -> float:
        tensor = torch.zeros(size // 4, device=self._device)
        dist.barrier(group=self._group)
        began = time.monotonic()
        transfer(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - began


if __name__ == "__main__":
    main()
