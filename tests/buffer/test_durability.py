"""kill -9 of Redis, a full Redis, a forgotten script: acknowledged data stays."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from fakes.redis_log import wait_until_written
from outloop.buffer.codec.jsonl import format_line
from outloop.buffer.errors import BufferUnavailable, DeadlineExceeded
from outloop.buffer.records import Trajectory, Turn
from outloop.buffer.redis.embedded import EmbeddedRedis


@pytest.mark.medium
@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_a_killed_redis_loses_nothing_acknowledged(
    loop_on: Callable[..., Any],
    make_turn: Callable[..., Turn],
    tmp_path: Path,
    fsync: Literal["always", "everysec"],
) -> None:
    """Groups, leases, open episodes and versions are there after the restart; the run goes on."""
    server = EmbeddedRedis(tmp_path / "redis", fsync=fsync, max_memory_mb=64)
    with server:
        loop = await loop_on(server.url, buffer__max_staleness=1)
        claims = (await loop.claim()).claims
        for claim in claims[:6]:
            await loop.play(claim)
        running = await loop.open(claims[6])
        await loop.writer.append_turn(make_turn(running))
        leases = loop.take(1)
        wait_until_written(loop.reader.client)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(BufferUnavailable, match="did not answer"):
            await loop.close(running)
        before = server.pid
        server.stop()
    with server:
        assert server.pid != before
        loop = await loop_on(server.url, buffer__max_staleness=1, again=True)
        loop.fence = leases[0].fence
        loop.reader.renew(loop.fence)
        assert len((await loop.writer.load_episode(running)).turns) == 1
        await loop.close(running)
        await loop.play(claims[7])
        assert [lease.group.slot for lease in loop.take(3)] == [1, 2, 3]
        loop.reader.acknowledge(loop.train(leases, 1))
        assert loop.reader.stats()["buffer/acknowledged_groups"] == 1


@pytest.mark.medium
async def test_a_full_redis_holds_producers_and_lets_the_trainer_free_memory(
    loop_on: Callable[..., Any], make_turn: Callable[..., Turn], tmp_path: Path
) -> None:
    """Turns are refused, nothing is evicted; close, take and acknowledge work and make room;
    runners are heard."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=8) as server:
        loop = await loop_on(server.url, trainer__groups_per_step=3)
        episodes = [await loop.open(claim) for claim in (await loop.claim()).claims]

        async def fill() -> None:
            for index in range(10_000):
                parent = index - 1 if index else None
                turn = make_turn(episodes[5], index, parent=parent, num_output=2**12)
                await loop.writer.append_turn(turn)

        for episode_id in episodes[:5]:
            await loop.writer.append_turn(make_turn(episode_id))
        with pytest.raises(BufferUnavailable, match="Nothing was evicted"):
            await fill()
        loop.reader.client.config_set("maxmemory", "1mb")
        num_turns = len((await loop.writer.load_episode(episodes[5])).turns)
        for episode_id in episodes:
            assert (await loop.close(episode_id)).counted
        leases = loop.take(3)
        assert len(leases[2].group.trajectories[1].turns) == num_turns > 100
        loop.reader.renew(loop.fence)
        assert await loop.writer.heartbeat("runner") == 20
        loop.reader.acknowledge(loop.train(leases, 1))
        redis = loop.reader.client
        redis.config_set("maxmemory", "8mb")
        # Large values are freed by a thread of Redis' own.
        async with asyncio.timeout(30):
            while redis.info("memory")["used_memory"] > 2**22:
                await asyncio.sleep(0.005)
        assert len((await loop.claim()).claims) == 6


async def test_a_forgotten_script_is_sent_again(start: Callable[..., Any]) -> None:
    """A restarted Redis has no scripts; both faces send them when asked for."""
    loop = await start()
    for _ in range(2):
        loop.reader.client.script_flush()
        await loop.play_all()
        loop.reader.client.script_flush()
    assert len(loop.take()) == 2


@pytest.mark.medium
async def test_a_full_redis_keeps_dead_letters_and_lets_them_be_resolved(
    loop_on: Callable[..., Any], make_turn: Callable[..., Turn], tmp_path: Path
) -> None:
    """Dropping, requeueing and discarding free memory, so they work when nothing else does."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=8) as server:
        loop = await loop_on(server.url, trainer__groups_per_step=3)
        await loop.play_all()
        client = loop.reader.client
        client.config_set("maxmemory", "1mb")
        with pytest.raises(BufferUnavailable, match="Nothing was evicted"):
            await loop.writer.put_trajectories([], key="k", final=True)
        leases = loop.take(3)
        for lease in leases:
            loop.reader.drop(lease.group.group_id, "malformed", fence=loop.fence, error="odd")
        letters = loop.reader.dead_letters
        assert [letter.error for letter in letters.list_all()] == ["odd"] * 3
        assert len(letters.read(leases[0].group.group_id)[1]) == 2
        letters.requeue(leases[0].group.group_id)
        letters.discard(leases[1].group.group_id)
        client.config_set("maxmemory", "8mb")
        with pytest.raises(DeadlineExceeded):
            loop.take(3)
        assert (await loop.claim(1)).claims[0].group_id == "g0-4"


@pytest.mark.medium
async def test_an_import_into_a_full_redis_is_refused_and_may_be_repeated(
    loop_on: Callable[..., Any], make_trajectory: Callable[..., Trajectory], tmp_path: Path
) -> None:
    """What went in before stays; after room was made the same file goes in once."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as server:
        loop = await loop_on(server.url, trainer__mode="sft")
        lines = [format_line(make_trajectory(f"s{index}")) for index in range(200)]
        (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
        client = loop.reader.client
        client.config_set("maxmemory", "1mb")
        with pytest.raises(BufferUnavailable, match="Nothing was evicted"):
            loop.reader.archive.read(tmp_path / "a.jsonl")
        client.config_set("maxmemory", "64mb")
        for _ in range(2):
            assert loop.reader.archive.read(tmp_path / "a.jsonl") == (200, 0)
        assert len(list(loop.reader.sft_trajectories())) == 200
