"""Servers that die, come back, and are at the wrong version."""

import asyncio
import time
from dataclasses import replace

import pytest

from fakes.fake_server import FakeServer, serving

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def ask(stage, episode, **fields):
    """One raw request."""
    return await stage.post("/v1/chat/completions", {**BODY, **fields}, episode["api_key"])


@pytest.mark.medium
@pytest.mark.parametrize("status", [404, 429, 500])
async def test_a_turn_survives_its_server(stage, status: int) -> None:
    """Dropped connections, a server that is full or another's, and 5xx are repeated, invisible to
    the agent."""
    fine = stage.script("fine")
    scripts = iter([replace(fine, fail="drop"), replace(fine, fail=status), fine])
    stage.server.answer = lambda request: next(scripts)
    episode = await stage.open()
    answer = await ask(stage, episode)
    assert answer.status_code == 200
    assert len(stage.server.requests) == 3
    assert len(stage.turns(episode)) == 1


async def test_a_dead_servers_turns_go_to_the_other(stage) -> None:
    """The second server answers what the first refused."""
    other = FakeServer(lambda request: stage.script("from the other"))
    other.url = await stage.stack.enter_async_context(serving(other))
    stage.server.answer = lambda request: replace(stage.script("x"), fail="drop")
    stage.buffer.serve(other.url, server_id="server-1")
    await stage.app.state.parts.pool.refresh()
    episode = await stage.open()
    answers = await asyncio.gather(*(ask(stage, episode) for _ in range(6)))
    texts = {a.json()["choices"][0]["message"]["content"] for a in answers}
    assert texts == {"from the other"}
    assert len(other.requests) == 6


async def test_load_spreads_and_episodes_stay(stage) -> None:
    """New episodes go to the least loaded server; a turn returns to its episode's server."""
    other = FakeServer(lambda request: stage.script("b"))
    other.url = await stage.stack.enter_async_context(serving(other))
    stage.server.answer = lambda request: stage.script("a")
    stage.buffer.serve(other.url, server_id="server-1")
    await stage.app.state.parts.pool.refresh()
    episodes = [await stage.open(task_id=f"t{n}") for n in range(8)]
    for server in (stage.server, other):
        server.gate.clear()
    tasks = [asyncio.create_task(ask(stage, episode)) for episode in episodes]
    while len(stage.server.requests) + len(other.requests) < 8:
        await asyncio.sleep(0.005)
    assert len(stage.server.requests) == len(other.requests) == 4
    for server in (stage.server, other):
        server.gate.set()
    first = [(await task).json()["choices"][0]["message"]["content"] for task in tasks]
    again = [
        (await ask(stage, episode)).json()["choices"][0]["message"]["content"]
        for episode in episodes
    ]
    assert first == again


@pytest.mark.medium
async def test_without_a_server_the_turn_ends_in_a_retryable_503(make_stage) -> None:
    """The error names what was waited for and says when to come back."""
    stage = await make_stage(router={"turn_timeout_s": 0.2})
    stage.buffer.remove_servers()
    await stage.app.state.parts.pool.refresh()
    answer = await ask(stage, await stage.open())
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "true"
    assert int(answer.headers["retry-after"]) >= 1
    assert "a server to register" in answer.json()["error"]["message"]


@pytest.mark.medium
async def test_a_turn_s_clock_stands_still_while_the_trainer_has_the_servers_memory(
    make_stage,
) -> None:
    """A turn that a server holds meanwhile is answered later than its timeout allows; without that
    it would not be."""
    stage = await make_stage(router={"turn_timeout_s": 0.5})
    pool, registry = stage.app.state.parts.pool, stage.buffer.reader.registry
    stage.says("at last")
    episode = await stage.open()
    stage.server.gate.clear()
    registry.set_released("server-0", ("kv_cache", "weights"))
    await pool.refresh()
    began_at = pool.clock_s
    task = asyncio.create_task(ask(stage, episode))
    while not stage.server.requests:
        await asyncio.sleep(0.005)
    while time.monotonic() - began_at < 1.5:
        await pool.refresh()
        await asyncio.sleep(0.05)
    assert pool.clock_s - began_at < 0.4
    registry.set_released("server-0", ())
    await pool.refresh()
    stage.server.gate.set()
    assert (await task).status_code == 200
    assert len(stage.server.requests) == 1


