"""SFT conversations are rendered as if they had been played."""

import json
import random

import pytest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEXTS = ("fine", "The answer is 84.", "two\nlines", "", "4", "caf\u00e9 \U0001f600")


def conversation(rng: random.Random) -> list[dict]:
    """A conversation with tool calls, ending with the assistant."""
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": "Be brief."})
    messages.append({"role": "user", "content": rng.choice(TEXTS[:3])})
    for turn in range(rng.randrange(3)):
        num_calls = rng.randrange(3)
        calls = [
            {
                "id": f"c{turn}{number}",
                "type": "function",
                "function": {"name": "f", "arguments": json.dumps({"x": rng.random()})},
            }
            for number in range(num_calls)
        ]
        content = rng.choice(TEXTS) if calls else rng.choice(TEXTS[:3])
        messages.append({"role": "assistant", "content": content or None, "tool_calls": calls})
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "84"})
        if not calls:
            messages.append({"role": "user", "content": rng.choice(TEXTS[:3])})
    messages.append({"role": "assistant", "content": rng.choice(TEXTS)})
    return [{k: v for k, v in m.items() if v != []} for m in messages]


@pytest.mark.medium
async def test_rendered_equals_played(stage) -> None:
    """Prompt and output ids of every turn are those of an agent that plays the conversation."""
    rng = random.Random(3)
    rows = [conversation(rng) for _ in range(25)]
    answer = await stage.post(
        "/trajectories",
        {
            "trajectories": [{"messages": row, "tools": [TOOL]} for row in rows],
            "key": "k",
            "final": True,
        },
    )
    assert answer.json() == {"num_accepted": 25, "results": []}, answer.text
    assert stage.buffer.reader.sft_progress() == (25, True)
    for row, trajectory in zip(rows, stage.buffer.reader.sft_trajectories(), strict=True):
        assert trajectory.episode.purpose == "sft"
        assert len(trajectory.branches()) == 1
        await compare_with_play(stage, row, trajectory.turns)


async def compare_with_play(stage, row, rendered) -> None:
    """Play `row` with a policy that generates the rendered outputs."""
    from fakes.fake_server import Script

    outputs = iter(rendered)

    def answer(request) -> Script:
        ids = next(outputs).output_ids.tolist()
        return Script(ids=ids, finish={"type": "stop", "matched": ids[-1]})

    stage.server.answer = answer
    episode = await stage.open()
    messages, names = [], {}
    for message in row:
        if message["role"] == "tool":
            message = {**message, "tool_call_id": names[message["tool_call_id"]]}
        if message["role"] != "assistant":
            messages.append(message)
            continue
        body = {"model": "policy", "messages": messages, "tools": [TOOL]}
        answered = await stage.post("/v1/chat/completions", body, episode["api_key"])
        reply = answered.json()["choices"][0]["message"]
        assert (reply["content"] or "") == (message["content"] or "")
        for ours, theirs in zip(
            reply.get("tool_calls", []), message.get("tool_calls", []), strict=True
        ):
            assert ours["function"]["arguments"] == theirs["function"]["arguments"]
            names[theirs["id"]] = ours["id"]
        messages.append(reply)
    played = stage.turns(episode)
    assert len(played) == len(rendered)
    for one, other in zip(played, rendered, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.output_ids.tolist() == other.output_ids.tolist()
        assert (one.parent_turn_id is None) == (other.parent_turn_id is None)
        assert other.behavior_logprobs is None
        assert other.loss_spans == ((0, len(other.output_ids)),)


@pytest.mark.parametrize(
    ("row", "needle"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "no message is by the assistant"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "a message before it is needed"),
        ({"messages": "hi"}, "Expected `array`"),
        (
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "x", "reasoning_content": "hm"},
                ]
            },
            "cannot be an answer of the policy",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "<tool_call>broken"},
                    {"role": "user", "content": "word " * 5000},
                    {"role": "assistant", "content": "x"},
                ]
            },
            "model.max_context_tokens",
        ),
    ],
)
async def test_a_conversation_that_cannot_be_learnt_is_named(stage, row, needle: str) -> None:
    """The row, the value and what is wrong; nothing of the batch is stored."""
    fine = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    answer = await stage.post(
        "/trajectories", {"trajectories": [fine, row], "key": "k", "final": False}
    )
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("trajectories[1]")
    assert needle in message
    assert stage.buffer.reader.sft_progress() == (0, False)
