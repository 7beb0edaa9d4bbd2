"""Experts that servers report are recorded with the turn, each token's once and in its place."""

import asyncio
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from fakes.fake_server import FakeServer, routes_of, serving

MIXTURE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture
async def mixture(make_stage, model_folder, tmp_path):
    """A router of a mixture of experts, whose server reports where it sends tokens."""
    folder = tmp_path / "mixture"
    shutil.copytree(model_folder, folder)
    (folder / "config.json").write_text(json.dumps(MIXTURE))

    async def make(**sections):
        stage = await make_stage(model={"path": str(folder)}, **sections)
        stage.server.has_experts = True
        return stage

    return make


async def say(stage, episode, messages, **fields) -> list[dict]:
    """One chat completion; the messages with its answer."""
    body = {"model": "policy", "messages": messages, **fields}
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200, answer.text
    return [*messages, answer.json()["choices"][0]["message"]]


def assert_recorded(stage, episode) -> None:
    """Each turn has the experts of the token before each of its ids."""
    turns = {turn.turn_id: turn for turn in stage.turns(episode)}
    for turn in turns.values():
        own = [*turn.prompt_ids.tolist(), *turn.output_ids.tolist()]
        if turn.parent_turn_id is not None:
            own.insert(0, int(turns[turn.parent_turn_id].output_ids[-1]))
        assert turn.routed_experts is not None
        np.testing.assert_array_equal(turn.routed_experts.experts, routes_of(own[:-1]))


async def test_each_token_is_asked_for_once(mixture) -> None:
    """Of a conversation only what is new, from the last token of the turn before on."""
    stage = await mixture()
    stage.says("one", "two", "two, too", "three")
    episode = await stage.open()
    messages = await say(stage, episode, [{"role": "user", "content": "first"}])
    messages = await say(stage, episode, [*messages, {"role": "user", "content": "second"}], n=2)
    await say(stage, episode, [*messages, {"role": "user", "content": "third"}])
    assert_recorded(stage, episode)
    turns = stage.turns(episode)
    assert len(turns) == 4
    first = len(turns[0].prompt_ids) + len(turns[0].output_ids)
    starts = [request["routed_experts_start_len"] for request in stage.server.requests]
    assert starts[:3] == [0, first - 1, first - 1]
    assert starts[3] > first


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
async def test_what_two_servers_generated_is_joined(mixture, stream: bool) -> None:
    """A turn that was aborted half-way and goes on: the rest is asked of who goes on with it."""
    stage = await mixture()
    whole = stage.script("Hello there, my old friend.")
    aborted = replace(whole, ids=whole.ids[:5], finish={"type": "abort", "message": "x"})
    scripts = iter([aborted, replace(whole, ids=whole.ids[5:])])
    stage.server.answer = lambda request: next(scripts)
    episode = await stage.open()
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200
    assert_recorded(stage, episode)
    (turn,) = stage.turns(episode)
    assert turn.output_ids.tolist() == whole.ids
    starts = [request["routed_experts_start_len"] for request in stage.server.requests]
    assert starts == [0, len(turn.prompt_ids) + 4]


async def test_rows_of_a_server_that_died_are_asked_for_again(mixture) -> None:
    """What a stream has shown stays; where its tokens went, only who goes on can say."""
    stage = await mixture()
    whole = stage.script("Hello there, my old friend.")
    other = FakeServer(lambda request: replace(whole, ids=whole.ids[5:]))
    other.has_experts = True
    other.url = await stage.stack.enter_async_context(serving(other))
    stage.server.answer = lambda request: replace(whole, drop_after=5)
    stage.server.is_cumulative = False
    stage.buffer.serve(other.url, server_id="server-1")
    episode = await stage.open()
    client = await stage.client(episode, max_retries=0)
    asked = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    async with asyncio.timeout(20):
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in asked])
    assert text == "Hello there, my old friend."
    assert_recorded(stage, episode)
    assert other.requests[-1]["routed_experts_start_len"] == 0


async def test_rows_that_are_missing_are_no_answer(mixture) -> None:
    """The turn is generated again; experts that belong to other tokens are never recorded."""
    stage = await mixture()
    whole = stage.script("fine")
    scripts = iter([replace(whole, num_routes_lost=1), whole])
    stage.server.answer = lambda request: next(scripts)
    episode = await stage.open()
    await say(stage, episode, [{"role": "user", "content": "hi"}])
    assert len(stage.server.requests) == 2
    assert_recorded(stage, episode)


async def test_a_server_that_says_nothing_is_served_all_the_same(mixture) -> None:
    """Its turns have no experts; the trainer's metrics say how many."""
    stage = await mixture()
    stage.server.has_experts = False
    stage.says("fine")
    episode = await stage.open()
    await say(stage, episode, [{"role": "user", "content": "hi"}])
    (turn,) = stage.turns(episode)
    assert turn.routed_experts is None
    assert turn.loss_spans


@pytest.mark.medium
async def test_only_what_may_be_trained_is_asked_for(mixture, stage) -> None:
    """Not for evaluations, with replay off, or of a dense model."""
    experts = await mixture()
    quiet = await mixture(trainer={"routing_replay": False})
    for one, purpose in ((experts, "eval"), (quiet, "train"), (stage, "train")):
        one.says("fine")
        fields = {"group_id": None} if purpose == "eval" else {}
        await say(
            one, await one.open(purpose=purpose, **fields), [{"role": "user", "content": "a"}]
        )
        assert "return_routed_experts" not in one.server.requests[-1]


async def test_a_replayed_turn_keeps_its_experts(mixture) -> None:
    """An attempt that is played again gets the turns of the lost one, with their experts."""
    stage = await mixture()
    stage.says("one", "two")
    lost = await stage.open()
    messages = await say(stage, lost, [{"role": "user", "content": "first"}])
    close = {"outcome": "failed", "failure_kind": "infrastructure", "key": "c"}
    answer = await stage.post(f"/episodes/{lost['episode_id']}/close", close)
    assert answer.status_code == 200
    body = {"key": "again", "count": 1, "open": True}
    (claimed,) = (await stage.post("/tasks/claim", body)).json()["claims"]
    assert claimed["resumes"] == lost["episode_id"]
    again = claimed["episode"]
    messages = await say(stage, again, [{"role": "user", "content": "first"}])
    await say(stage, again, [*messages, {"role": "user", "content": "second"}])
    assert len(stage.server.requests) == 2
    assert_recorded(stage, again)
