"""Servers that fail for long, fall silent, or leave the registry with turns in flight."""

import asyncio
import time
from dataclasses import replace

import openai
import pytest

from fakes.fake_server import FakeServer, serving
from outloop.router.timings import Timings

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def ask(stage, episode):
    """One raw request."""
    return await stage.post("/v1/chat/completions", BODY, episode["api_key"])


@pytest.mark.medium
async def test_a_server_that_fails_for_hours_is_asked_again_soon(stage) -> None:
    """However often it failed, it is left alone for two seconds at most, and then serves."""
    pool = stage.app.state.parts.pool
    (server,) = pool.servers
    for _ in range(3000):
        pool.suspend(server, "scripted")
    assert server.suspended_until - time.monotonic() <= 2.0
    server.suspended_until = 0.0
    stage.says("back again")
    answer = await ask(stage, await stage.open())
    assert answer.json()["choices"][0]["message"]["content"] == "back again"
    assert server.num_failures == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_of_a_server_that_is_silent_and_left_go_on_elsewhere(
    make_stage, stream: bool
) -> None:
    """It accepts and never answers; once it has left the registry no turn waits for it, and what a
    streaming client has seen of it stays."""
    stage = await make_stage(timings=Timings(server_grace_s=0.05))
    whole = stage.script("Hello there, my old friend.")
    other = FakeServer(lambda request: replace(whole, ids=whole.ids[num_seen(request) :]))
    other.url = await stage.stack.enter_async_context(serving(other))
    stage.server.answer = lambda request: whole
    stage.server.chunk, stage.server.is_cumulative = 5, False
    stage.server.gate, stage.server.step_gate = asyncio.Event(), asyncio.Event()
    if stream:
        stage.server.gate.set()

    def num_seen(request) -> int:
        return len(request["input_ids"]) - len(stage.server.requests[0]["input_ids"])

    episode = await stage.open()
    client = await stage.client(episode, max_retries=0)
    asked = asyncio.create_task(client.chat.completions.create(**BODY, stream=stream))
    text = ""
    if stream:
        chunks = await asked
        while len(text) < 5:
            text += (await anext(chunks)).choices[0].delta.content or ""
    while not stage.server.requests:
        await asyncio.sleep(0.005)
    stage.buffer.remove_servers()
    await stage.app.state.parts.pool.refresh()
    stage.buffer.serve(other.url, server_id="server-1")
    await stage.app.state.parts.pool.refresh()
    async with asyncio.timeout(20):
        if stream:
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
        else:
            text = (await asked).choices[0].message.content
    assert text == "Hello there, my old friend."
    (turn,) = stage.turns(episode)
    assert turn.output_ids.tolist() == whole.ids
    assert turn.loss_spans == ((0, len(whole.ids)),)
    assert [num_seen(request) for request in other.requests] == [5 if stream else 0]
    for gate in (stage.server.gate, stage.server.step_gate):
        gate.set()


@pytest.mark.medium
async def test_a_server_that_left_and_came_back_keeps_its_turns(make_stage) -> None:
    """A registry that forgot it for a moment costs no turn its server."""
    stage = await make_stage(timings=Timings(server_grace_s=0.5))
    stage.says("fine")
    stage.server.gate.clear()
    asked = asyncio.create_task(ask(stage, await stage.open()))
    while not stage.server.requests:
        await asyncio.sleep(0.005)
    pool = stage.app.state.parts.pool
    stage.buffer.remove_servers()
    await pool.refresh()
    assert not pool.servers
    stage.buffer.serve(stage.server.url)
    await pool.refresh()
    await asyncio.sleep(0.6)
    stage.server.gate.set()
    assert (await asked).json()["choices"][0]["message"]["content"] == "fine"
    assert len(stage.server.requests) == 1


