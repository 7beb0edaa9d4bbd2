"""The router's process over a real Redis, from claim to the trainer's lease."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from click.testing import CliRunner, Result

from fakes.fake_server import FakeServer, Script, serving
from fakes.live_router import live_router
from fakes.served_policy import publish
from outloop.buffer.errors import SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run
from outloop.cli import cli
from outloop.router.main import serve

KEY = {"Authorization": "Bearer ol-runner-x"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory):
    """A real server."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), max_memory_mb=64) as redis:
        yield redis.url


@pytest.fixture
def live_run(make_run, redis_url: str, tmp_path: Path):
    """A run in Redis with groups of two."""
    settings = make_run(buffer={"group_size": 2}).settings
    run = create_run(settings, tmp_path / "run", redis_url)
    run = replace(run, keys=replace(run.keys, runner_key="ol-runner-x"))
    init_run(run)
    return run


@pytest.mark.medium
async def test_the_run_tells_how_it_stands_to_whoever_has_the_admin_key(
    live_run, tmp_path: Path
) -> None:
    """`outloop status` by the router's URL alone: parts, servers, waits; other keys are refused."""

    def status(key: str, *words: str) -> Result:
        path = tmp_path / "key"
        path.write_text(key)
        return CliRunner().invoke(cli, ["status", *words, "--admin-key-file", str(path)])

    reader = BufferReader.connect(live_run)
    reader.registry.report_status("trainer", {"waiting_for": "3 groups", "since": "100.0"})
    server = FakeServer(lambda request: Script(ids=[], finish={"type": "length"}))
    async with serving(server) as server_url, live_router(live_run) as url:
        publish(live_run, server_url)
        key = live_run.keys.admin_key
        shown = await asyncio.to_thread(status, key, "--router-url", url)
        found = await asyncio.to_thread(status, key, "--router-url", url, "--json")
        refused = await asyncio.to_thread(status, "ol-runner-x", "--router-url", url)
    reader.close()
    for words in ("test: running", "waits for 3 groups since", url, server_url, "0 ready to be"):
        assert words in shown.output
    assert json.loads(found.output)["statuses"]["trainer"]["waiting_for"] == "3 groups"
    assert "refuses the key; give admin_key" in str(refused.exception)
    gone = await asyncio.to_thread(status, key, "--router-url", url)
    assert "no router of a run answers there" in str(gone.exception)


@pytest.mark.medium
async def test_from_claim_to_lease(live_run, renderer) -> None:
    """Two episodes of one group are played by the real client and reach the trainer exactly."""
    stop = renderer.stop_ids[0]

    def answer(request) -> Script:
        text = "84" if "tool_response" in renderer.tokenizer.decode(request["input_ids"]) else CALL
        ids = [*renderer.tokenizer.encode(text), stop]
        return Script(ids=ids, finish={"type": "stop", "matched": stop})

    server, reader = FakeServer(answer), BufferReader.connect(live_run)
    async with serving(server) as server_url, live_router(live_run) as url:
        assert reader.registry.parts()["router"]["url"] == url
        async with httpx.AsyncClient(base_url=url, headers=KEY, verify=False) as http:
            tasks = [{"task_id": f"t{i}", "payload": {"q": i}} for i in range(3)]
            body = {"tasks": tasks, "eval_tasks": []}
            assert (await http.post("/tasks", json=body)).json()["num_tasks"] == 3
            publish(live_run, server_url)
            claim = {"key": "k", "count": 2, "open": True}
            claims = (await http.post("/tasks/claim", json=claim)).json()["claims"]
            assert len({c["group_id"] for c in claims}) == 1
            for number, one in enumerate(claims):
                await play(one["episode"])
                close = {
                    "outcome": "completed",
                    "reward": {"value": float(number)},
                    "key": f"c{number}",
                }
                path = f"/episodes/{one['episode']['episode_id']}"
                assert (await http.post(f"{path}/close", json=close)).json()["counted"]
                read = (await http.get(path)).json()
                assert len(read["turns"]) == 2
    leases = await asyncio.to_thread(
        reader.take,
        1,
        fence=reader.acquire_fence(),
        policy_version=0,
        timeout_s=5.0,
        on_wait=lambda _: None,
        should_stop=lambda: False,
    )
    reader.close()
    trajectories = leases[0].group.trajectories
    assert sorted(t.episode.reward.value for t in trajectories) == [0.0, 1.0]
    seen = [r["input_ids"] for r in server.requests]
    for trajectory in trajectories:
        ((first, second),) = trajectory.branches()
        assert [*first.prompt_ids, *first.output_ids, *second.prompt_ids] in seen


async def play(episode: dict) -> None:
    """A two-turn agent."""
    client = openai.AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"])
    async with client:
        messages = [{"role": "user", "content": "go"}]
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL]
        )
        reply = answer.choices[0].message
        assert json.loads(reply.tool_calls[0].function.arguments) == {"x": 1}
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "84"}
        messages += [reply.model_dump(exclude_none=True), result]
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], stream=True
        )
        assert "".join([c.choices[0].delta.content or "" async for c in answer]) == "84"


@pytest.mark.medium
async def test_sft_conversations_need_no_server(live_run) -> None:
    """Trajectories are rendered and stored while nothing serves; claims are asked to come back."""
    async with live_router(live_run) as url, httpx.AsyncClient(base_url=url, headers=KEY) as http:
        row = {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        }
        body = {"trajectories": [row, row], "key": "k", "final": True}
        for _ in range(2):
            assert (await http.post("/trajectories", json=body)).json()["num_accepted"] == 2
        assert (await http.get("/ready")).status_code == 503
    reader = BufferReader.connect(live_run)
    assert reader.sft_progress() == (2, True)
    turn = next(iter(reader.sft_trajectories())).turns[0]
    reader.close()
    assert turn.loss_spans == ((0, len(turn.output_ids)),)


@pytest.mark.medium
async def test_an_address_that_cannot_be_had_is_named(make_run, redis_url, tmp_path) -> None:
    """The sentence says which address, and what to choose."""
    settings = make_run(router={"host": "192.0.2.1", "port": 1}).settings
    run = create_run(settings, tmp_path / "run", redis_url)
    init_run(run)
    with pytest.raises(SettingsError, match=r"router.host='192.0.2.1' router.port=1"):
        await serve(run, stop=asyncio.Event(), on_ready=lambda _: None)
