"""Servers that keep an earlier version through publishes: `policy@VERSION`, `policy@frozen`."""

import asyncio

import pytest

from fakes.fake_server import FakeServer, serving
from outloop.buffer.records import Task


async def ask(stage, episode, model: str, **fields: object):
    """One raw request."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
    return await stage.post("/v1/chat/completions", body, episode["api_key"])


def text_of(answer) -> str:
    """What was answered."""
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.fixture
async def frozen(make_stage):
    """A run at version 5 with two servers of earlier versions; each answers its version."""
    stage = await make_stage(server={"num_frozen": 2, "frozen_every": 2})
    stage.frozen = []
    for index, version in enumerate((2, 4)):
        server = FakeServer(lambda request, version=version: stage.script(f"version {version}"))
        server.url = await stage.stack.enter_async_context(serving(server))
        server.version = str(version)
        stage.buffer.freeze(server.url, server_id=f"frozen-{index}", version=version)
        stage.frozen.append(server)
    stage.server.version = "5"
    stage.server.answer = lambda request: stage.script("newest")
    stage.buffer.publish(5)
    stage.buffer.serve(stage.server.url, version=5)
    await stage.app.state.parts.pool.refresh()
    return stage


async def test_an_earlier_version_is_served_after_a_publish(frozen) -> None:
    """By its name, to any episode; recorded under its version and never trained. The policy itself
    is never served by such a server."""
    episode = await frozen.open()
    for model, text in (("policy@2", "version 2"), ("policy@4", "version 4"), ("policy", "newest")):
        assert text_of(await ask(frozen, episode, model)) == text
    turns = frozen.turns(episode)
    assert [turn.version_spans[-1].policy_version for turn in turns] == [2, 4, 5]
    assert [turn.mask_reason for turn in turns if not turn.loss_spans] == ["frozen", "frozen"]
    gone = await ask(frozen, episode, "policy@3")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert "policy@4" in gone.json()["error"]["message"]


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
async def test_any_kept_version_is_the_same_for_a_task(frozen, stream: bool) -> None:
    """All attempts at a task and all turns of an episode get one; tasks are spread over all."""
    served = {}
    for task in map(str, range(12)):
        episodes = [await frozen.open(task_id=task) for _ in range(2)]
        for episode in (*episodes, *episodes):
            answer = await ask(frozen, episode, "policy@frozen", stream=stream)
            assert answer.status_code == 200, answer.text
        turns = [turn for episode in episodes for turn in frozen.turns(episode)]
        assert [turn.mask_reason for turn in turns] == ["frozen"] * 4
        (served[task],) = {turn.version_spans[-1].policy_version for turn in turns}
    assert set(served.values()) == {2, 4}
    assert not frozen.server.requests


async def test_an_episode_keeps_its_opponent_until_that_is_gone(frozen) -> None:
    """Also where another version comes that its task would be given."""
    episodes = [await frozen.open(task_id=str(task)) for task in range(8)]
    first = [text_of(await ask(frozen, episode, "policy@frozen")) for episode in episodes]
    frozen.frozen[0].version = "6"
    frozen.buffer.freeze(frozen.frozen[0].url, server_id="frozen-0", version=6)
    frozen.frozen[0].answer = lambda request: frozen.script("version 6")
    await frozen.app.state.parts.pool.refresh()
    for episode, before in zip(episodes, first, strict=True):
        now = text_of(await ask(frozen, episode, "policy@frozen"))
        assert now == "version 4" if before == "version 4" else now in ("version 4", "version 6")
    assert {"version 2", "version 4"} == set(first)


@pytest.mark.medium
async def test_a_request_waits_while_no_server_holds_one(make_stage) -> None:
    """As at the start of a run, and while the only server moves on; then it is answered, or told to
    come back."""
    stage = await make_stage(server={"num_frozen": 1}, router={"turn_timeout_s": 1.0})
    episode = await stage.open()
    late = await ask(stage, episode, "policy@frozen")
    assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready")
    assert float(late.headers["retry-after"]) > 0
    waiting = asyncio.create_task(ask(stage, episode, "policy@frozen"))
    await asyncio.sleep(0.1)
    stage.server.answer = lambda request: stage.script("first")
    stage.buffer.freeze(stage.server.url, version=0)
    assert text_of(await waiting) == "first"


async def test_a_version_replaced_under_a_turn_is_asked_again(frozen) -> None:
    """A server that moves to other weights during the turn: whoever asked is told to come back, and
    is not given the other weights' tokens."""
    for server in frozen.frozen:
        script = frozen.script("one two")
        script.spans = [{"version": "8", "start": 0, "end": len(script.ids)}]
        server.answer = lambda request, script=script: script
    episode = await frozen.open()
    for model in ("policy@frozen", "policy@2"):
        retried = await ask(frozen, episode, model)
        assert (retried.status_code, retried.json()["error"]["code"]) == (503, "version_replaced")
    assert not frozen.turns(episode)


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("policy@0", 503, "version_replaced"),
        ("policy@2", 503, "version_replaced"),
        ("policy@3", 404, "model_not_found"),
        ("policy@6", 404, "model_not_found"),
    ],
)
async def test_a_kept_version_that_is_away_may_be_asked_again(frozen, model, status, code) -> None:
    """One that was left for a newer one, or is being loaded; 3 is not kept, 6 not published."""
    frozen.buffer.freeze(frozen.frozen[0].url, server_id="frozen-0", version=None)
    await frozen.app.state.parts.pool.refresh()
    episode = await frozen.open()
    answer = await ask(frozen, episode, model)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert (answer.headers["x-should-retry"] == "true") == (status == 503)


