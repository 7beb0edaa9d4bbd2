"""A Redis that answers and cannot write: whoever writes waits, whoever reads goes on."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fakes.small_disk import SmallDisk, small_disk
from outloop.buffer.errors import WritesRefused
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.run import Run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["a file system without room", "a limit on files"])
def disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SmallDisk]:
    """Where the server has its data."""
    with small_disk(tmp_path / "redis", monkeypatch, mounts="system" in request.param) as found:
        yield found


@pytest.fixture
def full(disk: SmallDisk) -> Iterator[EmbeddedRedis]:
    """A server on it, which must sync within a second."""
    with EmbeddedRedis(disk.folder, max_memory_mb=64) as server:
        yield server
        disk.make_room()


def wait_for_obstacle(reader: BufferReader) -> str:
    """What the reader says, once the server has found its disk full."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(WritesRefused):
            reader.registry.report_status("filler", {"text": "x" * 10_000})
        if (found := reader.write_obstacle()) is not None:
            return found
    raise AssertionError("the disk was never full")


@pytest.mark.medium
def test_a_full_disk_is_an_outage_with_a_name(
    disk: SmallDisk, full: EmbeddedRedis, make_run: Callable[..., Run]
) -> None:
    """Trainer's calls of each kind wait and are made once there is room; reads do not wait; the
    sentence names the folder and what to do."""
    run = make_run(full.url, buffer__redis_url=full.url, buffer__max_outage_s=30)
    plain, patient = BufferReader.connect(run), BufferReader.connect_patiently(run)
    fence = patient.acquire_fence()
    assert plain.write_obstacle() is None
    disk.fill(full.pid)
    obstacle = wait_for_obstacle(plain)
    assert obstacle.startswith(f"Redis cannot write: disk full at {disk.folder} (")
    assert "free space" in obstacle
    assert plain.run_status()["redis"] == obstacle
    with ThreadPoolExecutor(3) as pool:
        writing = [
            pool.submit(patient.announce_version, 0, None),
            pool.submit(patient.renew, fence),
            pool.submit(patient.registry.report_status, "trainer", {"step": "1"}),
        ]
        # A read of the same reader, meanwhile.
        assert patient.highest_version() == -1
        assert not any(one.done() for one in writing)
        disk.make_room()
        for one in writing:
            one.result(20)
    assert patient.highest_version() == 0
    assert plain.registry.statuses()["trainer"] == {"step": "1"}
    assert plain.write_obstacle() is None
    assert "redis" not in plain.run_status()
    patient.close()
    plain.close()


@pytest.mark.medium
def test_the_wait_has_the_bound_of_every_outage(
    disk: SmallDisk, full: EmbeddedRedis, make_run: Callable[..., Run]
) -> None:
    """Then the error says what to do, and for how long was waited."""
    run = make_run(full.url, buffer__max_outage_s=0.5)
    plain, patient = BufferReader.connect(run), BufferReader.connect_patiently(run)
    fence = patient.acquire_fence()
    disk.fill(full.pid)
    wait_for_obstacle(plain)
    began_at = time.monotonic()
    with pytest.raises(WritesRefused, match=r"for buffer\.max_outage_s=0\.5.*free space"):
        patient.renew(fence)
    assert time.monotonic() - began_at >= 0.5
    patient.close()
    plain.close()


@pytest.mark.medium
async def test_a_trainer_never_waits_for_memory_that_only_it_can_free(
    loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """In a full Redis it takes, says how far it is, publishes and acknowledges at once; a call
    that needs room waits for it."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as server:
        loop = await loop_on(server.url, buffer__max_staleness=1)
        await loop.play_all()
        client = loop.reader.client
        patient = BufferReader.connect_patiently(loop.reader.run)
        client.config_set("maxmemory", "1mb")
        obstacle = loop.reader.write_obstacle()
        assert obstacle is not None
        assert obstacle.startswith("Redis cannot write: its memory is full; raise")
        leases = loop.take(2)
        patient.registry.report_status("trainer", {"step": "1"})
        patient.registry.set_server_version("server-0", 1, quarantined=False)
        patient.set_steps_left(1)
        loop.reader.acknowledge(loop.train(leases, 1))
        with ThreadPoolExecutor(1) as pool:
            claiming = pool.submit(patient.registry.claim_devices)
            with pytest.raises(TimeoutError):
                claiming.result(0.3)
            client.config_set("maxmemory", "64mb")
            claiming.result(20)
        patient.close()
