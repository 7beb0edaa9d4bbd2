"""What is particular to `/v1/responses`."""

import json
from itertools import groupby

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outloop.router.dialects import responses_request, responses_response
from outloop.router.dialects.base import Message, ToolCall
from outloop.router.errors import Refusal

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
    {"type": "web_search"},
    {"type": "custom", "name": "shell"},
]


def decode(**fields):
    """The turn request in a body of these fields."""
    return responses_request.decode(json.dumps({"model": "policy", **fields}).encode())


async def test_events_come_in_the_order_of_the_api(stage) -> None:
    """Every item is added, filled and done; the numbers of events have no gap."""
    stage.says("<think>\nhm\n</think>\n\nSo: " + CALL)
    client = await stage.client(await stage.open())
    events = [
        event
        async for event in await client.responses.create(
            model="policy", input="go", instructions="Be short.", tools=TOOLS, stream=True
        )
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    part = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    kinds = [kind for kind, _ in groupby(event.type for event in events)]
    assert [kind.removeprefix("response.") for kind in kinds] == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.done", *end),
        *(*part, "output_text.delta", "output_text.done", *end),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    response = events[-1].response
    assert [item.id for item in response.output] == [item.id for item in done]
    assert [item.type for item in done] == ["reasoning", "message", "function_call"]
    assert json.loads(done[2].arguments) == {"x": 1}
    assert response.tools[0].name == "f"
    assert len(response.tools) == 1
    first = stage.renderer.tokenizer.decode(stage.server.requests[0]["input_ids"])
    assert "Be short." in first


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
PLAIN_CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


async def test_a_response_is_gone_on_with_by_its_id(stage) -> None:
    """Only what is new is sent; the turns are one exact branch, and a fork of it is a branch."""
    stage.says(PLAIN_CALL, "four", "five")
    episode = await stage.open()
    client = await stage.client(episode)
    options = {"model": "policy", "tools": [TOOL], "instructions": "Be short."}
    first = await client.responses.create(**options, input="how much?")
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "4"}
    for text in ("four", "five"):
        answer = await client.responses.create(
            **options, input=[output], previous_response_id=first.id
        )
        assert (answer.output_text, answer.previous_response_id) == (text, first.id)
    one, two, three = stage.turns(episode)
    assert [turn.branch_cause for turn in (one, two, three)] == ["root", "extension", "resampled"]
    assert two.parent_turn_id == three.parent_turn_id == one.turn_id
    path = [*one.prompt_ids, *one.output_ids, *two.prompt_ids]
    assert path == stage.server.requests[1]["input_ids"] == stage.server.requests[2]["input_ids"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("instructions", "cause"),
    [("Be short.", "extension"), (None, "extension"), ("Be long.", "system_changed")],
)
async def test_instructions_are_rendered_once(stage, instructions, cause: str) -> None:
    """Going on by id: the same ones, or none, leave the conversation as it is, others stand in the
    place of the earlier ones."""
    stage.says("one", "two")
    episode = await stage.open()
    client = await stage.client(episode)
    first = await client.responses.create(model="policy", input="hi", instructions="Be short.")
    options = {} if instructions is None else {"instructions": instructions}
    await client.responses.create(
        model="policy", input="and?", previous_response_id=first.id, **options
    )
    text = stage.renderer.tokenizer.decode(stage.server.requests[1]["input_ids"])
    assert text.count("<|im_start|>system") == 1
    assert text.startswith(f"<|im_start|>system\n{instructions or 'Be short.'}<|im_end|>")
    assert [turn.branch_cause for turn in stage.turns(episode)] == ["root", cause]


@pytest.mark.medium
async def test_another_router_goes_on_by_ids_alone(make_stage, renderer) -> None:
    """A process that did not serve the conversation continues recorded ids, and then its own."""
    here = await make_stage()
    here.says(PLAIN_CALL)
    episode = await here.open()
    first = await (await here.client(episode)).responses.create(
        model="policy", tools=[TOOL], input="how much?"
    )
    there = await make_stage(beside=here)
    there.buffer.serve(there.server.url)
    there.says("four", "five")
    client = await there.client({**episode, "base_url": f"{there.url}/v1"})
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "4"}
    second = await client.responses.create(
        model="policy", tools=[TOOL], input=[output], previous_response_id=first.id
    )
    await client.responses.create(
        model="policy", tools=[TOOL], input="and now?", previous_response_id=second.id
    )
    turns = here.turns(episode)
    assert [turn.branch_cause for turn in turns] == ["root", "extension", "extension"]
    given = [*turns[0].prompt_ids, *turns[0].output_ids, *turns[1].prompt_ids]
    assert there.server.requests[0]["input_ids"] == given
    assert there.server.requests[1]["input_ids"][: len(given)] == given


