"""A server without space, without the right to write, without its data; posts out of order."""

import asyncio
import itertools
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import redis

from fakes.redis_log import wait_until_written
from outloop.buffer.errors import BufferUnavailable, Gone, NotFound
from outloop.buffer.records import Turn
from outloop.buffer.redis.embedded import SERVER_VARIABLE, EmbeddedRedis, find_server

SPACE_BYTES = 2**18


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started cannot make a file longer than SPACE_BYTES: their writes fail, as on
    a full disk."""
    program = tmp_path / "server"
    lines = (
        "#!/bin/sh",
        # The signal that would end the server.
        "trap '' XFSZ",
        f"ulimit -S -f {SPACE_BYTES // 512}",
        f"exec '{find_server()}' \"$@\"",
    )
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    monkeypatch.setenv(SERVER_VARIABLE, str(program))


def make_space(server: EmbeddedRedis) -> None:
    """Files may grow again."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


async def _fill(loop: Any, make_turn: Callable[..., Turn], episode_id: str) -> int:
    """Record turns until one is refused; how many were recorded."""
    for index in range(200):
        parent = index - 1 if index else None
        turn = make_turn(episode_id, index, parent=parent, num_output=2**11)
        try:
            await loop.writer.append_turn(turn)
        except BufferUnavailable:
            return index
    raise AssertionError("the disk was never full")


@pytest.mark.medium
async def test_a_full_disk_is_reported_and_costs_nothing_acknowledged(
    small_disk: None, loop_on: Callable[..., Any], make_turn: Callable[..., Turn], tmp_path: Path
) -> None:
    """Writes are refused with a sentence on the disk, reads go on; with space again so does the
    run, and a kill -9 afterwards loses nothing."""
    server = EmbeddedRedis(tmp_path / "redis", max_memory_mb=64)
    with server:
        loop = await loop_on(server.url)
        episode_id = await loop.open((await loop.claim()).claims[0])
        num_turns = await _fill(loop, make_turn, episode_id)
        with pytest.raises(BufferUnavailable, match="free space where its data folder is"):
            await loop.close(episode_id)
        with pytest.raises(BufferUnavailable, match="free space"):
            loop.reader.renew(loop.fence)
        assert len((await loop.writer.load_episode(episode_id)).turns) >= num_turns > 2
        make_space(server)
        await _until_accepted(lambda: loop.close(episode_id))
        wait_until_written(loop.reader.client)
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
    with server:
        loop = await loop_on(server.url, again=True)
        make_space(server)
        episode = await loop.writer.load_episode(episode_id)
        assert episode.is_closed
        assert len(episode.turns) >= num_turns


async def _until_accepted(call: Callable[[], Any]) -> None:
    """The server tries its disk again about once a second."""
    async with asyncio.timeout(30):
        while True:
            try:
                await call()
            except BufferUnavailable:
                await asyncio.sleep(0.01)
            else:
                return


@pytest.mark.medium
async def test_a_server_that_syncs_always_ends_on_a_full_disk_and_keeps_what_it_acknowledged(
    small_disk: None, loop_on: Callable[..., Any], make_turn: Callable[..., Turn], tmp_path: Path
) -> None:
    """It cannot promise what it cannot sync; every turn that it acknowledged is there again."""
    server = EmbeddedRedis(tmp_path / "redis", fsync="always", max_memory_mb=64)
    with server:
        loop = await loop_on(server.url)
        episode_id = await loop.open((await loop.claim()).claims[0])
        num_turns = await _fill(loop, make_turn, episode_id)
        with pytest.raises(BufferUnavailable):
            await loop.close(episode_id)
    with server:
        make_space(server)
        loop = await loop_on(server.url, again=True)
        assert len((await loop.writer.load_episode(episode_id)).turns) == num_turns > 2
        assert (await loop.close(episode_id)).counted


def refuses_scripts(client: Any) -> bool:
    """True if a script may not write now."""
    try:
        client.eval("redis.call('SET', KEYS[1], '1')", 1, "probe")
    except redis.ResponseError:
        return True
    return False


