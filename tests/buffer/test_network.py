"""A network that breaks, loses answers and is slow: errors in time, and nothing happens twice."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes.bad_wire import BadWire
from outloop.buffer.errors import BufferUnavailable, DeadlineExceeded
from outloop.buffer.records import Trajectory, Turn
from outloop.buffer.redis.client import connect_async
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.run import Run
from outloop.buffer.writer import BufferWriter


@pytest.fixture
def wire(tmp_path: Path, server: EmbeddedRedis) -> Iterator[BadWire]:
    """Between the buffer and the session's server."""
    with BadWire(tmp_path, server.url.removeprefix("unix://")) as wire:
        yield wire


async def _now(call: Callable[[], Any]) -> Any:
    """What a call of either face returns."""
    answer = call()
    return await answer if asyncio.iscoroutine(answer) else answer


async def _until_done(wire: BadWire, call: Callable[[], Any]) -> Any:
    """Lose the answer to the first call, then repeat it as a caller would."""
    wire.loses_answers = True
    with pytest.raises(BufferUnavailable, match="Redis did not answer"):
        await _now(call)
    wire.loses_answers = False
    return await _now(call)


async def test_calls_whose_answers_are_lost_may_be_repeated(
    wire: BadWire, loop_on: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Every call of an episode and of a step was executed, is repeated, and counts once."""
    loop = await loop_on(wire.url, buffer__max_staleness=0)
    writer, reader, fence = loop.writer, loop.reader, loop.fence
    claims = (await _until_done(wire, lambda: writer.claim(key="k", count=9))).claims
    assert len(claims) == 4
    for claim in claims:
        opening = loop.opening(claim)
        await _until_done(wire, lambda opening=opening: writer.open_episode(opening))
        turn = make_turn(opening.episode_id)
        await _until_done(wire, lambda turn=turn: writer.append_turn(turn))
        await _until_done(wire, lambda opening=opening: loop.close(opening.episode_id))
    leases = loop.take(2)
    loop.publish(1, 0)
    ids = [lease.group.group_id for lease in leases]
    await _until_done(wire, lambda: reader.mark_trained(ids, fence=fence, policy_version=1))
    mark = loop.mark(leases, 1)
    await _until_done(wire, lambda: reader.acknowledge(mark))
    stats = reader.stats()
    assert stats["buffer/turns"] == stats["buffer/scored_episodes"] == 4
    assert stats["buffer/groups"] == stats["buffer/acknowledged_groups"] == 2
    assert stats["buffer/superseded_episodes"] == 0


async def test_groups_of_a_take_whose_answer_was_lost_are_not_lost(
    wire: BadWire, loop_on: Callable[..., Any]
) -> None:
    """The trainer's next take gets them, and each one after that gets others; so does its heir."""
    loop = await loop_on(wire.url, buffer__max_staleness=1)
    with pytest.raises(DeadlineExceeded):
        # The server knows the script from here on: a call by an unknown hash executes nothing.
        loop.take(2)
    await loop.play_all()
    leases = await _until_done(wire, lambda: loop.take(2))
    assert [lease.group.slot for lease in leases] == [0, 1]
    assert [lease.group.slot for lease in loop.take(1)] == [2]
    wire.loses_answers = True
    with pytest.raises(BufferUnavailable):
        loop.take(1)
    wire.loses_answers = False
    assert loop.reader.stats()["buffer/leased_groups"] == 4
    loop.fence = loop.reader.acquire_fence()
    assert [lease.group.slot for lease in loop.take(4)] == [0, 1, 2, 3]


async def test_a_take_that_ends_halfway_gives_its_groups_to_the_next(
    wire: BadWire, loop_on: Callable[..., Any]
) -> None:
    """One of two groups is damaged and nothing replaces it in time: the other is not stranded."""
    loop = await loop_on(wire.url)
    claims = await loop.play_all()
    client, prefix = loop.reader.client, loop.reader.prefix
    client.lset(f"{prefix}episode:{claims[0].group_id}-0:turns", 0, b"rubbish")
    with pytest.raises(DeadlineExceeded, match="ready groups 1/2"):
        loop.take(2)
    await loop.play_all()
    assert [lease.group.slot for lease in loop.take(2)] == [1, 2]


async def test_cuts_at_any_moment_break_nothing(wire: BadWire, loop_on: Callable[..., Any]) -> None:
    """A runner beside a wire that is cut all the time gets every episode in, each once."""
    loop = await loop_on(wire.url, buffer__max_staleness=3, buffer__pipeline_depth=3)
    choices, done = random.Random(1), asyncio.Event()

    async def cut() -> None:
        while not done.is_set():
            await asyncio.to_thread(wire.cut)
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), choices.uniform(0.0, 0.05))

    async def insist(call: Callable[[], Any]) -> Any:
        while True:
            with suppress(BufferUnavailable):
                return await call()

    cutting = asyncio.create_task(cut())
    claims = (await insist(lambda: loop.writer.claim(key="k", count=99))).claims
    for claim in claims:
        await insist(lambda claim=claim: loop.play(claim))
    done.set()
    await cutting
    stats = loop.reader.stats()
    assert stats["buffer/scored_episodes"] == len(claims) == 16
    assert stats["buffer/sealed_groups"] == 8
    assert stats["buffer/superseded_episodes"] == 0


@pytest.mark.medium
async def test_a_server_that_falls_silent_is_given_up_in_time(
    wire: BadWire,
    loop_on: Callable[..., Any],
    make_run: Callable[..., Run],
    make_trajectory: Callable[..., Trajectory],
) -> None:
    """Amid a large write, which has one deadline for each silence; the next call gets through."""
    run = make_run(wire.url, trainer__mode="sft")
    loop = await loop_on(wire.url, again=True, trainer__mode="sft")
    hasty = await BufferWriter.connect(run, connect_client=partial(connect_async, timeout_s=1.0))
    many = [make_trajectory(f"s{index}", num_output=20_000) for index in range(16)]
    wire.delay_s = 60.0
    with pytest.raises(BufferUnavailable, match="Redis did not answer"):
        await hasty.put_trajectories(many, key="k", final=True)
    await hasty.close()
    wire.delay_s = 0.0
    wire.cut()
    patient = await BufferWriter.connect(run)
    await patient.put_trajectories(many, key="k", final=True)
    await patient.close()
    assert loop.reader.sft_progress() == (16, True)


@pytest.mark.medium
async def test_a_slow_network_is_only_slow(wire: BadWire, loop_on: Callable[..., Any]) -> None:
    """50 ms each way: everything works, answers stay with their questions."""
    loop = await loop_on(wire.url)
    wire.delay_s = 0.05
    claims = (await loop.claim()).claims
    await asyncio.gather(*map(loop.play, claims))
    assert [lease.group.slot for lease in loop.take(2)] == [0, 1]
