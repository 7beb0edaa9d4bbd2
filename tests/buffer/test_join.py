"""Who may join a run, and what happens when its data is not there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import BufferUnavailable, SchemaMismatch, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import ServerEntry
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import Run
from outloop.buffer.writer import BufferWriter


async def test_other_settings_may_not_join(
    server: EmbeddedRedis, make_run: Callable[..., Run]
) -> None:
    """A process with another digest is refused by both faces."""
    run = make_run(server.url)
    other = replace(
        run, settings=make_run(server.url, run__name="u", buffer__group_size=4).settings
    )
    with pytest.raises(SettingsError, match="settings digest"):
        BufferReader.connect(other)
    with pytest.raises(SettingsError, match="settings digest"):
        await BufferWriter.connect(other)


async def test_an_empty_redis_is_noticed_when_joining_and_at_every_call(
    start: Callable[..., Any], clients: Any
) -> None:
    """Data that vanished is never trained through."""
    loop = await start()
    client = loop.reader.client
    claims = (await loop.claim()).claims
    for name in client.scan_iter(match=f"{loop.reader.prefix}*", count=1000):
        client.delete(name)
    with pytest.raises(BufferUnavailable, match="emptied"):
        await loop.claim()
    with pytest.raises(BufferUnavailable, match="emptied"):
        await loop.open(claims[0])
    with pytest.raises(BufferUnavailable, match="emptied"):
        loop.take()
    with pytest.raises(BufferUnavailable, match="emptied"):
        await loop.writer.policy_state()
    with pytest.raises(BufferUnavailable, match="holds nothing of this run"):
        BufferReader.connect(loop.reader.run, connect_client=clients.sync)
    with pytest.raises(BufferUnavailable, match="holds nothing of this run"):
        await BufferWriter.connect(loop.reader.run, connect_client=clients.asynchronous)


@pytest.mark.medium
def test_an_unreachable_redis_is_a_sentence(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """No hang, no redis-py exception."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        run = make_run(server.url)
    with pytest.raises(BufferUnavailable, match="did not answer"):
        BufferReader.connect(run)
    with pytest.raises(BufferUnavailable, match="did not answer"):
        init_run(run)


def test_starting_a_run_again_keeps_its_data_and_empties_its_registry(
    server: EmbeddedRedis, make_run: Callable[..., Run]
) -> None:
    """Addresses of processes of an earlier launch lead nowhere."""
    run = make_run(server.url)
    reader = BufferReader.connect(run)
    reader.announce_version(0, None)
    reader.registry.register_part("router", {"url": "http://gone"})
    reader.registry.register_server(
        ServerEntry(server_id="s", url="u", kind="torch", policy_version=0, is_quarantined=False)
    )
    assert init_run(run) is False
    assert (reader.registry.parts(), reader.registry.servers()) == ({}, ())
    assert reader.highest_version() == 0
    reader.announce_version(0, None)
    reader.close()


def test_a_run_keeps_its_schema_and_seed(
    server: EmbeddedRedis, make_run: Callable[..., Run]
) -> None:
    """Both are refused by both numbers; other settings may change between launches."""
    run = make_run(server.url)
    changed = replace(run, settings=make_run(server.url, run__name="u", run__seed=5).settings)
    with pytest.raises(SettingsError, match=r"run.seed=5 but .* run.seed=0"):
        init_run(changed)
    longer = replace(run, settings=make_run(server.url, run__name="v", env__num_runners=2).settings)
    assert init_run(longer) is False
    BufferReader.connect(longer).close()
    client = connect_sync(server.url)
    client.hset(f"{{{run.run_id}:0}}:meta", "schema", "7")
    client.close()
    for join in (init_run, BufferReader.connect):
        with pytest.raises(SchemaMismatch, match="schema=7, this release reads schema=4"):
            join(longer)
