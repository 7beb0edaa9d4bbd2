"""What keeps a broken NCCL group from ending or holding the trainer; shown without a GPU.

torch without CUDA has no NCCL: a stand-in records how a group is made. The same group breaks for
real in `make gpu-check`.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from fakes.local_tensors import LocalTensors
from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.plan import PACKED, TensorSpec
from outloop.engine.publish.buckets.staging import DeviceBuffer, Staging
from outloop.engine.publish.process_group import Rendezvous, join_group
from outloop.engine.publish.sending.orders import Begin, Fill
from outloop.engine.publish.sending.ranks import OrderedRanks, OwnRank
from outloop.engine.publish.sending.sending_rank import Packing, SendingRank, ShareReader
from outloop.engine.publish.transports.base import Outgoing
from outloop.engine.publish.transports.broadcast import GroupSender

GUARDS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
COMMUNICATOR = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
PHASE_S = 0.4


class _Nccl:
    """torch.distributed.ProcessGroupNCCL, as far as joining and leaving go."""

    made: ClassVar[list["_Nccl"]] = []

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)
            self._timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.environment = {name: os.environ.get(name) for name in (*GUARDS, COMMUNICATOR)}
        self.blocking = options.config.blocking
        self.timeout = options._timeout
        self.waits: list[timedelta] = []
        self.is_aborted = False
        self.made.append(self)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        """Work that fails when it is waited for, as NCCL's does."""
        return self

    def wait(self, timeout: timedelta) -> None:
        self.waits.append(timeout)
        raise RuntimeError("NCCL WARN Mismatched NCCL version detected : rank 0 22907 rank 1 23007")

    def abort(self) -> None:
        self.is_aborted = True


def test_a_group_of_nccl_does_not_block_and_does_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Communicators that do not block, errors that only clean up, for this group alone; every wait
    has its deadline."""
    for name in (*GUARDS, COMMUNICATOR):
        monkeypatch.setenv(name, "3")
        if name != "TORCH_NCCL_ASYNC_ERROR_HANDLING":
            monkeypatch.delenv(name)
    rendezvous = Rendezvous("127.0.0.1")
    group = join_group(
        "127.0.0.1",
        rendezvous.port,
        rank=0,
        world_size=2,
        name="g",
        backend="nccl",
        timeout_s=4.5,
        nccl_type=_Nccl,
    )
    (made,) = _Nccl.made
    assert (made.blocking, made.timeout) == (0, timedelta(seconds=4.5))
    # The process reads the last one once, so it stays.
    assert made.environment == GUARDS | {COMMUNICATOR: "5"}
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert not os.environ.keys() & (GUARDS.keys() - {"TORCH_NCCL_ASYNC_ERROR_HANDLING"})
    with pytest.raises(PublishFailed, match="same release of NCCL: see `outloop doctor`"):
        group.broadcast(torch.zeros(4, dtype=torch.uint8), timeout_s=1.5)
    assert made.waits == [timedelta(seconds=1.5)]
    group.close()
    assert made.is_aborted
    rendezvous.close()


class _Stuck:
    """A group of which a broadcast never ends; the first, where NCCL made the communicator."""

    device_type = "cpu"

    def __init__(self, until: threading.Event) -> None:
        self.lengths: list[int] = []
        self.num_carried = 0
        self._until = until

    def broadcast(self, content: torch.Tensor, *, timeout_s: float) -> None:
        self.lengths.append(len(content))
        if len(self.lengths) > self.num_carried:
            self._until.wait(60.0)

    def close(self) -> None:
        """Blocks too."""
        self._until.wait(60.0)


class _Answering:
    """Servers that answer everything at once."""

    timeout_s = PHASE_S

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(name for name in ("a", "b") if name not in self.failed)

    def url_of(self, server_id: str) -> str:
        return "http://127.0.0.1:9"

    def start(self, action: Any) -> dict[str, Future[None]]:
        answers: dict[str, Future[None]] = {name: Future() for name in self.left}
        for answer in answers.values():
            answer.set_result(None)
        return answers

    def fail(self, server_id: str, phase: str, error: str) -> None:
        self.failed[server_id] = f"{phase}: {error}"

    def require_some(self) -> None:
        if not self.left:
            raise PublishFailed("no server is left")


@pytest.fixture
def stuck() -> Iterator[_Stuck]:
    """A group that lets go when the test is over."""
    until = threading.Event()
    yield _Stuck(until)
    until.set()


@pytest.fixture
def send(stuck: _Stuck) -> Iterator[Any]:
    """`send(servers, backend)`: one bucket of 16 bytes over that group, from join to finish."""
    spec = TensorSpec(name="t", shape=(4,), dtype=torch.float32)
    packing = Packing(bucket_bytes=64, dtype=torch.float32, alignment=PACKED)
    senders: list[GroupSender] = []

    def run(servers: Any, backend: Any) -> None:
        group: Any = stuck

        def make(reader: ShareReader) -> SendingRank:
            staging = Staging(DeviceBuffer(torch.device("cpu")))
            return SendingRank(
                reader, packing, staging, backend=backend, join=lambda *_, **__: group
            )

        source = LocalTensors({spec.name: torch.zeros(4)})
        ranks = OrderedRanks(OwnRank(make).reading(source), "collective")
        sender = GroupSender(host="127.0.0.1", backend=backend)
        senders.append(sender)
        ranks.all(Begin(()))
        ranks.all(Fill(0))
        sender.connect(servers, ranks)
        ((bucket,),) = packing.plan(ranks.shares)
        sender.start(servers, Outgoing(0, 0, bucket))
        sender.finish(servers)

    yield run
    for sender in senders:
        sender.close()


@pytest.mark.medium
@pytest.mark.parametrize("num_carried", [0, 1])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_broadcast_that_never_ends_costs_its_deadline(
    stuck: _Stuck, send: Any, backend: Any, num_carried: int
) -> None:
    """Every member is given up within the deadline, in the join where it is the group's first
    byte: no weights are sent then."""
    servers: Any = _Answering()
    stuck.num_carried = num_carried
    began_at = time.monotonic()
    with pytest.raises(PublishFailed):
        send(servers, backend)
    assert time.monotonic() - began_at < 10 * PHASE_S
    assert stuck.lengths == [1, 16][: num_carried + 1]
    assert sorted(servers.failed) == ["a", "b"]
    phase = ("join", "bucket")[num_carried]
    assert all(failure.startswith(f"{phase}: ") for failure in servers.failed.values())
    assert ("to be started again" in servers.failed["a"]) == (backend == "nccl")
