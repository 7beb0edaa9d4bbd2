"""A Redis Cluster of three primaries, one with two replicas: real processes, and its end."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from fakes.outages import play_while, until_accepted
from fakes.ports import free_ports
from fakes.redis_servers import Cluster, RedisServers
from outloop.buffer.errors import BufferUnavailable, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import (
    connect_async,
    connect_sync,
    ports_of,
    translated,
    wait_for_redis,
)
from outloop.buffer.redis.keys import hash_tag
from outloop.buffer.redis.requirements import read_server
from outloop.buffer.run import Run
from outloop.buffer.writer import BufferWriter


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """With two nodes that own nothing yet."""
    found = Cluster(tmp_path / "cluster", num_spares=2)
    try:
        found.form()
        yield found
    finally:
        found.stop()


def owner_of(run: Run, cluster: Cluster, *, without: int = 0) -> int:
    """The port of the primary that has the run, as a node other than `without` says."""
    among = [port for port in cluster.primaries if port != without]
    return cluster.owner(key_slot(hash_tag(run.run_id).encode()), among=among)


@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_when_the_owner_is_killed(
    cluster: Cluster,
    make_run: Callable[..., Run],
    loop_of: Callable[..., Any],
    make_turn: Callable[..., Any],
) -> None:
    """Turns are recorded without a pause while the primary that owns the run dies; each is there
    once afterwards. The trainer waits for them over the kill, and who listens to the run's channel
    hears again."""
    changes = {"buffer__min_replicas": 1, "buffer__group_size": 8, "buffer__max_outage_s": 60}
    run = make_run(cluster.url, buffer__redis_url=cluster.url, **changes)
    first = owner_of(run, cluster)
    cluster.replicate(first)
    writer = await BufferWriter.connect(run)
    reader = BufferReader.connect_patiently(run)
    loop = loop_of(writer, reader)
    await until_accepted(loop.start)
    heard: list[bytes] = []
    listening = asyncio.create_task(writer.channel.listen({"news": heard.append}))
    assert await writer.channel.is_listening(30)
    await play_while(loop, make_turn, lambda: cluster.kill(first), timeout_s=90)
    assert owner_of(run, cluster, without=first) in cluster.spares
    async with asyncio.timeout(60):
        while not heard:
            await until_accepted(lambda: writer.channel.publish("news", b"back"))
            await asyncio.sleep(0.05)
    listening.cancel()
    reader.close()
    await writer.close()


@pytest.mark.slow
async def test_a_run_moves_with_its_slot(
    cluster: Cluster, make_run: Callable[..., Run], loop_of: Callable[..., Any]
) -> None:
    """A primary that hands over to its replica, as before its machine is shut down: calls go on by
    themselves, and clients of the old primary find the new one."""
    run = make_run(cluster.url, buffer__redis_url=cluster.url)
    first = owner_of(run, cluster)
    cluster.replicate(first)
    writer = await BufferWriter.connect(run)
    reader = BufferReader.connect_patiently(run)
    loop = loop_of(writer, reader)
    await loop.start()
    claims = (await loop.claim(count=2)).claims
    cluster.ask(cluster.spares[0], "CLUSTER", "FAILOVER")
    cluster.wait_for_owner(cluster.spares[0], key_slot(hash_tag(run.run_id).encode()))
    await until_accepted(lambda: loop.play(claims[0]))
    await until_accepted(lambda: loop.play(claims[1]))
    for claim in (await loop.claim(count=2)).claims:
        await loop.play(claim)
    assert len(loop.take(2, timeout_s=30)) == 2
    # The old one lives, as a replica, and may be asked first.
    assert cluster.ask(first, "ROLE")[0] == b"slave"
    reader.close()
    await writer.close()


@pytest.mark.slow
def test_a_whole_run_s_keys_are_on_one_primary(
    cluster: Cluster, make_run: Callable[..., Run]
) -> None:
    """Runs spread over the primaries by their ids; what looks without a run finds the cluster."""
    runs = [make_run(cluster.url, run__name=f"run{n}") for n in range(6)]
    by_port = {port: cluster.ask(port, "KEYS", "*") for port in cluster.primaries}
    for run in runs:
        tag = hash_tag(run.run_id).encode()
        owners = [port for port, names in by_port.items() if any(tag in name for name in names)]
        assert owners == [owner_of(run, cluster)]
    with closing(connect_sync(cluster.url)) as client:
        wait_for_redis(cluster.url, 5.0)
        server = read_server(client)
        assert server is not None
        server.check()


@pytest.mark.medium
async def test_a_server_that_is_no_cluster_and_one_that_is_away_are_sentences(
    tmp_path: Path,
) -> None:
    """As every error of a connection."""
    (port,) = free_ports(1)
    url = f"redis+cluster://127.0.0.1:{port}"
    with closing(connect_sync(url)) as client, translated_error("no node of the cluster names"):
        client.ping()
    servers = RedisServers(tmp_path / "alone")
    servers.start(port, [])
    try:
        wait_for_redis(f"redis://127.0.0.1:{port}", 30.0)
        with closing(connect_sync(url)) as client, translated_error("is no node of a cluster"):
            client.ping()
        client = connect_async(url)
        with translated_error("is no node of a cluster"):
            await client.ping()
        await client.aclose()
    finally:
        servers.stop()


def translated_error(words: str) -> Any:
    """What the block raises, as the buffer's error with these words."""
    stack = ExitStack()
    stack.enter_context(pytest.raises(BufferUnavailable, match=words))
    stack.enter_context(translated("looking"))
    return stack


@pytest.mark.parametrize("url", ["redis+cluster://", "redis+cluster://h:x", "redis+cluster://h/1"])
def test_an_address_of_a_cluster_that_cannot_be_read_is_a_sentence(url: str) -> None:
    with pytest.raises(SettingsError, match=r"redis\+cluster://host:port,host:port are allowed"):
        connect_sync(url)


def test_ports_of_addresses() -> None:
    """For rules about who may reach whom."""
    assert ports_of("redis+cluster://u@a:7000,b:7001,c") == [6379, 7000, 7001]
    assert ports_of("sentinel://a:26380,b/g/0") == [6379, 26379, 26380]
    assert ports_of("rediss://u@h:6390/0") == [6390]