async def test_a_cut_answer_is_incomplete(stage) -> None:
    """The limit is the client's, the status says that it was reached."""
    stage.says("One two three")
    script = stage.script("One two")
    script.ids, script.finish = script.ids[:-1], {"type": "length"}
    stage.server.answer = lambda request: script
    client = await stage.client(await stage.open())
    answer = await client.responses.create(
        model="policy",
        input="count",
        max_output_tokens=len(script.ids),
        include=["message.output_text.logprobs"],
    )
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert stage.server.requests[0]["sampling_params"]["max_new_tokens"] == len(script.ids)
    assert len(answer.output[0].content[0].logprobs) == len(script.ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"input": 5}, "input"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(stage, fields: dict, param: str) -> None:
    """OpenAI's envelope with the parameter, and nothing is generated."""
    client = await stage.client(await stage.open())
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post(
            "/responses", body={"model": "policy", "input": "hi", **fields}, cast_to=object
        )
    assert caught.value.param == param
    assert not stage.server.requests


@pytest.mark.medium
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user", "developer", "assistant", "tools"]),
            st.text(max_size=5),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_items_become_the_messages_they_tell(said) -> None:
    """Reasoning, text and calls of one answer are one message; outputs follow their calls."""
    items, expected = [], []
    for index, (kind, text, num_calls) in enumerate(said):
        if kind != "tools":
            items.append({"role": kind, "content": [{"type": "input_text", "text": text}]})
            role = {"developer": "system"}.get(kind, kind)
            expected.append(Message(role, text))
            continue
        ids = [f"call_{index}_{number}" for number in range(num_calls)]
        items.append({"type": "reasoning", "summary": [], "content": [{"text": "hm"}]})
        items.append({"type": "message", "role": "assistant", "content": text})
        items += (
            {"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i in ids
        )
        items += ({"type": "function_call_output", "call_id": i, "output": text} for i in ids)
        calls = tuple(ToolCall(i, "f", "{}") for i in ids)
        expected.append(Message("assistant", text, "hm", calls))
        expected += (Message("tool", text, tool_call_id=i) for i in ids)
    assert decode(input=items).messages == tuple(expected)


def test_a_failure_in_a_stream_is_an_event() -> None:
    """The SDK raises on an event of type error."""
    event = responses_response.ERRORS.event(Refusal(400, "gone", "it is gone"))
    assert event.startswith(b"event: error\ndata: ")
    assert json.loads(event.partition(b"data: ")[2])["message"] == "it is gone"


def reference(item) -> dict:
    """An item of an answer by its id alone, as Vercel's AI SDK sends it back."""
    return {"type": "item_reference", "id": item.id}


async def play_by_reference(first, second, *, names_call: bool = False):
    """A tool loop whose second request names the items of the first answer; both answers."""
    asked = [{"role": "user", "content": "go"}]
    answer = await first.responses.create(model="policy", input=asked, tools=TOOLS)
    *said, call = answer.output
    again = call.model_dump(include={"type", "call_id", "name", "arguments"})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "84"}
    handed_back = [*map(reference, said), reference(call) if names_call else again, output]
    return answer, await second.responses.create(
        model="policy", input=[*asked, *handed_back], tools=TOOLS
    )


@pytest.mark.medium
@pytest.mark.parametrize("names_call", [False, True])
@pytest.mark.parametrize("has_other_router", [False, True])
async def test_items_named_by_id_are_those_of_the_answer(
    make_stage, stage, has_other_router: bool, names_call: bool
) -> None:
    """What a request names is what was answered, by whichever router."""
    stage.says("<think>\nhm\n</think>\n\nSo:\n" + CALL, "84")
    episode = await stage.open()
    first = second = await stage.client(episode)
    if has_other_router:
        # It has the same server.
        other = await make_stage(beside=stage)
        second = first.with_options(base_url=f"{other.url}/v1")
    answer, last = await play_by_reference(first, second, names_call=names_call)
    assert last.output_text == "84"
    one, two = stage.turns(episode)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    given = stage.renderer.tokenizer.decode(stage.server.requests[-1]["input_ids"])
    assert given.count("hm") == given.count("So:\n" + CALL) == given.count("84") == 1
    # Another router knows the first turn's ids only, and this format renders them otherwise.
    cause = "history_unknown" if has_other_router else "extension"
    assert [turn.branch_cause for turn in (one, two)] == ["root", cause]


@pytest.mark.medium
@pytest.mark.parametrize(
    "item_id", ["rs_000000000000000000000000", "msg_x", "nonsense", "fc_%s_7", ""]
)
async def test_an_item_that_is_not_of_the_episode_is_refused(stage, item_id: str) -> None:
    """Final, with the name of the item; the turn of another episode is not found either."""
    stage.says("one")
    client = await stage.client(await stage.open())
    answer = await client.responses.create(model="policy", input="go")
    turn_id = answer.id.removeprefix("resp_")
    other = await stage.client(await stage.open())
    item = {"type": "item_reference", "id": item_id % turn_id if "%" in item_id else item_id}
    for asking, named in ((client, item), (other, reference(answer.output[0]))):
        with pytest.raises(openai.BadRequestError) as refused:
            await asking.responses.create(
                model="policy", input=[named, {"role": "user", "content": "go on"}]
            )
        assert refused.value.code == "item_not_found"
        assert refused.value.param == "input[0].id"
        assert repr(named["id"]) in refused.value.message
