"""Structured output, forced calls and top logprobs: governed, exact, in every dialect."""

import json

import openai
import pytest
from pydantic import BaseModel

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
RECORD = {"governance_by_parameter": {"tool_choice": "record"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "subtract")
]


async def ask(stage, episode, path="/v1/chat/completions", **fields):
    """One raw request."""
    return await stage.post(path, {**HI, **fields}, episode["api_key"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"response_format": FORMAT}),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "output_format": {"type": "json_schema", "schema": SCHEMA}},
        ),
    ],
)
async def test_a_schema_reaches_the_server_and_its_answer_is_masked(stage, path, fields) -> None:
    """The grammar is the server's; what it forced has no loss, and the turn says so."""
    stage.says('{"n": 1}')
    episode = await stage.open()
    answer = await ask(stage, episode, path, **fields)
    assert answer.status_code == 200
    assert '{\\"n\\": 1}' in answer.text
    (request,) = stage.server.requests
    assert json.loads(request["sampling_params"]["json_schema"]) == SCHEMA
    (turn,) = stage.turns(episode)
    assert (turn.loss_spans, turn.mask_reason) == ((), "behavior_unknown")
    assert turn.sampling.constraint.startswith("json_schema:")


async def test_the_clients_own_parsing_works(stage) -> None:
    """openai's structured output helper gives its caller an object, plain and streamed."""

    class Answer(BaseModel):
        n: int

    stage.says('{"n": 7}', '{"n": 8}')
    client = await stage.client(await stage.open())
    reply = await client.chat.completions.parse(**HI, response_format=Answer)
    assert reply.choices[0].message.parsed == Answer(n=7)
    async with client.chat.completions.stream(**HI, response_format=Answer) as events:
        final = await events.get_final_completion()
    assert final.choices[0].message.parsed == Answer(n=8)


async def test_json_objects_and_free_text(stage) -> None:
    """json_object is any object; text is no constraint and is trained."""
    stage.says('{"a": 1}', "free")
    episode = await stage.open()
    await ask(stage, episode, response_format={"type": "json_object"})
    await ask(stage, episode, response_format={"type": "text"})
    schemas = [request["sampling_params"].get("json_schema") for request in stage.server.requests]
    assert schemas == ['{"type":"object"}', None]
    assert [bool(turn.loss_spans) for turn in stage.turns(episode)] == [False, True]


