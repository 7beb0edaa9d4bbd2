"""A Redis that goes away while a trainer works: it comes back whole, late, shorter or empty."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fakes.bad_wire import BadWire
from outloop.buffer.errors import BufferLost, BufferUnavailable, WritesLost
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.outage import Continuity
from outloop.buffer.run import Run

T = TypeVar("T")


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """One that a test may kill; it has what it acknowledged also where its disk was busy."""
    with EmbeddedRedis(tmp_path / "redis", fsync="always", max_memory_mb=64) as server:
        yield server


@pytest.fixture
def patient(own_server: EmbeddedRedis, make_run: Callable[..., Run]) -> Iterator[BufferReader]:
    """The trainer's end of a run, which waits for Redis."""
    reader = BufferReader.connect_patiently(make_run(own_server.url, buffer__max_outage_s=30))
    yield reader
    reader.close()


def kill(server: EmbeddedRedis) -> None:
    """kill -9, until it is gone."""
    os.kill(server.pid, signal.SIGKILL)
    while server.exit_code is None:
        time.sleep(0.001)


def during_outage(server: EmbeddedRedis, call: Callable[[], T], away_s: float = 0.3) -> T:
    """What `call` returns that is made while the server is dead, and started again by this thread:
    it ends with the thread that started it."""
    kill(server)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        with pytest.raises(TimeoutError):
            calling.result(away_s)
        server.start_again()
        return calling.result(10)


@pytest.mark.medium
def test_a_call_waits_for_a_server_that_was_killed(
    own_server: EmbeddedRedis, patient: BufferReader
) -> None:
    """Each kind of call, on its own connection or in a pipeline; what was there is there."""
    fence = patient.acquire_fence()
    patient.announce_version(0, None)
    for call in (
        lambda: patient.renew(fence),
        lambda: patient.registry.report_status("trainer", {"step": "1"}),
        patient.registry.servers,
        patient.stats,
    ):
        during_outage(own_server, call)
    assert patient.highest_version() == 0


@pytest.mark.medium
def test_a_call_gives_up_at_its_bound(
    own_server: EmbeddedRedis, make_run: Callable[..., Run]
) -> None:
    """As a sentence, and not before."""
    run = make_run(own_server.url, buffer__max_outage_s=0.5)
    reader = BufferReader.connect_patiently(run)
    kill(own_server)
    began_at = time.monotonic()
    with pytest.raises(BufferUnavailable, match="acquiring the fence: Redis did not answer"):
        reader.acquire_fence()
    assert 0.5 <= time.monotonic() - began_at < 5
    reader.close()


def test_without_a_bound_nothing_is_waited_for(
    own_server: EmbeddedRedis, make_run: Callable[..., Run]
) -> None:
    """max_outage_s = 0 is the reader that fails at once."""
    reader = BufferReader.connect_patiently(make_run(own_server.url, buffer__max_outage_s=0))
    kill(own_server)
    began_at = time.monotonic()
    with pytest.raises(BufferUnavailable):
        reader.acquire_fence()
    assert time.monotonic() - began_at < 1
    reader.close()


@pytest.mark.medium
def test_joining_waits_for_a_server_that_is_started_later(
    own_server: EmbeddedRedis, make_run: Callable[..., Run]
) -> None:
    """A part that starts while Redis is away does not end."""
    run = make_run(own_server.url)
    reader = during_outage(own_server, lambda: BufferReader.connect_patiently(run))
    reader.check_run()
    reader.close()


@pytest.mark.medium
@pytest.mark.parametrize("is_script", [True, False])
def test_a_server_that_comes_back_empty_is_refused_at_once(
    is_script: bool, own_server: EmbeddedRedis, patient: BufferReader, tmp_path: Path
) -> None:
    """Whatever is asked; nothing is written into it."""
    fence = patient.acquire_fence()
    kill(own_server)
    for path in (tmp_path / "redis").glob("appendonly*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    own_server.start_again()
    with pytest.raises(BufferLost, match="came back without this run"):
        patient.renew(fence) if is_script else patient.set_steps_left(3)
    with pytest.raises(BufferLost):
        patient.check_run()


@pytest.mark.medium
async def test_a_server_that_lost_its_last_writes_is_told_from_one_that_lost_none(
    own_server: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """What the trainer did since would rest on what is not there, such as groups that it took and
    that would be given out again. A trainer that starts again goes on."""
    loop = await loop_on(own_server.url, buffer__max_staleness=1)
    await loop.play_all()
    patient = BufferReader.connect_patiently(loop.reader.run)
    fence = patient.acquire_fence()
    version = patient.recover(None, fence=fence) + 1
    synced = aof_of(tmp_path / "redis").stat().st_size
    patient.announce_version(version, None)
    kill(own_server)
    os.truncate(aof_of(tmp_path / "redis"), synced)
    own_server.start_again()
    for _ in range(2):
        with pytest.raises(WritesLost, match="goes back to its last checkpoint"):
            patient.renew(fence)
    again = BufferReader.connect_patiently(loop.reader.run)
    # Servers may hold the version that Redis has forgotten.
    assert again.recover(None, fence=again.acquire_fence()) == version
    again.close()
    patient.close()


def aof_of(folder: Path) -> Path:
    """What the server appends to; before Redis 7 that was the only file."""
    (path,) = [*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")]
    return path


async def test_a_take_is_answered_again_though_another_step_was_marked_meanwhile(
    tmp_path: Path, server: EmbeddedRedis, loop_on: Callable[..., Any]
) -> None:
    """Its answer is lost with the connection, and a publish beside training is marked before the
    take is repeated: the groups are the same ones, and stay this trainer's."""
    with BadWire(tmp_path, server.url.removeprefix("unix://")) as wire:
        loop = await loop_on(wire.url, buffer__max_staleness=1, buffer__pipeline_depth=1)
        await loop.play_all()
        first = loop.take(2)
        loop.publish(1, 0)
        wire.loses_answers = True
        with pytest.raises(BufferUnavailable):
            loop.take(2)
        wire.loses_answers = False
        loop.reader.mark_trained(
            [lease.group.group_id for lease in first], fence=loop.fence, policy_version=1
        )
        slots = [lease.group.slot for lease in (*first, *loop.take(2))]
        assert slots == [0, 1, 2, 3]


def test_a_bound_beyond_the_leases_is_refused(make_run: Callable[..., Run]) -> None:
    """A trainer that waits for longer would have nothing left of what it took."""
    with pytest.raises(ValueError, match=r"max_outage_s=60 exceeds half of buffer\.lease_s=100"):
        make_run("unix:///nowhere", buffer__max_outage_s=60, buffer__lease_s=100)


def test_what_is_acknowledged_while_a_server_is_asked_was_not_lost() -> None:
    """Two threads of a trainer connect again at once: one has a write acknowledged after the other
    was told the count, and before it looks at it."""
    continuity = Continuity("meta", "state")
    continuity.note(5)

    class Connection:
        def __init__(self, *answers: int) -> None:
            self.answers = iter(answers)

        def on_connect(self) -> None:
            pass

        def send_command(self, *words: str) -> None:
            pass

        def read_response(self) -> int:
            answer = next(self.answers)
            if answer == 5:
                continuity.note(6)
            return answer

        def disconnect(self) -> None:
            pass

    continuity.check(Connection(1, 5))
    with pytest.raises(WritesLost, match="without the last 1 writes"):
        continuity.check(Connection(1, 5))
