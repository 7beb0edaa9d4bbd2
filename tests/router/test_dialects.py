"""Every dialect through its real client: one core behind all of them."""

import asyncio
import json
import random

import anthropic
import openai
import pytest

from fakes.fake_server import Script
from fakes.talkers import Meeting
from outloop.router.timings import Timings

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call>'
TWO_CALLS = (
    'both <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"z": null}}\n</tool_call>'
)
OUTPUTS = (
    CALL.replace("calculator", "f"),
    TWO_CALLS,
    '<tool_call>\n{"name":"f","arguments":{"x":1e3, "y": "\\u00e9"}}\n</tool_call>',
    "Let me see.\n<tool_call>\n{'name': broken}\n</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 30 + "}}</tool_call>",
    "  padded text \n",
    "caf\u00e9 \u4e2d\u6587 \U0001f600",
    "<think>\nhm\n</think>\n\nfine",
    "<think>\nhm\n</think>\n\n" + TWO_CALLS,
    "",
)
each_dialect = pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
plain_and_streamed = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def meet(stage):
    """Conversations of a dialect over the stage."""

    def begin(dialect: str, on=stage) -> Meeting:
        meeting = Meeting(dialect, on.url)
        on.stack.push_async_callback(meeting.close)
        return meeting

    return begin


def path_of(turn, turns) -> list[int]:
    """Ids from the root to the end of a turn."""
    by_id, ids = {t.turn_id: t for t in turns}, []
    while turn is not None:
        ids = [*turn.prompt_ids, *turn.output_ids, *ids]
        turn = by_id.get(turn.parent_turn_id)
    return ids


@pytest.mark.medium
@each_dialect
@plain_and_streamed
async def test_a_tool_loop_is_one_branch_in_every_dialect(stage, meet, dialect, stream) -> None:
    """Recorded ids, concatenated, are what the server was given and generated."""
    stage.says("I compute.\n" + CALL, CALL, "The answer is 84.")
    episode = await stage.open()
    talker = meet(dialect).begin(episode)
    talker.tell("What is 12 * 7?")
    for _ in range(2):
        said = await talker.ask(stream=stream)
        assert said.plain_calls == [("calculator", {"expression": "12 * 7"})]
        talker.hand_back(said)
        talker.hand_results([(said.calls[0][0], "84")])
    said = await talker.ask(stream=stream)
    assert said.text == "The answer is 84."
    turns = stage.turns(episode)
    assert [turn.branch_cause for turn in turns] == ["root", "extension", "extension"]
    assert [turn.finish_reason for turn in turns] == ["tool_calls", "tool_calls", "stop"]
    for turn, request in zip(turns, stage.server.requests, strict=True):
        assert path_of(turn, turns) == [*request["input_ids"], *turn.output_ids]
        assert turn.loss_spans == ((0, len(turn.output_ids)),)


@pytest.mark.medium
@each_dialect
async def test_ids_stay_exact_in_every_dialect(stage, meet, dialect) -> None:
    """Whatever the policy writes, the answer handed back continues its branch."""
    rng = random.Random(3)
    meeting, stop = meet(dialect), stage.renderer.stop_ids[0]
    for _ in range(8):
        episode = await stage.open()
        talker = meeting.begin(episode, ("f", "g"))
        talker.tell("go")
        num_asked = rng.randrange(2, 6)
        for _ in range(num_asked):
            ids = stage.renderer.tokenizer.encode(rng.choice(OUTPUTS))
            if rng.random() < 0.3:
                ids = [rng.randrange(256) for _ in range(rng.randrange(12))]
            script = Script(ids=[*ids, stop], finish={"type": "stop", "matched": stop})
            stage.server.answer = lambda request, script=script: script
            stage.server.chunk = rng.choice((1, 3))
            said = await talker.ask(stream=rng.random() < 0.5)
            talker.hand_back(said)
            if said.calls:
                talker.hand_results([(call_id, "4") for call_id, *_ in said.calls])
            else:
                talker.tell("more")
        turns = stage.turns(episode)
        assert len(turns) == num_asked
        seen = {r["rid"].rpartition("-")[0]: r["input_ids"] for r in stage.server.requests}
        for turn in turns:
            path = path_of(turn, turns)
            assert path[: len(path) - len(turn.output_ids)] == seen[turn.turn_id]
        assert [turn.branch_cause for turn in turns] == ["root", *["extension"] * (num_asked - 1)]


