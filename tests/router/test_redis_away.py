"""A Redis that is away for a while, as when it is restarted: agents do not notice."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anthropic
import openai
import pytest

from fakes.bad_wire import BadWire
from fakes.served_policy import publish
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.router.timings import Timings

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


async def awaited(stage) -> None:
    """Somebody waits for the buffer."""
    async with asyncio.timeout(20):
        while not stage.buffer.twin.num_refused:
            await asyncio.sleep(0.005)


async def generating(stage, num: int) -> None:
    """So many turns have reached the server."""
    async with asyncio.timeout(20):
        while len(stage.server.requests) < num:
            await asyncio.sleep(0.005)


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
async def test_a_generated_turn_waits_to_be_recorded(stage, stream: bool) -> None:
    """What was shown already is not followed by an error, and nothing is generated twice."""
    stage.says("fine")
    episode = await stage.open()
    client = await stage.client(episode, max_retries=0)
    stage.server.gate.clear()
    asking = client.chat.completions.create(model="policy", messages=MESSAGES, stream=stream)
    task = asyncio.create_task(asking)
    await generating(stage, 1)
    stage.buffer.twin.is_away = True
    stage.server.gate.set()
    await awaited(stage)
    assert not stage.turns(episode)
    stage.buffer.twin.is_away = False
    answer = await task
    if stream:
        text = "".join([c.choices[0].delta.content or "" async for c in answer])
    else:
        text = answer.choices[0].message.content
    assert text == "fine"
    (turn,) = stage.turns(episode)
    assert turn.loss_spans == ((0, len(turn.output_ids)),)
    assert len(stage.server.requests) == 1


async def hang_up(task: asyncio.Task) -> None:
    """Its client is gone."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.medium
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_who_leaves_while_a_turn_waits_to_be_recorded_has_not_got_it(
    make_stage, num_choices: int
) -> None:
    """A client that left and did not come back in time: every choice is recorded without loss."""
    stage = await make_stage(timings=Timings(return_grace_s=0.2))
    stage.says(*["fine"] * num_choices)
    episode = await stage.open()
    body = {"model": "policy", "messages": MESSAGES, "n": num_choices}
    asking = stage.post("/v1/chat/completions", body, episode["api_key"])
    stage.server.gate.clear()
    task = asyncio.create_task(asking)
    await generating(stage, num_choices)
    stage.buffer.twin.is_away = True
    stage.server.gate.set()
    await awaited(stage)
    await hang_up(task)
    # The router learns of it by the connection, a moment later.
    refused = stage.buffer.twin.num_refused
    async with asyncio.timeout(20):
        while stage.buffer.twin.num_refused < refused + 3 * num_choices:
            await asyncio.sleep(0.005)
    stage.buffer.twin.is_away = False
    async with asyncio.timeout(20):
        while len(stage.turns(episode)) < num_choices:
            await asyncio.sleep(0.005)
    for turn in stage.turns(episode):
        assert (turn.loss_spans, turn.mask_reason) == ((), "undelivered")
    scraped = (await stage.get("/metrics")).text
    assert "router_undelivered_turns_total 1.0" in scraped


@pytest.mark.medium
async def test_who_leaves_and_comes_back_meanwhile_gets_the_turn(stage) -> None:
    """The same request while the first one's turn still waits: generated and recorded once."""
    stage.says("fine")
    episode = await stage.open()
    body = {"model": "policy", "messages": MESSAGES}
    stage.server.gate.clear()
    first = asyncio.create_task(stage.post("/v1/chat/completions", body, episode["api_key"]))
    await generating(stage, 1)
    stage.buffer.twin.is_away = True
    stage.server.gate.set()
    await awaited(stage)
    await hang_up(first)
    ((left,),) = stage.app.state.parts.episodes.known(episode["episode_id"]).turns.values()
    async with asyncio.timeout(20):
        while left.has_client:
            await asyncio.sleep(0.005)
    stage.buffer.twin.is_away = False
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    (turn,) = stage.turns(episode)
    assert turn.loss_spans == ((0, len(turn.output_ids)),)
    assert len(stage.server.requests) == 1


@pytest.mark.medium
async def test_a_turn_waits_to_be_begun(make_stage, stage) -> None:
    """A router that does not know the episode yet asks again."""
    episode = await stage.open()
    other = await make_stage(beside=stage)
    other.says("fine")
    stage.buffer.serve(other.server.url)
    await other.app.state.parts.pool.refresh()
    stage.buffer.twin.is_away = True
    client = openai.AsyncOpenAI(
        base_url=f"{other.url}/v1", api_key=episode["api_key"], max_retries=0
    )
    stage.stack.push_async_callback(client.close)
    task = asyncio.create_task(client.chat.completions.create(model="policy", messages=MESSAGES))
    await awaited(stage)
    stage.buffer.twin.is_away = False
    assert (await task).choices[0].message.content == "fine"


