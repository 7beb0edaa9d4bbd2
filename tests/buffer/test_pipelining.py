"""Turns that are recorded at once share round trips, and nothing else."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from outloop.buffer.errors import BufferUnavailable, NotFound
from outloop.buffer.redis.client import connect_async
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.run import load_run
from outloop.buffer.store.refusal_notes import EpisodeUsage
from outloop.buffer.writer import BufferWriter


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
    loop.reader.client.script_flush()
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


async def test_a_caller_that_gives_up_takes_no_answer_of_another(
    loop_on, make_turn, server
) -> None:
    """Answers stay with their calls when some are waited for no more."""
    loop = await loop_on(server.url)
    turns = [make_turn(episode_id) for episode_id in await open_all(loop)]
    calls = [asyncio.create_task(loop.writer.append_turn(turn)) for turn in turns * 2]
    for _ in range(3):
        await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers[1::2]] == [EpisodeUsage] * len(turns)
    for turn in turns:
        used = await loop.writer.append_turn(turn)
        assert used == EpisodeUsage(1, len(turn.prompt_ids) + len(turn.output_ids))


@pytest.mark.medium
async def test_a_silent_server_is_given_up_and_asked_again_on_another_connection(
    loop_on, make_turn, tmp_path: Path
) -> None:
    """Every call fails in time; what comes late is read by nobody, and each turn counts once."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as own:
        loop = await loop_on(own.url)
        turns = [make_turn(episode_id) for episode_id in await open_all(loop)]
        run = load_run(tmp_path / "t")
        hasty = await BufferWriter.connect(
            run, connect_client=partial(connect_async, timeout_s=1.0)
        )
        await hasty.append_turn(turns[0])
        os.kill(own.pid, signal.SIGSTOP)
        try:
            asked = [asyncio.create_task(hasty.append_turn(turn)) for turn in turns]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            os.kill(own.pid, signal.SIGCONT)
        assert {type(answer) for answer in answers} == {BufferUnavailable}
        for turn in turns:
            assert (await loop.writer.append_turn(turn)).num_turns == 1
        await hasty.close()