@pytest.mark.medium
@each_dialect
@plain_and_streamed
async def test_a_retry_gets_the_recorded_turn_in_every_dialect(
    stage, meet, dialect, stream
) -> None:
    """The same turn, not a second sample, also from a router that has forgotten it."""
    stage.says("first", "second")
    episode = await stage.open()
    talker = meet(dialect).begin(episode)
    talker.tell("go")
    assert (await talker.ask(stream=stream)).text == "first"
    retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
    assert (await talker.ask(stream=stream, **retry)).text == "first"
    stage.app.state.parts.episodes.known(episode["episode_id"]).turns.clear()
    assert (await talker.ask(stream=stream, **retry)).text == "first"
    assert (await talker.ask(stream=stream)).text == "second"
    assert len(stage.turns(episode)) == 2


@pytest.mark.medium
@each_dialect
async def test_the_run_governs_every_dialect(make_stage, meet, dialect) -> None:
    """The run's sampling is in force whatever the dialect; budgets are refused for good."""
    stage = await make_stage(sampling={"temperature": 0.8}, router={"max_turns_per_episode": 1})
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open()
    talker = meet(dialect, stage).begin(episode)
    talker.tell("go")
    await talker.ask(stream=False, extra_body={"temperature": 0.1, "top_p": 0.5})
    sampling = stage.turns(episode)[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.8, 1.0)
    with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)) as caught:
        await talker.ask(stream=True)
    assert "max_turns_per_episode=1" in str(caught.value)
    assert len(stage.server.requests) == 1


@each_dialect
async def test_eval_episodes_are_never_trained_in_any_dialect(stage, meet, dialect) -> None:
    """Purpose decides, not the door."""
    stage.says("fine")
    episode = await stage.open(purpose="eval", group_id=None, sampling={"temperature": 0.0})
    talker = meet(dialect).begin(episode)
    talker.tell("go")
    await talker.ask(stream=False)
    turn = stage.turns(episode)[0]
    assert (turn.loss_spans, turn.sampling.temperature) == ((), 0.0)


@each_dialect
async def test_reasoning_is_streamed_while_it_is_generated(stage, meet, dialect) -> None:
    """The client reads thoughts before the answer is generated, and has all of them in the end."""
    stage.server.step_gate, stage.server.chunk = asyncio.Event(), 6
    thought = "First this, then that."
    stage.says(f"<think>\n{thought}\n</think>\n\nfine")
    episode = await stage.open()
    talker = meet(dialect).begin(episode)
    talker.tell("go")
    options = {**talker.options, "stream": True}
    if dialect == "messages":
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    shown = {
        "chat": lambda e: e["choices"][0]["delta"].get("reasoning_content", ""),
        "responses": lambda e: e["delta"] if e["type"] == "response.reasoning_text.delta" else "",
        "messages": lambda e: e.get("delta", {}).get("thinking", ""),
    }[dialect]
    headers = {"Authorization": f"Bearer {episode['api_key']}"}
    thoughts = []
    async with stage.http.stream("POST", talker.path, json=options, headers=headers) as answer:
        async for line in answer.aiter_lines():
            piece = shown(json.loads(line[6:])) if line.startswith("data: {") else ""
            if piece and not thoughts:
                assert not stage.turns(episode)
                stage.server.step_gate.set()
            thoughts += [piece] if piece else []
    assert "".join(thoughts) == thought
    assert len(thoughts) > 1


@pytest.mark.medium
@each_dialect
async def test_a_silent_stream_sends_comments_which_clients_pass_over(
    make_stage, meet, dialect
) -> None:
    """A server says nothing in the middle of an answer, as one whose memory a trainer has."""
    stage = await make_stage(timings=Timings(stream_silence_s=0.02))
    gate = stage.server.step_gate = asyncio.Event()
    stage.server.answer = lambda request: stage.script("Hello there, this is long.")
    episode = await stage.open()
    talker = meet(dialect, stage).begin(episode)
    talker.tell("go")
    headers, body = {"Authorization": f"Bearer {episode['api_key']}"}, ""
    options = {**talker.options, "stream": True}
    async with stage.http.stream("POST", talker.path, json=options, headers=headers) as answer:
        async for text in answer.aiter_text():
            body += text
            if body.count(": waiting\n\n") >= 2:
                gate.set()
    assert gate.is_set()
    # They stand between events, and never before the first.
    assert body.index("data: ") < body.index(": waiting")
    assert all(part.startswith((":", "data", "event")) for part in body.split("\n\n")[:-1])
    gate.clear()
    asyncio.get_running_loop().call_later(0.2, gate.set)
    assert (await talker.ask(stream=True)).text == "Hello there, this is long."


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_find_the_turn_of_an_answer_in_its_headers(stage, stream: bool) -> None:
    """As the request id that both SDKs show."""
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open()
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    for path, name in (("/v1/chat/completions", "x-request-id"), ("/v1/messages", "request-id")):
        answer = await stage.post(path, {**body, "stream": stream}, episode["api_key"])
        assert answer.headers[name] == stage.turns(episode)[-1].turn_id