@pytest.mark.medium
async def test_no_traffic_to_a_quarantined_server_or_a_wrong_version(make_stage) -> None:
    """Only the acknowledged version, or the announced one that replaces it, serves."""
    stage = await make_stage(router={"turn_timeout_s": 0.2})
    pool = stage.app.state.parts.pool
    for version, quarantined in ((None, False), (7, False), (0, True)):
        stage.buffer.serve(stage.server.url, version=version, is_quarantined=quarantined)
        await pool.refresh()
        assert (await ask(stage, await stage.open())).status_code == 503
    assert not stage.server.requests


async def test_a_turn_waits_for_a_publish_and_is_stamped(stage) -> None:
    """No server at a serving version: the turn is held, then generated at the new one."""
    buffer, server = stage.buffer, stage.server
    buffer.serve(server.url, version=None)
    await stage.app.state.parts.pool.refresh()
    stage.says("fine")
    episode = await stage.open()
    task = asyncio.create_task(ask(stage, episode))
    await asyncio.sleep(0.05)
    assert not server.requests
    server.version = "3"
    buffer.publish(3)
    buffer.serve(server.url, version=3)
    assert (await task).status_code == 200
    assert server.requests[0]["extra_key"] == "3"
    (span,) = stage.turns(episode)[0].version_spans
    assert span.policy_version == 3


async def test_a_publish_in_the_middle_of_a_turn_is_recorded_span_by_span(stage) -> None:
    """weight_versions of the server become the turn's version spans."""
    script = stage.script("Hello there.")
    num = len(script.ids)
    script.spans = [
        {"version": "0", "start": 0, "end": 2},
        {"version": "1", "start": 2, "end": num},
    ]
    stage.server.answer = lambda request: script
    episode = await stage.open()
    await ask(stage, episode)
    spans = stage.turns(episode)[0].version_spans
    assert [(s.policy_version, s.start, s.end) for s in spans] == [(0, 0, 2), (1, 2, num)]


async def test_an_aborted_turn_goes_on_with_its_partial_ids(stage) -> None:
    """What was generated before an abort is kept and continued, and counts once."""
    whole = stage.script("Hello there, friend.")
    part = replace(whole, ids=whole.ids[:4], finish={"type": "abort", "message": "x"})
    rest = replace(whole, ids=whole.ids[4:])
    scripts = iter([part, rest])
    stage.server.answer = lambda request: next(scripts)
    episode = await stage.open()
    answer = await ask(stage, episode)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there, friend."
    (turn,) = stage.turns(episode)
    assert turn.output_ids.tolist() == whole.ids
    first, second = stage.server.requests
    assert second["input_ids"] == first["input_ids"] + whole.ids[:4]
    assert second["sampling_params"]["max_new_tokens"] == 252


async def test_a_turn_aborted_before_its_first_token_is_no_failure_of_the_server(stage) -> None:
    """A publish in mode abort empties the server's queue: the turn goes there again, at once."""
    whole = stage.script("Hello there.")
    queued = replace(whole, ids=[], spans=None, finish={"type": "abort", "message": "x"})
    scripts = iter([queued, queued, whole])
    stage.server.answer = lambda request: next(scripts)
    episode = await stage.open()
    await ask(stage, episode)
    (turn,) = stage.turns(episode)
    assert turn.output_ids.tolist() == whole.ids
    (server,) = stage.app.state.parts.pool.servers
    assert server.num_failures == 0
    assert server.suspended_until == 0.0