@pytest.mark.medium
async def test_who_waits_is_let_go_when_the_router_stops(stage) -> None:
    """To begin a turn or to record one: no turn holds up a router, and clients are asked to come
    back."""
    stage.says("fine", "fine")
    known, unknown = await stage.open(), await stage.open()
    body = {"model": "policy", "messages": MESSAGES}
    await stage.post("/v1/chat/completions", body, known["api_key"])
    stage.buffer.twin.is_away = True
    tasks = [
        asyncio.create_task(stage.post("/v1/chat/completions", body, episode["api_key"]))
        for episode in (known, unknown)
    ]
    await generating(stage, 2)
    await awaited(stage)
    await stage.app.state.parts.service.drain(0.3)
    for answer, code in zip(
        await asyncio.gather(*tasks), ("router_stopping", "buffer_unavailable"), strict=True
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert answer.headers["x-should-retry"] == "true"
    stage.buffer.twin.is_away = False


@pytest.fixture
async def restartable(
    make_stage: Callable, make_run: Callable, tmp_path: Path
) -> AsyncIterator[tuple]:
    """A router over a real Redis that is reached by a wire, and an episode."""
    redis = EmbeddedRedis(tmp_path / "redis", max_memory_mb=64)
    with redis, BadWire(tmp_path, redis.start().removeprefix("unix://")) as wire:
        run = replace(make_run(), run_id="away", redis_url=wire.url)
        init_run(run)
        stage = await make_stage(run=run, timings=Timings(return_grace_s=0.2))
        direct = replace(run, redis_url=redis.url)
        with closing(BufferReader.connect(direct)) as reader:
            reader.recover(None, fence=reader.acquire_fence())
        publish(direct, stage.server.url)
        await stage.app.state.parts.pool.refresh()
        yield stage, redis, wire


@pytest.mark.medium
async def test_agents_play_on_while_redis_is_restarted(restartable) -> None:
    """Eight of them, streaming and not, of two SDKs that retry nothing: no error, and every turn is
    recorded once, where the server was asked once."""
    stage, redis, wire = restartable
    stage.server.answer = lambda request: stage.script("fine")
    episodes = [await stage.open(group_id=None, purpose="eval") for _ in range(8)]
    num_answers = 0

    async def play(number: int, episode: dict) -> None:
        nonlocal num_answers
        client = await stage.client(episode, max_retries=0)
        other = anthropic.AsyncAnthropic(
            base_url=episode["base_url"], api_key=episode["api_key"], max_retries=0
        )
        stage.stack.push_async_callback(other.close)
        history = list(MESSAGES)
        for _ in range(12):
            if number % 4 == 0:
                answer = await client.chat.completions.create(model="policy", messages=history)
                text = answer.choices[0].message.content
            elif number % 4 == 1:
                async with client.chat.completions.stream(
                    model="policy", messages=history
                ) as events:
                    text = (await events.get_final_completion()).choices[0].message.content
            elif number % 4 == 2:
                async with client.responses.stream(model="policy", input=history) as events:
                    text = (await events.get_final_response()).output_text
            else:
                async with other.messages.stream(
                    model="policy", messages=history, max_tokens=9
                ) as events:
                    text = await events.get_final_text()
            assert text == "fine"
            num_answers += 1
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]

    async def restart() -> None:
        while num_answers < 16:
            await asyncio.sleep(0.002)
        await asyncio.to_thread(redis.stop)
        await asyncio.to_thread(redis.start)
        wire.lead_to(redis.url.removeprefix("unix://"))

    async with asyncio.timeout(60):
        await asyncio.gather(restart(), *(play(*one) for one in enumerate(episodes)))
    assert len(stage.server.requests) == 8 * 12
    with connect_sync(redis.url) as client:
        assert client.ping()
    for episode in episodes:
        turns = (await stage.get(f"/episodes/{episode['episode_id']}")).json()["turns"]
        causes = [turn["branch_cause"] for turn in turns]
        assert causes == ["root", *["extension"] * 11]


@pytest.fixture
async def trained(restartable) -> tuple:
    """The same with an episode that is trained."""
    stage, _, wire = restartable
    tasks = {"tasks": [{"task_id": "t", "payload": {}}], "eval_tasks": []}
    assert (await stage.post("/tasks", tasks)).status_code == 200
    claims = (await stage.post("/tasks/claim", {"key": "k", "count": 1, "open": True})).json()
    return stage, wire, claims["claims"][0]["episode"]


@pytest.mark.medium
async def test_a_record_whose_acknowledgement_was_lost_stands(trained) -> None:
    """It says that the turn was delivered; who left after it was written changes it no more."""
    stage, wire, episode = trained
    stage.says("well", "fine")
    body = {"model": "policy", "messages": MESSAGES}
    # Redis knows the script from then on: a command that arrives is carried out.
    await stage.post("/v1/chat/completions", body, episode["api_key"])
    stage.server.gate.clear()
    task = asyncio.create_task(stage.post("/v1/chat/completions", body, episode["api_key"]))
    await generating(stage, 2)
    stage.writer.appended.clear()
    sent = stage.writer.appended
    wire.loses_answers = True
    stage.server.gate.set()
    async with asyncio.timeout(20):
        while len(sent) < 2:
            await asyncio.sleep(0.005)
    await hang_up(task)
    async with asyncio.timeout(20):
        while sent[-1].loss_spans:
            await asyncio.sleep(0.005)
        wire.loses_answers = False
        while stage.app.state.parts.service.num_running:
            await asyncio.sleep(0.005)
    _, turn = (await stage.writer.load_episode(episode["episode_id"])).turns
    assert turn.turn_id == sent[0].turn_id
    assert turn.loss_spans == sent[0].loss_spans == ((0, len(turn.output_ids)),)
    retried = {"x-stainless-retry-count": "1"}
    again = await stage.post("/v1/chat/completions", body, episode["api_key"], **retried)
    assert again.json()["id"] == f"chatcmpl-{turn.turn_id}"