@pytest.mark.medium
@pytest.mark.parametrize(
    ("command", "undo", "advice"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "point buffer.redis_url at"),
        (
            ("CONFIG", "SET", "min-replicas-to-write", "1"),
            ("CONFIG", "SET", "min-replicas-to-write", "0"),
            "its replicas are missing",
        ),
    ],
)
async def test_a_server_that_may_not_write_is_reported_and_survived(
    tmp_path: Path,
    loop_on: Callable[..., Any],
    make_turn: Callable[..., Turn],
    command: tuple[str, ...],
    undo: tuple[str, ...],
    advice: str,
) -> None:
    """A replica, or a primary that misses its replicas: every change is refused, then made once.

    Redis 6.2.5 does not ask scripts whether replicas are there; plain commands it does."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as server:
        loop = await loop_on(server.url)
        claims = (await loop.claim()).claims
        episode_id = await loop.open(claims[0])
        client = loop.reader.client
        client.execute_command(*command)
        with pytest.raises(BufferUnavailable, match=advice):
            loop.reader.registry.forget_part("router")
        if not refuses_scripts(client):
            assert "replicas" in advice
            return
        turn = make_turn(episode_id)
        for change in (
            lambda: loop.writer.append_turn(turn),
            lambda: loop.close(episode_id),
            lambda: loop.claim(),
        ):
            with pytest.raises(BufferUnavailable, match=advice):
                await change()
        with pytest.raises(BufferUnavailable, match=advice):
            loop.take()
        assert len((await loop.writer.load_episode(episode_id)).turns) == 0
        client.execute_command(*undo)
        await loop.writer.append_turn(turn)
        assert (await loop.close(episode_id)).counted
        assert loop.reader.stats()["buffer/turns"] == 1


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Path]:
    """Where clients look for a server that comes back elsewhere."""
    path = tmp_path / "link"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.medium
@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_a_server_that_comes_back_empty_is_refused_by_whoever_is_connected(
    link: Path,
    tmp_path: Path,
    loop_on: Callable[..., Any],
    make_turn: Callable[..., Turn],
    fsync: Literal["always", "everysec"],
) -> None:
    """Its data folder is gone: no face trains, records or claims as if nothing had happened."""
    server = EmbeddedRedis(tmp_path / "redis", fsync=fsync, max_memory_mb=64)
    with server:
        link.symlink_to(server.start().removeprefix("unix://"))
        loop = await loop_on(f"unix://{link}", buffer__max_staleness=1)
        await loop.play_all()
        leases = loop.take(2)
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        shutil.rmtree(tmp_path / "redis")
        link.unlink()
        link.symlink_to(server.start().removeprefix("unix://"))
        fence = loop.fence
        marking = [lease.group.group_id for lease in leases]
        for call in (
            lambda: loop.reader.renew(fence),
            lambda: loop.reader.mark_trained(marking, fence=fence, policy_version=1),
            lambda: loop.reader.acknowledge(loop.mark(leases, 1)),
            lambda: loop.reader.recover(loop.mark(leases, 1), fence=fence),
            lambda: loop.take(1),
        ):
            for _ in range(2):
                with pytest.raises(BufferUnavailable, match=r"emptied|did not answer"):
                    call()
        for post in (
            lambda: loop.claim(),
            lambda: loop.writer.append_turn(make_turn("g0-1-0", 1, parent=0)),
            lambda: loop.close("g0-1-0"),
        ):
            with pytest.raises(BufferUnavailable, match=r"emptied|did not answer"):
                await post()
        assert loop.reader.client.dbsize() == 0


@pytest.mark.medium
async def test_posts_in_any_order_record_a_prefix_of_the_episode(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Each post is accepted once or refused by type, in every order and again in the true one;
    what counts is a beginning of the episode, never turns without those before them."""
    orders = list(itertools.permutations(range(4)))
    loop = await start(trainer__groups_per_step=len(orders), buffer__group_size=2)
    claims = (await loop.claim(2 * len(orders))).claims
    for order, claim in zip(orders * 2, claims, strict=True):
        episode_id = loop.opening(claim).episode_id
        posts: list[Callable[[], Any]] = [
            lambda claim=claim: loop.open(claim),
            lambda name=episode_id: loop.writer.append_turn(make_turn(name, 0)),
            lambda name=episode_id: loop.writer.append_turn(make_turn(name, 1, parent=0)),
            lambda name=episode_id: loop.close(name),
        ]
        for number in (*order, *range(4)):
            try:
                await posts[number]()
            except (NotFound, Gone):
                continue
    for lease in loop.take(len(orders)):
        for trajectory in lease.group.trajectories:
            names = [turn.turn_id for turn in trajectory.turns]
            name = trajectory.episode.episode_id
            assert names == [f"{name}.{index}" for index in range(len(names))]
    assert loop.reader.stats()["buffer/scored_episodes"] == 2 * len(orders)
