"""Chat completions through the real client, plain and streamed."""

import json

import openai
import pytest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call>'


async def play_calculator(stage, client, *, stream=False):
    """An ordinary agent: calls the tool and answers; returns its messages."""
    messages = [{"role": "user", "content": "What is 12 * 7?"}]
    while True:
        if stream:
            async with client.chat.completions.stream(
                model="policy", messages=messages, tools=TOOLS
            ) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS
            )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return messages
        for call in message.tool_calls:
            assert json.loads(call.function.arguments) == {"expression": "12 * 7"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "84"})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_is_one_exact_branch(stage, stream: bool) -> None:
    """Recorded ids, concatenated, are what the server was given and generated."""
    stage.says(CALL, "The answer is 84.")
    episode = await stage.open()
    client = await stage.client(episode)
    messages = await play_calculator(stage, client, stream=stream)
    assert messages[-1]["content"] == "The answer is 84."
    first, second = stage.turns(episode)
    seen = [request["input_ids"] for request in stage.server.requests]
    assert first.prompt_ids.tolist() == seen[0]
    path = [*first.prompt_ids, *first.output_ids, *second.prompt_ids]
    assert path == seen[1]
    assert second.parent_turn_id == first.turn_id
    assert [turn.branch_cause for turn in (first, second)] == ["root", "extension"]
    assert first.loss_spans == ((0, len(first.output_ids)),)
    assert first.finish_reason == "tool_calls"
    assert second.finish_reason == "stop"
    assert first.sampling.temperature == 1.0


async def test_an_answer_is_a_standard_completion(stage) -> None:
    """Ids, usage and finish reason are where every client looks for them."""
    stage.says("The answer is 84.")
    episode = await stage.open()
    client = await stage.client(episode)
    answer = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hi"}], logprobs=True
    )
    turn = stage.turns(episode)[0]
    assert answer.usage.prompt_tokens == len(turn.prompt_ids)
    assert answer.usage.completion_tokens == len(turn.output_ids)
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content) == len(turn.output_ids)
    models = await client.models.list()
    assert [model.id for model in models.data] == ["policy"]


async def test_an_unknown_model_is_refused(stage) -> None:
    """Names resolve by a table; a judge's name must not become training data."""
    episode = await stage.open()
    client = await stage.client(episode)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(
            model="judge", messages=[{"role": "user", "content": "hi"}]
        )
    assert caught.value.code == "model_not_found"
    assert not stage.server.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_who_asks_for_token_ids_is_given_those_of_the_record(stage, stream: bool) -> None:
    """What the server was given and sampled, through all turns of a branch; no other answer has."""
    episode = await stage.open()
    client = await stage.client(episode)
    messages = [{"role": "user", "content": "go"}]
    for number in range(3):
        stage.says(*["fine"] * (2 if number == 2 else 1))
        answer = await client.chat.completions.create(
            model="policy",
            messages=messages,
            stream=stream,
            n=2 if number == 2 else 1,
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]
        given = [c.prompt_token_ids for c in chunks if "prompt_token_ids" in c.model_extra]
        sampled = {
            choice.index: choice.token_ids
            for chunk in chunks
            for choice in chunk.choices
            if "token_ids" in choice.model_extra
        }
        assert given[0] == given[-1] == stage.server.requests[-1]["input_ids"]
        recorded = [turn.output_ids.tolist() for turn in stage.turns(episode)[number:]]
        assert [sampled[index] for index in sorted(sampled)] == recorded
        messages += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "on"}]
    stage.says("fine")
    body = {"model": "policy", "messages": messages}
    plain = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert "token_ids" not in plain.text
