"""What is particular to `/v1/messages`."""

import asyncio
import json
from itertools import groupby

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outloop.router.dialects import messages_request, messages_response
from outloop.router.dialects.base import Message, ToolCall
from outloop.router.errors import Refusal

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [
    {"name": "f", "description": "F.", "input_schema": {"type": "object"}},
    {"type": "web_search_20250305", "name": "web_search"},
]
HI = {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def client(stage):
    """The unmodified Anthropic client of an episode, and the episode."""
    episode = await stage.open()
    client = anthropic.AsyncAnthropic(
        base_url=episode["base_url"].removesuffix("/v1"), api_key=episode["api_key"]
    )
    stage.stack.push_async_callback(client.close)
    client.episode = episode
    return client


def decode(*messages, **fields):
    """The turn request in a body of these messages."""
    body = {"model": "policy", "max_tokens": 5, "messages": messages, **fields}
    return messages_request.decode(json.dumps(body).encode())


async def test_events_come_in_the_order_of_the_api(stage, client) -> None:
    """One block after the other, each begun, filled and stopped."""
    stage.says("<think>\nhm\n</think>\n\nSo: " + CALL)
    events = [
        event
        async for event in await client.messages.create(
            **HI, tools=TOOLS, stream=True, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    ]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for kind, _ in groupby(event.type for event in events)] == [
        "message_start",
        *block * 3,
        "message_delta",
        "message_stop",
    ]
    assert [e.content_block.type for e in events if e.type == "content_block_start"] == [
        "thinking",
        "text",
        "tool_use",
    ]
    assert [e.index for e in events if e.type == "content_block_stop"] == [0, 1, 2]
    turn = stage.turns(client.episode)[0]
    assert events[0].message.usage.input_tokens == len(turn.prompt_ids)
    assert events[-2].usage.output_tokens == len(turn.output_ids)
    assert events[-2].delta.stop_reason == "tool_use"


async def test_text_comes_before_generation_ends(stage, client) -> None:
    """Streaming is real."""
    stage.server.step_gate = asyncio.Event()
    stage.says("Hello there, this is long.")
    async with client.messages.stream(**HI) as stream:
        shown = ""
        async for text in stream.text_stream:
            shown += text
            # The server waits for us after its first piece: nothing can be over yet.
            assert stage.server.step_gate.is_set() or not stage.turns(client.episode)
            stage.server.step_gate.set()
    assert shown == "Hello there, this is long."


async def test_why_an_answer_ended_is_given_in_anthropics_words(stage, client) -> None:
    """end_turn, stop_sequence with the sequence, max_tokens; thinking only when asked for."""
    stage.says("<think>\nhm\n</think>\n\nfine")
    answer = await client.messages.create(**HI)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason == "end_turn"
    script = stage.script("The sum\nObservation: 4")
    script.finish = {"type": "stop", "matched": "Observation:"}
    stage.server.answer = lambda request: script
    answer = await client.messages.create(**HI, stop_sequences=["Observation:"])
    assert (answer.content[0].text, answer.stop_sequence) == ("The sum", "Observation:")
    assert answer.stop_reason == "stop_sequence"
    script.finish = {"type": "length"}
    assert (await client.messages.create(**HI)).stop_reason == "max_tokens"
    assert stage.server.requests[0]["sampling_params"]["max_new_tokens"] == 64


@pytest.mark.medium
async def test_every_way_to_the_same_episode(stage, client) -> None:
    """Key as x-api-key or bearer, base URL with /v1 or without, by key or by path."""
    stage.server.answer = lambda request: stage.script("fine")
    episode, urls = client.episode, [stage.url, f"{stage.url}/v1", ""]
    urls[2] = f"{stage.url}/episodes/{episode['episode_id']}"
    for key in ({"api_key": episode["api_key"]}, {"auth_token": episode["api_key"]}):
        for url in urls:
            async with anthropic.AsyncAnthropic(base_url=url, **key) as one:
                assert (await one.messages.create(**HI)).content[0].text == "fine"
    assert len(stage.turns(episode)) == 6


async def test_refusals_come_in_anthropics_envelope(stage, client) -> None:
    """The SDK raises its own errors, does not retry what is final, and names what was wrong."""
    body = {"model": "policy", "messages": HI["messages"]}
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        await client.post("/v1/messages", body=body, cast_to=object)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        await client.messages.create(**{**HI, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="ol-ep-none-x").messages.create(**HI)
    await stage.post(
        f"/episodes/{client.episode['episode_id']}/close", {"outcome": "completed", "key": "k"}
    )
    with pytest.raises(anthropic.APIStatusError) as closed:
        await client.messages.create(**HI)
    assert closed.value.status_code == 404
    assert not stage.server.requests
    event = messages_response.ERRORS.event(Refusal(503, "full", "wait", retry_after_s=1.0))
    assert event.startswith(b"event: error\ndata: ")
    assert json.loads(event.partition(b"data: ")[2])["error"]["type"] == "overloaded_error"


async def test_tokens_are_counted_as_the_server_would_see_them(stage, client) -> None:
    """The count is that of the turn's prompt; nothing is generated or recorded for it."""
    stage.says("fine")
    asked = {"model": "policy", "messages": HI["messages"], "system": "Be short.", "tools": TOOLS}
    counted = await client.messages.count_tokens(**asked)
    assert not stage.server.requests
    await client.messages.create(**asked, max_tokens=5)
    assert counted.input_tokens == len(stage.turns(client.episode)[0].prompt_ids)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"temperature": -1}, "temperature"),
        ({"system": 5}, "system"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict, named: str) -> None:
    """400 and the parameter."""
    with pytest.raises(Refusal) as caught:
        messages_request.decode(json.dumps({**HI, **fields}).encode())
    assert (caught.value.status, caught.value.param) == (400, named)