async def test_what_an_empty_answer_says_of_a_version_is_not_believed(make_stage) -> None:
    """Ids that an earlier version sampled name no version of the server that went on with none."""
    stage = await make_stage()
    pool = stage.app.state.parts.pool
    whole = stage.script("Hello there, friend.")
    stop = {"type": "abort", "message": "x"}
    scripts = iter(
        [
            replace(whole, ids=whole.ids[:4], finish=stop),
            replace(whole, ids=[], spans=None, finish=stop),
            replace(whole, ids=whole.ids[4:]),
        ]
    )

    def answer(request):
        num = len(stage.server.requests)
        stage.server.version = str(min(num - 1, 1))
        if num == 1:
            stage.buffer.publish(1)
            stage.buffer.serve(stage.server.url, version=1)
        elif num == 2:
            # From here on only what servers say is known.
            refresh = pool.refresh_if_possible
            pool.refresh_if_possible = lambda: asyncio.sleep(0)
            restore.append(refresh)
        return next(scripts)

    restore: list = []
    stage.server.answer = answer
    episode = await stage.open()
    await ask(stage, episode)
    pool.refresh_if_possible = restore[0]
    salts = [request["extra_key"] for request in stage.server.requests]
    assert salts[1] == salts[2] != salts[0]
    (turn,) = stage.turns(episode)
    assert [(s.policy_version, s.start) for s in turn.version_spans] == [(0, 0), (1, 4)]


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_stream_is_held_through_a_publish(make_stage, staleness: int) -> None:
    """A publish aborts a turn whose client has read its beginning, no server may serve for a while,
    and then the new version does: one text and a turn of both versions, or, where versions may not
    mix, an error in the stream that says so and no turn. The client is held, not sent away."""
    stage = await make_stage(staleness=staleness)
    pool = stage.app.state.parts.pool
    whole = stage.script("Hello there, my old friend.")
    stage.server.is_cumulative, stage.server.chunk = False, 5

    def answer(request):
        if len(stage.server.requests) == 1:
            stage.buffer.announce(1)
            stage.buffer.serve(stage.server.url, is_quarantined=True)
            return replace(whole, ids=whole.ids[:5], finish={"type": "abort", "message": "x"})
        stage.server.version = "1"
        num_seen = len(request["input_ids"]) - len(stage.server.requests[0]["input_ids"])
        return replace(whole, ids=whole.ids[num_seen:])

    stage.server.answer = answer
    episode = await stage.open()
    client = await stage.client(episode, max_retries=0)
    events = await client.chat.completions.create(**BODY, stream=True)
    text = ""
    while not text:
        text = (await anext(events)).choices[0].delta.content or ""
    beginning = text
    rest = asyncio.create_task(collect(events))
    async with asyncio.timeout(20):
        while pool.num_in_flight:
            await asyncio.sleep(0.005)
    assert not rest.done()
    assert len(stage.server.requests) == 1
    stage.buffer.reader.acknowledge_version(1)
    stage.buffer.serve(stage.server.url, version=1)
    await pool.refresh()
    if staleness == 0:
        with pytest.raises(openai.APIError, match="was lost after 5 tokens"):
            await rest
        assert not stage.turns(episode)
        return
    assert beginning + await rest == "Hello there, my old friend."
    (turn,) = stage.turns(episode)
    assert turn.output_ids.tolist() == whole.ids
    spans = [(s.policy_version, s.start, s.end) for s in turn.version_spans]
    assert spans == [(0, 0, 5), (1, 5, len(whole.ids))]
    assert turn.loss_spans == ((0, len(whole.ids)),)
    first, second = stage.server.requests
    assert second["extra_key"] != first["extra_key"]
    limits = [one["sampling_params"]["max_new_tokens"] for one in stage.server.requests]
    assert limits[0] - limits[1] == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_half_an_answer_under_a_schema_is_generated_anew(make_stage, stream: bool) -> None:
    """Another server's grammar would begin again in the middle: nothing of the half is kept, and a
    client that has read of it is told that the turn is lost."""
    stage = await make_stage()
    half = stage.script('{"number": 7}')
    stop = {"type": "abort", "message": "x"}
    scripts = iter([replace(half, ids=half.ids[:4], finish=stop), half])
    stage.server.answer = lambda request: next(scripts)
    episode = await stage.open(purpose="eval", group_id=None)
    client = await stage.client(episode, max_retries=0)
    form = {"type": "json_object"}
    asked = client.chat.completions.create(**BODY, response_format=form, stream=stream)
    if stream:
        with pytest.raises(openai.APIError, match="was lost after 4 tokens"):
            await collect(await asked)
        assert not stage.turns(episode)
        return
    assert (await asked).choices[0].message.content == '{"number": 7}'
    first, second = stage.server.requests
    assert second["input_ids"] == first["input_ids"]
    assert second["sampling_params"]["max_new_tokens"] == first["sampling_params"]["max_new_tokens"]
    (turn,) = stage.turns(episode)
    assert turn.output_ids.tolist() == half.ids


async def collect(events) -> str:
    """The rest of a stream's text."""
    return "".join([chunk.choices[0].delta.content or "" async for chunk in events])
