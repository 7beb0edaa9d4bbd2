"""A primary with two replicas, watched by three Sentinels: real processes, and its end."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from fakes.outages import play_while, until_accepted
from fakes.ports import free_ports
from fakes.redis_servers import RedisServers
from outloop.buffer.errors import BufferUnavailable, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.run import Run
from outloop.buffer.settings import build_settings
from outloop.buffer.writer import BufferWriter

GROUP = "outloop"
REPLICATED = {"buffer__min_replicas": 1, "buffer__redis_url": "given below"}


class Watched(RedisServers):
    """Three data servers and three Sentinels on loopback."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        ports = free_ports(6)
        self.data, self.sentinels = ports[:3], ports[3:]
        for port in self.data:
            lines = ["save ''", "appendonly no"]
            if port != self.data[0]:
                lines.append(f"replicaof 127.0.0.1 {self.data[0]}")
            self.start(port, lines)
        for port in self.sentinels:
            lines = [
                f"sentinel monitor {GROUP} 127.0.0.1 {self.data[0]} 2",
                # Longer than a busy machine lets a primary wait, which is not to be replaced then.
                f"sentinel down-after-milliseconds {GROUP} 2000",
                f"sentinel failover-timeout {GROUP} 10000",
            ]
            self.start(port, lines, "--sentinel")

    @property
    def url(self) -> str:
        """Of the group."""
        return f"sentinel://{','.join(f'127.0.0.1:{port}' for port in self.sentinels)}/{GROUP}/0"

    def wait_until_watched(self, num_replicas: int) -> None:
        """Every Sentinel knows the primary, its replicas and the other Sentinels."""
        deadline = time.monotonic() + 30
        while not all(self._knows(port, num_replicas) for port in self.sentinels):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _knows(self, port: int, num_replicas: int) -> bool:
        client = redis.Redis(port=port, protocol=2)
        try:
            state: Any = client.sentinel_master(GROUP)
            replicas: Any = client.sentinel_slaves(GROUP)
        except redis.RedisError:
            return False
        finally:
            client.close()
        up = [one for one in replicas if one["master-link-status"] == "ok"]
        return int(state["num-other-sentinels"]) == 2 and len(up) == num_replicas

    def primary(self) -> int:
        """Its port, as the group's client finds it."""
        client = connect_sync(self.url)
        try:
            return int(client.info("server")["tcp_port"])
        finally:
            client.close()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """The group, when failing over works."""
    group = Watched(tmp_path / "group")
    try:
        group.wait_until_watched(2)
        yield group
    finally:
        group.stop()


@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_when_the_primary_is_killed(
    watched: Watched,
    make_run: Callable[..., Run],
    loop_of: Callable[..., Any],
    make_turn: Callable[..., Any],
) -> None:
    """Turns are recorded without a pause while the primary dies; each is there once afterwards. The
    trainer waits for them over the kill, on a connection that has to find the new primary."""
    changes = {"buffer__group_size": 8, "buffer__max_outage_s": 60}
    run = make_run(watched.url, **REPLICATED, **changes)
    first = watched.primary()
    assert first == watched.data[0]
    writer = await BufferWriter.connect(run)
    reader = BufferReader.connect_patiently(run)
    loop = loop_of(writer, reader)
    await until_accepted(loop.start)
    await play_while(loop, make_turn, lambda: watched.kill(first), timeout_s=90)
    assert watched.primary() != first
    reader.close()
    await writer.close()


@pytest.mark.slow
async def test_a_record_that_no_replica_has_is_not_acknowledged(
    watched: Watched, loop_on: Callable[..., Any], make_turn: Callable[..., Any]
) -> None:
    loop = await loop_on(watched.url, **REPLICATED)
    (claim,) = (await loop.claim(count=1)).claims
    episode_id = await loop.open(claim)
    for port in watched.data[1:]:
        watched.kill(port)
    with pytest.raises(BufferUnavailable, match=r"0 of buffer\.min_replicas=1 have it.*replicas"):
        await loop.writer.append_turn(make_turn(episode_id))
    with pytest.raises(BufferUnavailable, match="bring them back"):
        loop.take(1)


@pytest.mark.parametrize("url", ["sentinel://", "sentinel://h:x/g", "sentinel://h/g/zero"])
def test_an_address_of_sentinels_that_cannot_be_read_is_a_sentence(url: str) -> None:
    with pytest.raises(SettingsError, match=r"sentinel://host:port,host:port/group/db"):
        connect_sync(url)


def test_replicas_of_the_embedded_server_are_refused(tmp_path: Path) -> None:
    tree = {"model": {"path": str(tmp_path)}, "buffer": {"min_replicas": 1}}
    with pytest.raises(SettingsError, match=r"buffer\.min_replicas=1 has no effect"):
        build_settings(tree, source="a test")
