"""Sampling in force, loss spans, and evaluation."""

import pytest
from msgspec import structs

from outloop.router.dialects.base import Message, TurnRequest
from outloop.router.turns.sampling import decide

MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = {"temperature": 0.3, "top_p": 0.5, "presence_penalty": 1.0, "seed": 7, "max_tokens": 9}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def ask(stage, episode, **fields):
    """One raw request."""
    body = {"model": "policy", "messages": MESSAGES, **fields}
    return await stage.post("/v1/chat/completions", body, episode["api_key"])


async def test_nothing_is_left_to_the_servers_defaults(stage) -> None:
    """Every field is explicit, whatever the client left out."""
    stage.says("fine")
    await ask(stage, await stage.open())
    request = stage.server.requests[0]
    assert request["return_logprob"] is True
    assert request["extra_key"] == "0"
    parameters = request["sampling_params"]
    assert parameters["stop_token_ids"] == list(stage.renderer.stop_ids)
    expected = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": 256,
        "skip_special_tokens": False,
    }
    assert expected.items() <= parameters.items()
    assert "sampling_seed" not in parameters


async def test_enforce_ignores_what_the_client_asks(make_stage) -> None:
    """The run's sampling is in force; only the limit and stop strings are the client's."""
    stage = await make_stage(sampling={"temperature": 0.8, "governance": "enforce"})
    stage.says("fine")
    episode = await stage.open()
    assert (await ask(stage, episode, tool_choice="required", **ASKED)).status_code == 200
    sampling = stage.turns(episode)[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.8, 1.0, None)
    assert sampling.max_new_tokens == 9
    assert stage.turns(episode)[0].loss_spans


async def test_record_lets_the_client_win_and_masks_what_cannot_be_rebuilt(make_stage) -> None:
    """The client's sampling is in force and stored; a truncated distribution has no loss."""
    stage = await make_stage(sampling={"governance": "record"})
    stage.says("fine", "fine")
    episode = await stage.open()
    await ask(stage, episode, **ASKED)
    await ask(stage, episode, temperature=0.5)
    first, second = stage.turns(episode)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.seed) == (0.3, 0.5, 7)
    assert (first.loss_spans, first.mask_reason) == ((), "behavior_unknown")
    assert second.sampling.temperature == 0.5
    assert second.loss_spans


async def test_reject_names_the_parameter(make_stage) -> None:
    """Another value is refused, the run's own is not."""
    stage = await make_stage(sampling={"governance": "reject"})
    stage.says("fine")
    episode = await stage.open()
    assert (await ask(stage, episode, temperature=1.0)).status_code == 200
    answer = await ask(stage, episode, temperature=0.5)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"
    assert (await ask(stage, episode, seed=1)).status_code == 400
    assert (await ask(stage, episode, tool_choice="required", tools=[TOOL])).status_code == 400


async def test_eval_episodes_bring_their_own_sampling_and_are_never_trained(stage) -> None:
    """Greedy by the opening, in no group, and without loss."""
    stage.says("fine", "fine")
    episode = await stage.open(purpose="eval", group_id=None, sampling={"temperature": 0.0})
    await ask(stage, episode, temperature=0.9)
    turn = stage.turns(episode)[0]
    assert turn.sampling.temperature == 0.0
    assert (turn.loss_spans, turn.mask_reason) == ((), "eval")
    opening = stage.buffer.load_episode(episode["episode_id"]).opening
    assert (opening.purpose, opening.group_id) == ("eval", None)
    plain = await stage.open(purpose="eval", group_id=None)
    await ask(stage, plain)
    assert stage.turns(plain)[0].loss_spans == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"purpose": "train", "sampling": {"temperature": 0.0}},
        {"purpose": "eval", "sampling": {"warmth": 1.0}},
        {"purpose": "eval", "group_id": "g"},
        {"purpose": "sft"},
    ],
)
async def test_openings_that_cannot_be_are_refused(stage, fields) -> None:
    """Only evaluation brings sampling, and it belongs to no group."""
    body = {"task_id": "t", "group_id": None, "attempt": 0, "deadline_s": 60, **fields}
    answer = await stage.post("/episodes", body)
    assert answer.status_code == 400
    assert stage.buffer.reader.stats()["buffer/episodes"] == 0


async def test_tokens_after_a_stop_have_no_loss(stage) -> None:
    """A server that runs past the stop id does not get its extra tokens trained."""
    script = stage.script("fine")
    num = len(script.ids)
    script.ids += [5, 6]
    stage.server.answer = lambda request: script
    episode = await stage.open()
    answer = await ask(stage, episode)
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    turn = stage.turns(episode)[0]
    assert (turn.loss_spans, turn.mask_reason) == (((0, num),), "after_stop")


async def test_a_call_the_client_never_saw_has_no_loss(stage) -> None:
    """parallel_tool_calls=false hands out one call; what follows is not trained."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    script = stage.script(f"{call}\n{call}")
    stage.server.answer = lambda request: script
    episode = await stage.open()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    answer = await ask(stage, episode, tools=tools, parallel_tool_calls=False)
    assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1
    turn = stage.turns(episode)[0]
    ((start, end),) = turn.loss_spans
    assert start == 0
    assert stage.renderer.tokenizer.decode(turn.output_ids[:end].tolist()).strip() == call
    assert turn.mask_reason == "undelivered"


async def test_a_token_without_a_finite_logprob_is_not_trained(stage) -> None:
    """Its behavior probability is not known."""
    script = stage.script("fine")
    script.logprobs = [None] * len(script.ids)
    stage.server.answer = lambda request: script
    episode = await stage.open()
    assert (await ask(stage, episode)).status_code == 200
    assert stage.turns(episode)[0].mask_reason == "behavior_unknown"


async def test_a_conversation_that_fills_the_context_is_refused(make_stage) -> None:
    """The limit is clipped to the room that is left; without room it is a final 400."""
    stage = await make_stage(model={"max_context_tokens": 64})
    stage.says("fine", "fine")
    episode = await stage.open()
    assert (await ask(stage, episode)).status_code == 200
    request = stage.server.requests[0]
    assert request["sampling_params"]["max_new_tokens"] == 64 - len(request["input_ids"])
    body = {"model": "policy", "messages": [{"role": "user", "content": "word " * 80}]}
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    # What LiteLLM and LangChain look for, in the text alone.
    assert "prompt is too long: " in error["message"]
    assert "This model's maximum context length is 64 tokens" in error["message"]
    assert "context_length_exceeded" in error["message"]


@pytest.mark.parametrize("governance", ["enforce", "record"])
@pytest.mark.parametrize("wanted", [None, 1, 40, 90])
def test_default_sampling_equals_asking_for_the_defaults(make_run, governance, wanted) -> None:
    """The sampling in force does not depend on how it was found."""
    sampling = {"temperature": 0.7, "max_new_tokens": 50, "governance": governance}
    settings = make_run(sampling=sampling).settings.sampling
    conversation = (Message("user", "x"),)
    request = TurnRequest(model="m", messages=conversation, max_new_tokens=wanted, stop=("a",))
    asking = structs.replace(request, asked={"temperature": 0.7})
    for room in (1, 45, 60, 1000):
        found = decide(request, None, settings, room=room)
        assert found == decide(asking, None, settings, room=room)
