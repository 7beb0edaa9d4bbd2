"""A router that is stopped finishes what it has begun."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from fakes.fake_server import FakeServer, Script, serving
from fakes.live_router import live_router
from fakes.ports import free_ports
from fakes.served_policy import publish
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
OTHER = {"model": "policy", "messages": [{"role": "user", "content": "ho"}]}


async def begun(stage, episode, **fields) -> asyncio.Task:
    """A request whose turn is being generated."""
    stage.server.gate.clear()
    num_before = len(stage.server.requests)
    body = {**BODY, **fields}
    task = asyncio.create_task(stage.post("/v1/chat/completions", body, episode["api_key"]))
    while len(stage.server.requests) == num_before:
        await asyncio.sleep(0.005)
    return task


async def draining(stage, timeout_s: float) -> asyncio.Task:
    """The router begins to stop."""
    service = stage.app.state.parts.service
    task = asyncio.create_task(service.drain(timeout_s))
    await asyncio.sleep(0)
    assert service.is_draining
    return task


@pytest.mark.parametrize("stream", [False, True])
async def test_running_turns_are_finished_and_new_ones_sent_elsewhere(stage, stream) -> None:
    """What was begun is answered and recorded; anything new is a 503 that every SDK retries."""
    stage.says("fine")
    episode = await stage.open()
    running = await begun(stage, episode, stream=stream)
    drain = await draining(stage, 60.0)
    refused = await stage.post("/v1/chat/completions", OTHER, episode["api_key"])
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "router_stopping"
    assert refused.headers["x-should-retry"] == "true"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["connection"] == "close"
    assert (await stage.http.get("/ready")).status_code == 503
    claim = await stage.post("/tasks/claim", {"key": "k", "count": 1})
    assert (claim.status_code, claim.json()["error"]["code"]) == (503, "router_stopping")
    stage.server.gate.set()
    answer = await running
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("data: [DONE]" if stream else "}")
    await drain
    (turn,) = stage.turns(episode)
    assert turn.loss_spans == ((0, len(turn.output_ids)),)
    close = {"outcome": "completed", "reward": {"value": 1.0}, "key": "c"}
    path = f"/episodes/{episode['episode_id']}/close"
    assert (await stage.post(path, close)).json()["counted"]


async def test_a_retry_of_a_running_turn_is_no_new_one(stage) -> None:
    """A client that comes back while the router stops gets the turn that it left."""
    stage.says("fine")
    episode = await stage.open()
    first = await begun(stage, episode)
    drain = await draining(stage, 60.0)
    retry = {"x-stainless-retry-count": "1"}
    again = asyncio.create_task(
        stage.post("/v1/chat/completions", BODY, episode["api_key"], **retry)
    )
    ((turn,),) = stage.app.state.parts.episodes.known(episode["episode_id"]).turns.values()
    async with asyncio.timeout(60):
        while turn.num_clients < 2:
            await asyncio.sleep(0.005)
    first.cancel()
    stage.server.gate.set()
    assert (await again).json()["choices"][0]["message"]["content"] == "fine"
    await drain
    assert len(stage.turns(episode)) == 1


async def test_a_turn_that_outlasts_the_deadline_may_be_retried(stage) -> None:
    """Its client is asked to come back, as the episode is not over; its server is freed."""
    episode = await stage.open()
    running = await begun(stage, episode)
    await (await draining(stage, 0.05))
    answer = await running
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "true"
    async with asyncio.timeout(20):
        while not stage.server.aborted:
            await asyncio.sleep(0.005)
    assert stage.server.aborted == [stage.server.requests[0]["rid"]]
    assert not stage.turns(episode)


@pytest.mark.medium
async def test_turns_of_clients_that_left_are_not_waited_for(stage) -> None:
    """A router stops when its agents are gone, at once, whatever its deadline."""
    episode = await stage.open()
    running = await begun(stage, episode)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(30):
        await (await draining(stage, 3600.0))
    assert not stage.turns(episode)


@pytest.fixture
def live_run(make_run, tmp_path: Path):
    """A run whose routers share a port, in a Redis of its own."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as redis:
        settings = make_run(router={"shares_port": True}, buffer={"group_size": 2}).settings
        run = create_run(settings, tmp_path / "run", redis.url)
        init_run(run)
        yield replace(run, keys=replace(run.keys, runner_key="ol-runner-x"))


@pytest.mark.medium
async def test_a_stopped_process_leaves_the_port_to_the_others(live_run, renderer) -> None:
    """Its stream is sent to the end; new connections reach the other process, every one."""
    stop_id = renderer.stop_ids[0]
    ids = [*renderer.tokenizer.encode("a long answer"), stop_id]
    server = FakeServer(
        lambda request: Script(ids=ids, finish={"type": "stop", "matched": stop_id})
    )
    (port,) = free_ports(1)
    stops = [asyncio.Event(), asyncio.Event()]
    runner = {"Authorization": "Bearer ol-runner-x"}
    lasting = httpx.Limits(keepalive_expiry=None)
    async with (
        serving(server) as server_url,
        httpx.AsyncClient(timeout=60) as http,
        httpx.AsyncClient(timeout=60, limits=lasting) as keeper,
    ):
        publish(live_run, server_url)
        first = live_router(live_run, port=port, stop=stops[0])
        url = await first.__aenter__()
        tasks = {"tasks": [{"task_id": "t", "payload": {}}], "eval_tasks": []}
        await http.post(f"{url}/tasks", json=tasks, headers=runner)
        claim = {"key": "k", "count": 1, "open": True}
        answer = await http.post(f"{url}/tasks/claim", json=claim, headers=runner)
        episode = answer.json()["claims"][0]["episode"]
        key = {"Authorization": f"Bearer {episode['api_key']}"}
        chat = f"{url}/v1/chat/completions"
        server.step_gate = asyncio.Event()
        assert (await keeper.get(f"{url}/ready")).status_code == 200
        async with http.stream("POST", chat, json={**BODY, "stream": True}, headers=key) as stream:
            lines = stream.aiter_lines()
            text = await anext(lines)
            async with live_router(live_run, port=port, stop=stops[1]):
                stops[0].set()
                ending = asyncio.create_task(first.__aexit__(None, None, None))
                kept = await _until_refused(keeper, f"{url}/ready")
                assert kept.headers["connection"] == "close"
                server.step_gate.set()
                for _ in range(12):
                    async with httpx.AsyncClient(timeout=60) as fresh:
                        answer = await fresh.post(chat, json=OTHER, headers=key)
                        assert answer.status_code == 200, answer.text
                async for line in lines:
                    text += line
                await ending
        assert text.endswith("data: [DONE]")


async def _until_refused(keeper: httpx.AsyncClient, url: str) -> httpx.Response:
    """What the stopping router says on a connection that it still holds."""
    async with asyncio.timeout(60):
        while (answer := await keeper.get(url)).status_code == 200:
            await asyncio.sleep(0.01)
    return answer