def test_choices_of_tools_are_distinguished() -> None:
    """Any tool, one by name, none: each becomes the turn's own word for it."""
    choices = [
        decode(*HI["messages"], tool_choice=choice)
        for choice in (
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "f"},
            {"type": "none"},
        )
    ]
    assert [one.tool_choice for one in choices] == ["required", "function:f", "none"]
    assert [one.parallel_tool_calls for one in choices] == [False, True, True]


@given(
    st.lists(
        st.tuples(st.sampled_from(["text", "tool_use", "tool_result"]), st.text(max_size=5)),
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_blocks_become_the_messages_they_tell(blocks) -> None:
    """Results and texts keep their order, an answer is one message, nothing is lost."""
    results = [
        {"type": "tool_result", "tool_use_id": text, "content": [{"type": "text", "text": text}]}
        if kind == "tool_result"
        else {"type": "text", "text": text}
        for kind, text in blocks
    ]
    reply = [
        {"type": "tool_use", "id": text, "name": "f", "input": {"x": text}}
        if kind == "tool_use"
        else {"type": "thinking", "thinking": text, "signature": ""}
        if kind == "tool_result"
        else {"type": "text", "text": text}
        for kind, text in blocks
    ]
    messages = decode(
        {"role": "user", "content": results},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "go on"},
        system=[{"type": "text", "text": "s"}, {"type": "text", "text": "t"}],
    ).messages
    assert messages[0] == Message("system", "s\nt")
    expected: list[Message] = []
    for kind, text in blocks:
        if kind == "tool_result":
            expected.append(Message("tool", text, tool_call_id=text))
        elif expected and expected[-1].role == "user":
            expected[-1] = Message("user", f"{expected[-1].text}\n{text}")
        else:
            expected.append(Message("user", text))
    assert list(messages[1:-2]) == (expected or [Message("user", "")])
    by_kind = {kind: [t for k, t in blocks if k == kind] for kind, _ in blocks}
    answer = messages[-2]
    assert answer.text == "".join(by_kind.get("text", ()))
    assert answer.reasoning == "".join(by_kind.get("tool_result", ()))
    calls = [(call.id, json.loads(call.arguments)) for call in answer.tool_calls]
    assert calls == [(text, {"x": text}) for text in by_kind.get("tool_use", ())]
    assert all(isinstance(call, ToolCall) for call in answer.tool_calls)


@pytest.mark.medium
async def test_an_sdk_tool_runner_plays_one_exact_branch(stage, client) -> None:
    """It threads by default; refused as it expects, it sends its whole history instead."""

    @anthropic.beta_async_tool
    async def f(x: int) -> str:
        """F.

        Args:
            x: a number
        """
        return "84"

    stage.says(CALL, "The answer is 84.")
    runner = client.beta.messages.tool_runner(**HI, tools=[f])
    message = await runner.until_done()
    assert message.content[-1].text == "The answer is 84."
    assert [turn.branch_cause for turn in stage.turns(client.episode)] == ["root", "extension"]


@pytest.mark.parametrize(
    "state",
    [
        {"thread": {"type": "create"}},
        {"thread": {"type": "continue", "previous_message_id": "msg_x"}},
        {"container": "container_x"},
    ],
)
async def test_state_that_is_stored_elsewhere_is_refused(stage, client, state) -> None:
    """Without it the policy would see a part of the conversation and nothing would say so."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**HI, extra_body=state)
    (name,) = state
    error = refused.value.body["error"]
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert not stage.turns(client.episode)
    if name == "thread":
        expected = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert error["details"] == expected


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ([BILLING, "You are Claude Code."], "You are Claude Code."),
        ([f"{BILLING}\nYou are Claude Code."], "You are Claude Code."),
        (["You are Claude Code.", BILLING], "You are Claude Code."),
        ([BILLING], None),
        (BILLING, None),
        (f"{BILLING}\nYou are Claude Code.", "You are Claude Code."),
        (["Say x-anthropic-billing-header: no.", ""], "Say x-anthropic-billing-header: no.\n"),
    ],
)
def test_what_claude_code_tells_anthropic_is_no_part_of_the_prompt(system, text) -> None:
    """The line differs in each request."""
    blocks = (
        [{"type": "text", "text": one} for one in system] if isinstance(system, list) else system
    )
    decoded = decode({"role": "user", "content": "hi"}, system=blocks)
    expected = [] if text is None else [Message("system", text)]
    assert list(decoded.messages) == [*expected, Message("user", "hi")]
    count = {"model": "policy", "system": blocks, "messages": HI["messages"]}
    counted = messages_request.decode_count(json.dumps(count).encode())
    assert counted.messages == decoded.messages


async def test_claude_codes_turns_stay_one_branch(stage, client) -> None:
    """Though the line before its prompt is another one each time."""
    messages = []
    for number in range(3):
        messages.append({"role": "user", "content": "go on"})
        stage.says("fine")
        system = [BILLING.replace("36ee5", str(number)), "You are Claude Code."]
        answer = await client.messages.create(
            model="policy",
            max_tokens=64,
            messages=messages,
            system=[{"type": "text", "text": text} for text in system],
        )
        messages.append({"role": "assistant", "content": answer.content})
    causes = [turn.branch_cause for turn in stage.turns(client.episode)]
    assert causes == ["root", "extension", "extension"]