async def test_the_name_is_listed_where_there_are_such_servers(frozen, make_stage) -> None:
    """And refused elsewhere."""
    episode = await frozen.open()
    listed = (await frozen.get("/v1/models", episode["api_key"])).json()["data"]
    assert [model["id"] for model in listed] == ["policy", "policy@frozen"]
    one = await frozen.get("/v1/models/policy@frozen", episode["api_key"])
    assert one.json()["id"] == "policy@frozen"
    without = await make_stage()
    refused = await ask(without, await without.open(), "policy@frozen")
    assert refused.json()["error"]["code"] == "model_not_found"


async def test_a_run_is_not_ready_by_an_earlier_version_alone(make_stage) -> None:
    """Claims wait for the policy's own servers."""
    stage = await make_stage(server={"num_frozen": 1})
    stage.buffer.remove_servers()
    stage.buffer.freeze(stage.server.url, version=0)
    await stage.app.state.parts.pool.refresh()
    assert not stage.app.state.parts.pool.is_ready
    assert (await stage.get("/ready")).status_code == 503


async def test_an_evaluation_is_sampled_by_the_version_that_it_evaluates(frozen) -> None:
    """While a server keeps it: the agent asks for the policy and knows nothing of versions. What is
    kept by none goes on with the policy as it is, and so do training and evaluations without a
    version in their names."""
    tasks = [Task(task_id="t", payload={})], [Task(task_id="e", payload={"n": 1})]
    await frozen.writer.register_tasks(*tasks)
    names = ("4:sampled", "2:suite-aime", "3:sampled", "5:sampled")
    for name in names:
        version = int(name[0])
        frozen.buffer.reader.request_eval(
            name, policy_version=version, num_episodes=2, sampling={}, blocks_training=True
        )
    found = (await frozen.writer.claim(key="k", count=20)).claims
    claims = [one for one in found if one.purpose == "eval"]
    trained = next(one for one in found if one.purpose == "train")
    episodes = {
        (one.eval_name, one.attempt): await frozen.open(
            purpose="eval", task_id="e", eval_name=one.eval_name, attempt=one.attempt
        )
        for one in claims
    }
    assert len(episodes) == 8
    texts = ("version 4", "version 2", "newest", "newest")
    for name, text in zip(names, texts, strict=True):
        for _ in range(2):
            assert text_of(await ask(frozen, episodes[name, 0], "policy")) == text
    group = {"group_id": trained.group_id, "attempt": trained.attempt}
    for others in ({"purpose": "eval"}, group):
        episode = await frozen.open(**others)
        assert text_of(await ask(frozen, episode, "policy")) == "newest"
    # It left for a newer one.
    frozen.frozen[1].version = "8"
    frozen.buffer.freeze(frozen.frozen[1].url, server_id="frozen-1", version=8)
    await frozen.app.state.parts.pool.refresh()
    assert text_of(await ask(frozen, episodes["4:sampled", 1], "policy")) == "newest"