async def test_a_stream_survives_its_server(stage) -> None:
    """The client sees one uninterrupted text though the server died halfway."""
    whole = stage.script("Hello there, my old friend.")
    calls: list[dict] = []

    def answer(request):
        calls.append(request)
        if len(calls) == 1:
            return replace(whole, drop_after=5)
        return replace(whole, ids=whole.ids[len(request["input_ids"]) - calls_start() :])

    def calls_start() -> int:
        return len(calls[0]["input_ids"])

    stage.server.answer = answer
    episode = await stage.open()
    client = await stage.client(episode)
    text = ""
    async for chunk in await client.chat.completions.create(**BODY, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == "Hello there, my old friend."
    assert stage.turns(episode)[0].output_ids.tolist() == whole.ids
    assert len(calls) == 2


async def test_a_stream_that_cannot_go_on_ends_in_an_error(make_stage) -> None:
    """At max_staleness=0 no turn is mixed: the client gets an error event, nothing is recorded."""
    stage = await make_stage(staleness=0)
    pool = stage.app.state.parts.pool
    whole = stage.script("Hello there, my old friend.")

    def answer(request):
        if len(stage.server.requests) == 1:
            stage.buffer.publish(1)
            stage.buffer.serve(stage.server.url, version=1)
            return replace(whole, drop_after=5)
        return whole

    stage.server.answer = answer
    episode = await stage.open()
    body = {**BODY, "stream": True}
    task = asyncio.create_task(stage.post("/v1/chat/completions", body, episode["api_key"]))
    while not stage.server.requests:
        await asyncio.sleep(0.005)
    await pool.refresh()
    answer_text = (await task).text
    assert "was lost after" in answer_text
    assert not stage.turns(episode)


@pytest.mark.parametrize(("staleness", "status"), [(0, 503), (1, 200)])
async def test_ready_follows_the_announced_version(make_stage, staleness, status) -> None:
    """503 with Retry-After until a server has acknowledged what the trainer announced, where
    nothing may start by the version before."""
    stage = await make_stage(staleness=staleness)
    assert (await stage.http.get("/ready")).json()["policy_version"] == 0
    stage.buffer.announce(1)
    await stage.app.state.parts.pool.refresh()
    answer = await stage.http.get("/ready")
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) == (status == 503)
    assert (await stage.http.get("/health")).status_code == 200


async def begin(stage, server, episode, **fields) -> asyncio.Task:
    """A turn that `server` has begun."""
    num_before = len(server.requests)
    task = asyncio.create_task(ask(stage, episode, **fields))
    while len(server.requests) == num_before:
        await asyncio.sleep(0.005)
    return task


async def test_episodes_of_a_task_share_a_server(stage) -> None:
    """A first turn goes where its task's prompt is cached, while that server is not much busier."""
    other = FakeServer(lambda request: stage.script("b"))
    other.url = await stage.stack.enter_async_context(serving(other))
    stage.server.answer = lambda request: stage.script("a")
    stage.buffer.serve(other.url, server_id="server-1")
    await stage.app.state.parts.pool.refresh()
    stage.server.gate.clear()
    busy = await begin(stage, stage.server, await stage.open(task_id="busy"))
    # The first server is busy, so this task begins on the second one, and stays there.
    assert (await ask(stage, await stage.open(task_id="t"))).status_code == 200
    stage.server.gate.set()
    await busy
    assert len(other.requests) == 1
    for _ in range(3):
        assert (await ask(stage, await stage.open(task_id="t"))).status_code == 200
    assert (len(stage.server.requests), len(other.requests)) == (1, 4)
    # Not at any price: the fifth turn more than the other's is one too many.
    other.gate.clear()
    running = [await begin(stage, other, await stage.open(task_id="t")) for _ in range(5)]
    assert (await ask(stage, await stage.open(task_id="t"))).status_code == 200
    assert len(stage.server.requests) == 2
    other.gate.set()
    await asyncio.gather(*running)


