"""Evaluation's own sampling is recorded and never trained, whichever way its turns come about."""

from dataclasses import replace

import openai
import pytest

from fakes.fake_server import FakeServer, serving

ASKED = {"model": "policy", "input": "Say something."}
OWN = {"temperature": 0.25, "top_p": 0.5, "max_new_tokens": 40, "seed": 7}
EVAL = {"purpose": "eval", "group_id": None, "sampling": OWN}


def check_masked(stage, episode, num_turns: int) -> None:
    """Every turn has its own sampling and no loss, and the servers sample by it."""
    turns = stage.turns(episode)
    assert len(turns) == num_turns
    for turn in turns:
        assert (turn.loss_spans, turn.mask_reason) == ((), "eval")
        seed = OWN["seed"] + turn.choice_index
        assert {name: getattr(turn.sampling, name) for name in OWN} == {**OWN, "seed": seed}


async def test_an_evaluation_gone_on_with_by_id_is_not_trained(make_stage, stage) -> None:
    """By `previous_response_id`, forked, and at a process that knows the ids alone; its sampling
    stays in force whatever the client asks for."""
    stage.says("one", "two", "three", "four")
    episode = await stage.open(**EVAL)
    client = await stage.client(episode)
    first = await client.responses.create(**ASKED, temperature=1.0)
    for _ in range(2):
        await client.responses.create(**ASKED, previous_response_id=first.id, top_p=1.0)
    other = await make_stage(beside=stage)
    elsewhere = await other.client({**episode, "base_url": f"{other.url}/v1"})
    last = await elsewhere.responses.create(**ASKED, previous_response_id=first.id)
    assert last.output_text == "four"
    check_masked(stage, episode, 4)
    assert [turn.branch_cause for turn in stage.turns(episode)][1:] == [
        "extension",
        "resampled",
        "resampled",
    ]
    for request in stage.server.requests:
        sampled = request["sampling_params"]
        assert (sampled["temperature"], sampled["top_p"]) == (0.25, 0.5)
        assert sampled["sampling_seed"] == 7


async def test_retries_and_choices_of_an_evaluation_are_not_trained(make_stage, stage) -> None:
    """A retry gets the recorded turn, here and by another process, with all of its choices; a
    undelivered turn is masked as evaluation first."""
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open(**EVAL)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "n": 3}
    retry = {"x-stainless-retry-count": "1"}
    first = await stage.post("/v1/chat/completions", body, episode["api_key"])
    again = await stage.post("/v1/chat/completions", body, episode["api_key"], **retry)
    other = await make_stage(beside=stage)
    elsewhere = await other.post("/v1/chat/completions", body, episode["api_key"], **retry)
    assert first.json() == again.json() == elsewhere.json()
    check_masked(stage, episode, 3)
    assert len(stage.server.requests) == 3


@pytest.mark.parametrize("purposes", [("eval", "train"), ("train", "eval")])
async def test_no_episode_goes_on_with_a_turn_of_another_purpose(stage, purposes) -> None:
    """What evaluation generated does not become a trained episode's history by its id, nor the
    other way; the same words in it are prompt."""
    fields = {"eval": EVAL, "train": {}}
    stage.server.answer = lambda request: stage.script("fine")
    one, two = [await stage.open(**fields[purpose]) for purpose in purposes]
    first = await (await stage.client(one)).responses.create(**ASKED)
    client = await stage.client(two)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(**ASKED, previous_response_id=first.id)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    asked = [{"role": "user", "content": "Say something."}, *items]
    await client.responses.create(
        model="policy", input=[*asked, {"role": "user", "content": "More."}]
    )
    (turn,) = stage.turns(two)
    assert turn.parent_turn_id is None
    assert bool(turn.loss_spans) == (purposes[1] == "train")
    assert len(turn.prompt_ids) > len(stage.turns(one)[0].prompt_ids)


async def test_a_turn_that_two_servers_generated_for_an_evaluation_is_not_trained(stage) -> None:
    """Its server dies in the middle; the rest comes from another, under the same sampling."""
    whole = stage.script("Hello there, my old friend.")
    other = FakeServer(lambda request: stage.script("never asked"))
    other.url = await stage.stack.enter_async_context(serving(other))
    calls: list[dict] = []

    def answer(request):
        calls.append(request)
        if len(calls) == 1:
            return replace(whole, drop_after=5)
        num_seen = len(request["input_ids"]) - len(calls[0]["input_ids"])
        return replace(whole, ids=whole.ids[num_seen:])

    stage.server.answer = other.answer = answer
    stage.buffer.serve(other.url, server_id="server-1")
    await stage.app.state.parts.pool.refresh()
    episode = await stage.open(**EVAL)
    client = await stage.client(episode)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    async for _ in await client.chat.completions.create(**body, stream=True):
        pass
    check_masked(stage, episode, 1)
    assert stage.turns(episode)[0].output_ids.tolist() == whole.ids
    assert [call["sampling_params"]["temperature"] for call in calls] == [0.25, 0.25]
