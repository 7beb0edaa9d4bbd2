"""What a machine that loses its power takes from an AOF, and clocks that jump."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import FenceExpired
from outloop.buffer.redis.embedded import EmbeddedRedis


def _aof(folder: Path) -> Path:
    """What the server appends to; before Redis 7 that was the only file."""
    (path,) = [*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")]
    return path


@pytest.mark.medium
@pytest.mark.parametrize("num_bytes_more", [0, 1, 700])
async def test_what_came_after_the_last_fsync_is_lost_whole(
    num_bytes_more: int, tmp_path: Path, loop_on: Callable[..., Any]
) -> None:
    """The AOF ends where it was last synced, or within a script: what came before it is there, no
    script is there by half, and the trainer's checkpoint trains no slot twice."""
    folder = tmp_path / "redis"
    # So that the file's length is what was acknowledged.
    server = EmbeddedRedis(folder, fsync="always")
    loop = await loop_on(server.start(), buffer__max_staleness=1)
    await loop.play_all()
    leases = loop.take(2)
    mark = loop.train(leases, 1)
    synced = _aof(folder).stat().st_size
    before = loop.reader.stats()
    loop.reader.acknowledge(mark)
    await loop.play_all(version=1)
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    os.truncate(_aof(folder), synced + num_bytes_more)
    with server:
        again = await loop_on(server.url, again=True, buffer__max_staleness=1)
        # A claim under an old key would be answered with the old claims.
        again.num_claims = 1000
        assert again.reader.stats()["buffer/scored_episodes"] >= before["buffer/scored_episodes"]
        again.fence = again.reader.acquire_fence()
        version = again.reader.recover(mark, fence=again.fence) + 1
        again.publish(version, mark.policy_version)
        assert again.reader.stats()["buffer/acknowledged_groups"] == 2
        trained = {lease.group.slot for lease in leases}
        await again.play_all(version=version)
        for _ in range(2):
            more = again.take(2, version=version)
            slots = {lease.group.slot for lease in more}
            assert len(slots) == 2
            assert not slots & trained
            trained |= slots
            again.reader.mark_trained(
                [lease.group.group_id for lease in more], fence=again.fence, policy_version=version
            )
            await again.play_all(version=version)
        assert trained == set(range(6))


async def test_a_clock_that_jumps_ahead_costs_leases_and_attempts_and_nothing_else(
    start: Callable[..., Any], clock: Any
) -> None:
    """An hour ahead: attempts in flight are replaced, the lease is lost, and the loop goes on."""
    loop = await start(buffer__max_staleness=1, buffer__lease_s=60)
    claims = (await loop.claim(4)).claims
    for claim in claims[:4]:
        await loop.play(claim)
    flying = [await loop.open(claim) for claim in (await loop.claim(2)).claims]
    leases = loop.take(2)
    clock.advance(3600)
    with pytest.raises(FenceExpired):
        loop.reader.renew(loop.fence)
    loop.fence = loop.reader.acquire_fence()
    assert [x.group.slot for x in loop.take(2)] == [x.group.slot for x in leases]
    assert not (await loop.close(flying[0])).counted


async def test_a_clock_that_jumps_back_keeps_leases(start: Callable[..., Any], clock: Any) -> None:
    """An hour back: nothing expires early; a renewal under the new time holds again."""
    loop = await start(buffer__max_staleness=1, buffer__lease_s=60)
    await loop.play_all()
    leases = loop.take(2)
    clock.advance(-3600)
    loop.reader.renew(loop.fence)
    clock.advance(59)
    loop.reader.acknowledge(loop.train(leases, 1))
    assert loop.reader.stats()["buffer/expired_leases"] == 0
    clock.advance(62)
    more = loop.take(2, version=1)
    clock.advance(61)
    with pytest.raises(FenceExpired):
        loop.reader.renew(loop.fence)
    assert more
