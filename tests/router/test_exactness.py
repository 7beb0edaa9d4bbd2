"""Token exactness over conversations with a policy that writes anything."""

import json
import random

import pytest

from fakes.fake_server import Script

CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    '<tool_call>\n{"name":"f","arguments":{"x":1e3, "y": "\\u00e9"}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>',
    "Let me see.\n<tool_call>\n{'name': broken}\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": ' + "[" * 3000 + "</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {}}',
    CALL2 := (
        'two <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"z": null}}\n</tool_call>'
    ),
    "  padded text \n",
    "caf\u00e9 \u4e2d\u6587 \U0001f600",
    "<think>\nhm\n</think>\n\nfine",
    "<think>\nnever closed",
    "",
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
]


def wild_output(rng: random.Random, stage) -> Script:
    """A scripted, a random or a cut-off output."""
    stop = stage.renderer.stop_ids[0]
    kind = rng.randrange(4)
    if kind < 2:
        ids = stage.renderer.tokenizer.encode(rng.choice(CALLS))
    else:
        ids = [rng.randrange(256) for _ in range(rng.randrange(0, 12))]
    if kind == 3 and ids:
        return Script(ids=ids, finish={"type": "length"})
    return Script(ids=[*ids, stop], finish={"type": "stop", "matched": stop})


async def ask(client, messages, *, stream: bool):
    """One turn; returns the message as the client has it."""
    options = {"model": "policy", "messages": messages, "tools": TOOLS}
    if not stream:
        answer = await client.chat.completions.create(**options)
        return answer.choices[0].message, answer.choices[0].finish_reason
    text, calls, finish = "", {}, None
    async for chunk in await client.chat.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            call = calls.setdefault(piece.index, piece)
            if call is not piece:
                call.function.arguments += piece.function.arguments
        finish = choice.finish_reason or finish
    from openai.types.chat import ChatCompletionMessage

    return (
        ChatCompletionMessage.model_validate(
            {
                "role": "assistant",
                "content": text or None,
                "tool_calls": [c.model_dump(exclude={"index"}) for c in calls.values()] or None,
            }
        ),
        finish,
    )


@pytest.mark.medium
@pytest.mark.parametrize("cumulative", [True, False])
async def test_whatever_the_policy_writes_ids_stay_exact(make_stage, cumulative: bool) -> None:
    """Every request's ids are the path of its turn, plain and streamed give the same message."""
    rng = random.Random(1)
    stage = await make_stage(model={"max_context_tokens": 100_000})
    stage.server.is_cumulative = cumulative
    num_turns = num_roots = 0
    shared = await stage.client(await stage.open())
    for _ in range(14):
        episode = await stage.open()
        client = shared.with_options(base_url=episode["base_url"], api_key=episode["api_key"])
        messages = [{"role": "user", "content": "go"}]
        for _ in range(rng.randrange(1, 5)):
            script = wild_output(rng, stage)
            stage.server.answer = lambda request, script=script: script
            stage.server.chunk = max(rng.choice((1, 2, 5)), len(script.ids) // 16)
            plain, _ = await ask(client, messages, stream=False)
            streamed, _ = await ask(client, messages, stream=True)
            functions = [c.function for c in streamed.tool_calls or []]
            if functions == [c.function for c in plain.tool_calls or []]:
                assert streamed.content == (plain.content or None)
            else:
                # A call that broke after it was shown cannot be text any more.
                assert len(functions) == len(plain.tool_calls or []) + 1
                assert "<tool_call>" in plain.content
            messages.append(rng.choice((plain, streamed)).model_dump(exclude_none=True))
            for call in plain.tool_calls or []:
                json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "4"})
            if not plain.tool_calls:
                messages.append({"role": "user", "content": "more"})
            # The one whose call ids were echoed is continued; both are exact.
            if plain.tool_calls and messages[-2].get("tool_calls"):
                ids = {c["id"] for c in messages[-2]["tool_calls"]}
                messages[-1]["tool_call_id"] = next(iter(ids))
        turns = stage.turns(episode)
        by_id = {turn.turn_id: turn for turn in turns}
        seen = {r["rid"].rpartition("-")[0]: r["input_ids"] for r in stage.server.requests}
        for turn in turns:
            path, step = [], turn
            while step is not None:
                path = [*step.prompt_ids, *step.output_ids, *path]
                step = by_id.get(step.parent_turn_id)
            assert path[: len(path) - len(turn.output_ids)] == seen[turn.turn_id]
        num_turns += len(turns)
        num_roots += sum(turn.parent_turn_id is None for turn in turns)
    assert num_turns > 40
    # Two samples of the first request each; more roots only where reasoning was left open.
    assert num_roots <= 28 + num_turns // 8
