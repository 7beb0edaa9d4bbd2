"""The publish of `make bench-fleet`: one publisher and up to 64 receivers, all forked from here.

    python tests/bench/fleet_publish.py [--quick]

A receiver answers every call of a publish and takes part in the group's broadcasts as a server
does; it keeps no weights. Prints the figures as JSON.

publish_s_N: a publish to N receivers, all of its calls included. Every connection is paced to
LINK_BYTES_PER_S, as if each went over a link of its own: without that, all copies would pass
through the memory of one machine, whose limit is their number. publish_growth_N: over that to one,
which must not exceed the rounds of a tree, rounds_N: ceil(log2(N + 1)). copies_root_N: how many
times the publisher sent a byte of the weights; copies_most_N: the most that a receiver did, by what
the kernel counts of each process. publisher_cpu_ms_N: the publisher's CPU time, for each receiver.
unpaced_s_N: without pacing, which is this machine's limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from figures import say

from outloop.buffer.records import ServerEntry
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.engine.publish.publisher import Publisher

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.local_tensors import LocalTensors
from fakes.lying_server import LyingServer

FLEETS = (1, 2, 4, 8, 16, 32, 64)
NUM_REPEATS = 3
LINK_BYTES_PER_S = 10_000_000
BUCKET_BYTES = 2 * 2**20
NUM_BUCKETS = 2
_SO_MAX_PACING_RATE = 47
"""Of <asm-generic/socket.h>; Python has no name for it."""


def pace(bytes_per_s: int) -> None:
    """Have every TCP connection of this process send at most so fast."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type == socket.SOCK_STREAM and one.family != socket.AF_UNIX:
                    one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)


def bytes_written() -> int:
    """What this process has written so far, to sockets too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def receive(pipe: Connection) -> None:
    """A receiver; it does what comes through the pipe, until that is closed."""
    torch.set_num_threads(1)
    with LyingServer("honest") as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        pipe.send(server.url)
        with contextlib.suppress(EOFError):
            while True:
                rate: int = pipe.recv()
                if rate:
                    pace(rate)
                pipe.send(bytes_written())
        server.close()


class Receivers:
    """Receivers, and a registry of the first of them."""

    def __init__(self, number: int) -> None:
        """Fork them; nothing may have threads yet."""
        forked = multiprocessing.get_context("fork")
        self._processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        for _ in range(number):
            ours, theirs = forked.Pipe()
            one = forked.Process(target=_forked, args=(theirs, [*self.pipes, ours]), daemon=True)
            one.start()
            theirs.close()
            self._processes.append(one)
            self.pipes.append(ours)
        self._urls: list[str] = [pipe.recv() for pipe in self.pipes]
        self.number = number

    def close(self) -> None:
        """End them."""
        for pipe in self.pipes:
            pipe.close()
        for one in self._processes:
            one.join(10)
            one.kill()

    def servers(self) -> tuple[ServerEntry, ...]:
        """The first `number`."""
        return tuple(
            ServerEntry(
                server_id=f"server-{index:02}",
                url=url,
                kind="torch",
                policy_version=None,
                is_quarantined=False,
            )
            for index, url in enumerate(self._urls[: self.number])
        )

    def set_server_version(
        self, server_id: str, policy_version: int | None, *, quarantined: bool
    ) -> None:
        """A publish that fails is no measurement."""
        assert not quarantined, server_id

    def ask(self, rate: int = 0) -> list[int]:
        """Pace the first `number` if there is a rate; what each has written so far."""
        for pipe in self.pipes[: self.number]:
            pipe.send(rate)
        return [pipe.recv() for pipe in self.pipes[: self.number]]


def _forked(pipe: Connection, others: Sequence[Connection]) -> None:
    """A receiver ends when its own pipe does, so it must hold no other's."""
    for other in others:
        other.close()
    receive(pipe)


@contextlib.contextmanager
def publisher(receivers: Receivers, source: LocalTensors, folder: Path) -> Iterator[Publisher]:
    """A publisher to all of `receivers`, whose group is joined."""
    settings = build_settings(
        {
            "model": {"path": str(folder)},
            "server": {"num_servers": receivers.number},
            "publish": {
                "transport": "collective",
                "fallback": "none",
                "verify": "none",
                "bucket_mb": BUCKET_BYTES / 2**20,
            },
        },
        source="bench",
    )
    one = Publisher(create_run(settings, folder / "run", "unix:///none"), receivers)
    try:
        one.publish(source, 1)
        yield one
    finally:
        one.close()


def measure(
    fleets: Sequence[int] = FLEETS,
    *,
    num_repeats: int = NUM_REPEATS,
    link_bytes_per_s: int = LINK_BYTES_PER_S,
) -> dict[str, float]:
    """Every figure by name."""
    num_each = BUCKET_BYTES // 4
    tensors = {f"w{index}": torch.zeros(num_each) for index in range(NUM_BUCKETS)}
    source, num_bytes = LocalTensors(tensors), NUM_BUCKETS * BUCKET_BYTES
    receivers = Receivers(max(fleets))
    figures: dict[str, float] = {}
    try:
        for number in fleets:
            say(f"a publish to {number} receivers")
            receivers.number = number
            with (
                tempfile.TemporaryDirectory() as folder,
                publisher(receivers, source, Path(folder)) as one,
            ):
                before, own = receivers.ask(), bytes_written()
                unpaced_s = one.publish(source, 2).duration_s
                own = bytes_written() - own
                sent = [b - a for a, b in zip(before, receivers.ask(), strict=True)]
                pace(link_bytes_per_s)
                receivers.ask(link_bytes_per_s)
                cpu_s, seconds = time.process_time(), []
                for version in range(3, 3 + num_repeats):
                    report = one.publish(source, version)
                    assert report.num_buckets == NUM_BUCKETS
                    seconds.append(report.duration_s)
                cpu_s = (time.process_time() - cpu_s) / num_repeats
            figures |= {
                f"publish_s_{number}": statistics.median(seconds),
                f"rounds_{number}": math.ceil(math.log2(number + 1)),
                f"copies_root_{number}": own // num_bytes,
                f"copies_most_{number}": max(sent) // num_bytes,
                f"publisher_cpu_ms_{number}": 1000 * cpu_s / number,
                f"unpaced_s_{number}": unpaced_s,
            }
            growth = figures[f"publish_s_{number}"] / figures[f"publish_s_{fleets[0]}"]
            figures[f"publish_growth_{number}"] = growth
    finally:
        receivers.close()
    return figures


def main() -> None:
    """Measure and print."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    asked = argparse.ArgumentParser()
    asked.add_argument("--quick", action="store_true")
    is_quick = asked.parse_args().quick
    torch.set_num_threads(1)
    print(json.dumps(measure(FLEETS[:4] if is_quick else FLEETS)))


if __name__ == "__main__":
    main()
