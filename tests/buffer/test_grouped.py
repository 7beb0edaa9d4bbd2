"""Turns that are recorded at once share round trips, and nothing else."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from outloop.buffer.budgets import EpisodeUsage
from outloop.buffer.embedded import EmbeddedRedis
from outloop.buffer.errors import BufferUnavailable, NotFound


async def open_all(loop) -> list[str]:
    """The episodes of every claim that there is."""
    return [await loop.open(claim) for claim in (await loop.claim()).claims]


async def test_a_refused_turn_fails_alone(loop_on, make_turn, server) -> None:
    """Of turns recorded at once each gets its own answer, and those accepted are all there."""
    loop = await loop_on(server.url)
    known = [make_turn(episode_id) for episode_id in await open_all(loop)]
    unknown = [make_turn(f"nobody-{number}") for number in range(len(known))]
    mixed = [turn for pair in zip(known, unknown, strict=True) for turn in pair]
    answers = await asyncio.gather(*map(loop.writer.append_turn, mixed), return_exceptions=True)
    assert len(known) > 3
    assert [type(answer) for answer in answers] == [EpisodeUsage, NotFound] * len(known)
    for turn in known:
        loaded = await loop.writer.load_episode(turn.episode_id)
        assert [one.turn_id for one in loaded.turns] == [turn.turn_id]


async def test_a_server_that_forgot_the_scripts_gets_them_again(loop_on, make_turn, server) -> None:
    """No call of a group is lost for want of its script."""
    loop = await loop_on(server.url)
    episodes = await open_all(loop)
    loop.reader._client.script_flush()
    await asyncio.gather(*(loop.writer.append_turn(make_turn(one)) for one in episodes))
    for episode_id in episodes:
        assert len((await loop.writer.load_episode(episode_id)).turns) == 1


async def test_nobody_waits_for_a_server_that_is_gone(loop_on, make_turn, tmp_path: Path) -> None:
    """Every call of a group fails and says what it was for; so does the next one."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as own:
        loop = await loop_on(own.url)
        turns = [make_turn(episode_id) for episode_id in await open_all(loop)]
        os.kill(own.pid, signal.SIGKILL)
        answers = await asyncio.gather(*map(loop.writer.append_turn, turns), return_exceptions=True)
        for turn, answer in zip(turns, answers, strict=True):
            assert isinstance(answer, BufferUnavailable)
            assert f"recording turn_id={turn.turn_id}: Redis did not answer" in str(answer)
        with pytest.raises(BufferUnavailable, match="did not answer"):
            await loop.writer.append_turn(turns[0])