@pytest.mark.parametrize(
    "form", [{"type": "yaml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}]
)
async def test_a_format_that_cannot_be_is_refused(stage, form) -> None:
    """400 with the parameter's name, and nothing is generated."""
    answer = await ask(stage, await stage.open(), response_format=form)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert not stage.server.requests


async def test_each_parameter_has_its_governance(make_stage) -> None:
    """Ignored, refused or in force by name, whatever holds for the others; evaluation may ask."""
    own = {"response_format": "enforce", "temperature": "reject", "tool_choice": "reject"}
    stage = await make_stage(sampling={"governance_by_parameter": own})
    stage.says("free", '{"n": 1}')
    episode = await stage.open()
    assert (await ask(stage, episode, response_format=FORMAT, top_p=0.5)).status_code == 200
    assert "json_schema" not in stage.server.requests[0]["sampling_params"]
    assert stage.turns(episode)[0].loss_spans
    assert (await ask(stage, episode, temperature=0.5)).status_code == 400
    answer = await ask(stage, episode, tools=TOOLS, tool_choice="required")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    evaluation = await stage.open(purpose="eval", group_id=None)
    await ask(stage, evaluation, response_format=FORMAT)
    assert "json_schema" in stage.server.requests[-1]["sampling_params"]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def begun(stage, request: dict) -> str:
    """What of the answer was in the prompt."""
    return stage.renderer.tokenizer.decode(request["input_ids"]).rpartition("</think>\n\n")[2]


@pytest.mark.parametrize(
    ("choice", "start"),
    [
        ({"type": "function", "function": {"name": "add"}}, '<tool_call>\n{"name": "add", "arg'),
        ("required", '<tool_call>\n{"name":'),
    ],
)
async def test_a_forced_call_is_begun_for_the_policy(make_stage, choice, start) -> None:
    """Its beginning is prompt, the rest is generated and trained; the next turn continues."""
    stage = await make_stage(sampling=RECORD)
    stage.server.answer = lambda request: stage.script(CALL.removeprefix(begun(stage, request)))
    episode = await stage.open()
    client = await stage.client(episode)
    answer = await client.chat.completions.create(**HI, tools=TOOLS, tool_choice=choice)
    reply = answer.choices[0].message
    assert [(c.function.name, c.function.arguments) for c in reply.tool_calls] == [
        ("add", '{"a": 1}')
    ]
    assert begun(stage, stage.server.requests[0]).startswith(start)
    (turn,) = stage.turns(episode)
    assert turn.loss_spans == ((0, len(turn.output_ids)),)
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "2"}
    messages = [*HI["messages"], reply.model_dump(exclude_none=True), result]
    await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    first, second = stage.turns(episode)
    assert (second.parent_turn_id, second.branch_cause) == (first.turn_id, "extension")
    path = [*first.prompt_ids, *first.output_ids, *second.prompt_ids]
    assert path == stage.server.requests[1]["input_ids"]


@pytest.mark.medium
async def test_a_forced_call_is_the_same_for_a_retry_and_in_a_stream(make_stage) -> None:
    """Read again from the record, or shown piece by piece, it is the same call."""
    stage = await make_stage(sampling=RECORD)
    stage.server.answer = lambda request: stage.script(CALL.removeprefix(begun(stage, request)))
    episode = await stage.open()
    body = {"tools": TOOLS, "tool_choice": "required"}
    first = await ask(stage, episode, **body)
    again = await stage.post(
        "/v1/chat/completions",
        {**HI, **body},
        episode["api_key"],
        **{"x-stainless-retry-count": "1"},
    )
    assert first.json()["choices"] == again.json()["choices"]
    client = await stage.client(episode)
    async with client.chat.completions.stream(**HI, **body) as events:
        final = await events.get_final_completion()
    function = final.choices[0].message.tool_calls[0].function
    assert (function.name, function.arguments) == ("add", '{"a": 1}')
    assert final.choices[0].message.content in (None, "")


async def test_a_function_that_is_not_there_is_refused(stage) -> None:
    """400 names the tools; without function tools the choice says nothing."""
    episode = await stage.open()
    choice = {"type": "function", "function": {"name": "divide"}}
    answer = await ask(stage, episode, tools=TOOLS, tool_choice=choice)
    assert answer.status_code == 400
    assert "add, subtract" in answer.json()["error"]["message"]
    stage.says("fine")
    assert (await ask(stage, episode, tool_choice="required")).status_code == 200


async def test_the_most_probable_tokens_are_shown(stage) -> None:
    """As many as asked for, in chat completions, responses and completions, plain and streamed."""
    stage.says(*["ab"] * 4)
    client = await stage.client(await stage.open())
    asked = {"logprobs": True, "top_logprobs": 2}
    answer = await client.chat.completions.create(**HI, **asked)
    shown = answer.choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in shown] == [2] * len(shown)
    assert shown[0].top_logprobs[0].token == shown[0].token
    assert shown[0].top_logprobs[1].logprob == pytest.approx(shown[0].logprob - 1)
    chunks = [c async for c in await client.chat.completions.create(**HI, **asked, stream=True)]
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [len(token.top_logprobs) for token in streamed] == [2] * len(shown)
    reply = await client.responses.create(
        model="policy", input="hi", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    part = reply.output[0].content[0]
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * len(part.logprobs)
    raw = await client.completions.create(model="policy", prompt="hi", logprobs=2)
    assert [len(top) for top in raw.choices[0].logprobs.top_logprobs] == [2] * len(shown)
    assert all("top_logprobs_num" in request for request in stage.server.requests)
    with pytest.raises(openai.BadRequestError, match="logprobs=true"):
        await client.chat.completions.create(**HI, top_logprobs=2)


async def test_a_trace_is_handed_on(stage) -> None:
    """The server gets the client's OpenTelemetry context as it came, or none."""
    stage.says("a", "b", "c", "d")
    episode = await stage.open()
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await stage.post("/v1/chat/completions", HI, episode["api_key"], traceparent=context)
    await ask(stage, episode)
    seen = [headers.get(b"traceparent") for headers in stage.server.headers]
    assert seen == [context.encode(), None]
    both = {"traceparent": context, "tracestate": "a=1,b=2"}
    await stage.post("/v1/chat/completions", HI, episode["api_key"], **both)
    await stage.post("/v1/chat/completions", HI, episode["api_key"], tracestate="a=1")
    seen = [headers.get(b"tracestate") for headers in stage.server.headers]
    assert seen == [None, None, b"a=1,b=2", None]