async def test_an_episode_that_asks_for_much_does_not_hold_up_the_others(make_stage) -> None:
    """Waiting turns are served in rotation of their episodes, not in the order of their arrival."""
    stage = await make_stage(server={"max_running_requests": 1})
    stage.server.answer = lambda request: stage.script("a")
    greedy, modest = await stage.open(task_id="greedy"), await stage.open(task_id="modest")
    stage.server.gate.clear()
    running = [await begin(stage, stage.server, greedy, max_tokens=10)]
    service = stage.app.state.parts.service
    for episode, limit in [(greedy, 10 + n) for n in range(1, 7)] + [(modest, 99)]:
        running.append(asyncio.create_task(ask(stage, episode, max_tokens=limit)))
        while service.num_running < len(running):
            await asyncio.sleep(0.005)
    # A server that generates one turn at once is given one at once.
    assert len(stage.server.requests) == 1
    # Claims say so to the buffer, which then starts no more episodes than it does.
    assert stage.app.state.parts.pool.is_busy
    stage.server.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}
    limits = [request["sampling_params"]["max_new_tokens"] for request in stage.server.requests]
    assert sorted(limits) == [*range(10, 17), 99]
    assert limits.index(99) <= 2
    assert not stage.app.state.parts.pool.is_busy


@pytest.mark.medium
async def test_who_waits_for_a_full_server_waits_no_longer_than_the_deadline(make_stage) -> None:
    """The refusal may be retried, and a client that leaves makes room for nobody twice."""
    stage = await make_stage(server={"max_running_requests": 1}, router={"turn_timeout_s": 0.5})
    stage.server.answer = lambda request: stage.script("a")
    stage.server.gate.clear()
    running = await begin(stage, stage.server, await stage.open())
    refused = await ask(stage, await stage.open())
    assert refused.status_code == 503
    assert refused.headers["x-should-retry"] == "true"
    assert (await running).status_code == 503
    stage.server.gate.set()
    pool = stage.app.state.parts.pool
    assert pool.num_in_flight == 0
    assert (await ask(stage, await stage.open())).status_code == 200


async def test_partial_ids_go_on_at_another_server_of_the_same_version(make_stage) -> None:
    """Also at max_staleness=0: the other server holds the same weights, so nothing is mixed."""
    stage = await make_stage(staleness=0)
    whole = stage.script("Hello there, friend.")
    part = replace(whole, ids=whole.ids[:4], finish={"type": "abort", "message": "x"})
    other = FakeServer(lambda request: replace(whole, ids=whole.ids[4:]))
    other.url = await stage.stack.enter_async_context(serving(other))

    def abort_and_leave(request):
        stage.buffer.remove_servers()
        stage.buffer.serve(other.url, server_id="server-1")
        return part

    stage.server.answer = abort_and_leave
    episode = await stage.open()
    answer = await ask(stage, episode)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there, friend."
    (first,), (second,) = stage.server.requests, other.requests
    assert second["input_ids"] == first["input_ids"] + whole.ids[:4]
    (turn,) = stage.turns(episode)
    assert turn.output_ids.tolist() == whole.ids
    assert {span.policy_version for span in turn.version_spans} == {0}


async def test_partial_ids_of_another_version_are_generated_anew_where_versions_may_not_mix(
    make_stage,
) -> None:
    """At max_staleness=0 a turn that was cut by a publish begins again at the new version."""
    stage = await make_stage(staleness=0)
    whole = stage.script("Hello there, friend.")
    part = replace(whole, ids=whole.ids[:4], finish={"type": "abort", "message": "x"})

    def abort_and_publish(request):
        if len(stage.server.requests) > 1:
            return whole
        stage.buffer.publish(1)
        stage.buffer.serve(stage.server.url, version=1)
        return part

    stage.server.answer = abort_and_publish
    episode = await stage.open()
    assert (await ask(stage, episode)).status_code == 200
    first, second = stage.server.requests
    assert second["input_ids"] == first["input_ids"]
    assert stage.turns(episode)[0].output_ids.tolist() == whole.ids


async def test_a_turn_that_waits_for_a_suspended_server_gets_it_again(make_stage) -> None:
    """The only server failed for a moment: no other turn that waits for it wakes."""
    stage = await make_stage()
    fine = stage.script("fine")
    scripts = iter([replace(fine, fail=500), fine])
    stage.server.answer = lambda request: next(scripts)
    started = asyncio.get_running_loop().time()
    assert (await ask(stage, await stage.open())).status_code == 200
    assert asyncio.get_running_loop().time() - started < 5
