"""What a run does while its Redis goes away, and what must be there afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from outloop.buffer.errors import BufferUnavailable


async def until_accepted(call: Callable[[], Any]) -> tuple[Any, bool]:
    """What the call returns once a primary answers, and whether it was refused before."""
    was_refused = False
    async with asyncio.timeout(60):
        while True:
            try:
                return await call(), was_refused
            except BufferUnavailable:
                was_refused = True
                await asyncio.sleep(0.05)


async def play_while(
    loop: Any, make_turn: Callable[..., Any], fail: Callable[[], object], *, timeout_s: float
) -> None:
    """Two groups of eight; turns are recorded without a pause while `fail` happens, and each is
    there once afterwards. The trainer waits for them all the while, at most `timeout_s`."""
    claims = (await loop.claim(count=16)).claims
    assert len(claims) == 16
    episodes = [await loop.open(claim) for claim in claims]
    refused = []
    taking = asyncio.create_task(asyncio.to_thread(loop.take, 2, timeout_s=timeout_s))

    async def play(number: int, episode_id: str) -> None:
        turn = make_turn(episode_id)
        if number == len(episodes) // 2:
            fail()
        _, was_refused = await until_accepted(lambda: loop.writer.append_turn(turn))
        refused.append(was_refused)
        await until_accepted(lambda: loop.close(episode_id))

    async with asyncio.TaskGroup() as group:
        for number, episode_id in enumerate(episodes):
            group.create_task(play(number, episode_id))
            # The failure must find turns before it acknowledged and others under way.
            await asyncio.sleep(0.002)
    assert any(refused)
    leases = await taking
    trained = [t.episode.episode_id for lease in leases for t in lease.group.trajectories]
    assert sorted(trained) == sorted(episodes)
    assert all(len(t.turns) == 1 for lease in leases for t in lease.group.trajectories)
