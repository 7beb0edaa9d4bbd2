"""An attempt that was lost is played again, and its recorded turns answer until it differs."""

import json

import numpy as np
import pytest
from msgspec.structs import replace

TOOLS = [
    {
        "type": "function",
        "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call>'


async def resume(stage, lost: dict) -> dict:
    """End `lost` by a failure of its machine; the episode in which its attempt is played again."""
    close = {"outcome": "failed", "failure_kind": "infrastructure", "key": "c"}
    path = f"/episodes/{lost['episode_id']}/close"
    assert (await stage.post(path, close)).status_code == 200
    body = {"key": lost["episode_id"], "count": 1, "open": True}
    (claimed,) = (await stage.post("/tasks/claim", body)).json()["claims"]
    assert claimed["resumes"] == lost["episode_id"]
    return claimed["episode"]


async def say(stage, episode: dict, messages: list[dict], **fields: object) -> dict:
    """One chat completion."""
    body = {"model": "policy", "messages": messages, **fields}
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200, answer.text
    return answer.json()


async def play(stage, episode: dict, *, num_turns: int, question: str = "12 * 7?") -> list[dict]:
    """A tool loop: every answer is a call whose result is sent back; the answers."""
    messages: list[dict] = [{"role": "user", "content": question}]
    answers = []
    for number in range(num_turns):
        answer = await say(stage, episode, messages, tools=TOOLS)
        message = answer["choices"][0]["message"]
        answers.append(answer)
        calls = message.get("tool_calls") or []
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
            for call in calls
        ]
        if not calls:
            messages.append({"role": "user", "content": "go on"})
    return answers


def essence(turn) -> tuple:
    """What a replayed turn keeps."""
    return (
        turn.turn_id,
        turn.parent_turn_id,
        turn.prompt_ids.tolist(),
        turn.output_ids.tolist(),
        turn.behavior_logprobs.tobytes(),
        turn.version_spans,
        turn.loss_spans,
        turn.sampling,
        turn.started_at,
    )


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_recorded_turns_are_not_generated_again(make_stage, stage, elsewhere) -> None:
    """The agent gets the same answers, call ids included, also from another router process; the
    turns keep ids, logprobs and versions, and the server is asked from the next turn on only."""
    stage.says(CALL, CALL, "never", "never")
    lost = await stage.open()
    first = await play(stage, lost, num_turns=2)
    here = await make_stage(beside=stage) if elsewhere else stage
    stage.says(CALL, "84.")
    again = await resume(here, lost)
    num_before = len(stage.server.requests)
    second = await play(here, again, num_turns=4)
    assert len(stage.server.requests) == num_before + 2
    for one, other in zip(first, second, strict=False):
        assert one["choices"] == other["choices"]
        assert one["id"] == other["id"]
        assert one["usage"] == other["usage"]
    old, new = here.turns(lost), here.turns(again)
    assert [essence(turn) for turn in new[:2]] == [essence(turn) for turn in old]
    assert {turn.episode_id for turn in new} == {again["episode_id"]}
    assert len(new) == 4
    assert new[2].parent_turn_id == new[1].turn_id
    metrics = (await here.http.get("/metrics")).text
    assert "router_resumed_turns_total 2.0" in metrics
    num_generated = 2.0 if elsewhere else 4.0
    assert f'router_turns_total{{finish_reason="tool_calls"}} {num_generated - 1}' in metrics


async def test_a_streaming_agent_gets_the_recorded_text(stage) -> None:
    """Whole, in the events that it reads anyway."""
    stage.says("Hello there, friend.")
    lost = await stage.open()
    ask = {"messages": [{"role": "user", "content": "hi"}], "model": "policy", "stream": True}
    texts = []
    for number in range(2):
        episode = await resume(stage, lost) if number else lost
        answer = await stage.post("/v1/chat/completions", ask, episode["api_key"])
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        texts.append("".join(delta.get("content") or "" for delta in deltas))
    assert texts == ["Hello there, friend."] * 2
    assert len(stage.server.requests) == 1


async def test_from_where_it_differs_turns_are_fresh(stage) -> None:
    """A tool result that differs ends the replay of that branch: the rest belongs to no episode."""
    stage.says(CALL, "lost answer", "fresh answer")
    lost = await stage.open()
    await play(stage, lost, num_turns=2)
    again = await resume(stage, lost)
    messages: list[dict] = [{"role": "user", "content": "12 * 7?"}]
    answer = await say(stage, again, messages, tools=TOOLS)
    call = answer["choices"][0]["message"]["tool_calls"][0]
    messages += [
        answer["choices"][0]["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "another result"},
    ]
    answer = await say(stage, again, messages, tools=TOOLS)
    assert answer["choices"][0]["message"]["content"] == "fresh answer"
    old, new = stage.turns(lost), stage.turns(again)
    assert [turn.turn_id == old[0].turn_id for turn in new] == [True, False]
    assert new[1].parent_turn_id == old[0].turn_id
    assert new[1].branch_cause == "extension"
    loaded = (await stage.get(f"/episodes/{again['episode_id']}")).json()
    assert loaded["resumes"] == lost["episode_id"]
    assert len(loaded["turns"]) == 2


async def test_a_recorded_turn_answers_once(stage) -> None:
    """Equal requests get the recorded samples in their order, then fresh ones."""
    stage.says("one", "two", "three")
    lost = await stage.open()
    hello = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        await say(stage, lost, hello)
    again = await resume(stage, lost)
    texts = [(await say(stage, again, hello))["choices"][0]["message"]["content"] for _ in range(3)]
    assert texts == ["one", "two", "three"]


async def test_choices_are_replayed_together(stage) -> None:
    """All of n, or none: another n is another request."""
    stage.says("one", "two", "three", "four", "five")
    lost = await stage.open()
    hello = [{"role": "user", "content": "hi"}]
    await say(stage, lost, hello, n=2)
    again = await resume(stage, lost)
    single = await say(stage, again, hello)
    assert single["choices"][0]["message"]["content"] == "three"
    both = await say(stage, again, hello, n=2)
    assert [c["message"]["content"] for c in both["choices"]] == ["one", "two"]


async def test_other_sampling_is_another_request(make_stage) -> None:
    """A turn sampled at one temperature is no answer to a request at another."""
    stage = await make_stage(sampling={"governance": "record"})
    stage.says("cold", "warm")
    lost = await stage.open()
    hello = [{"role": "user", "content": "hi"}]
    await say(stage, lost, hello, temperature=0.5)
    again = await resume(stage, lost)
    answer = await say(stage, again, hello, temperature=0.7)
    assert answer["choices"][0]["message"]["content"] == "warm"


async def test_what_a_named_version_generated_is_not_replayed_for_the_policy(stage) -> None:
    """Two players of one prompt, one of them frozen, get their own turns again in whatever order
    they ask; the frozen one's is still not trained."""
    stage.says("trained", "frozen", "fresh")
    lost = await stage.open()
    hello = [{"role": "user", "content": "hi"}]
    for model in ("policy", "policy@0"):
        await say(stage, lost, hello, model=model)
    again = await resume(stage, lost)
    for model, text in (("policy@0", "frozen"), ("policy", "trained"), ("policy@0", "fresh")):
        answer = await say(stage, again, hello, model=model)
        assert answer["choices"][0]["message"]["content"] == text
    masked = [(bool(turn.loss_spans), turn.mask_reason) for turn in stage.turns(again)]
    assert masked == [(False, "frozen"), (True, ""), (False, "frozen")]
    assert len(stage.server.requests) == 3


async def test_what_is_masked_stays_masked_but_for_delivery(make_stage) -> None:
    """Unknown logprobs stay unknown; an undelivered turn is now delivered and trained."""
    stage = await make_stage()
    stage.says("unknown", "left alone")
    played, lost = await stage.open(), await stage.open()
    hello = [{"role": "user", "content": "hi"}]
    await say(stage, played, hello)
    await say(stage, played, [*hello, {"role": "user", "content": "ho"}])
    recorded = [
        replace(turn, episode_id=lost["episode_id"], loss_spans=(), mask_reason=reason)
        for turn, reason in zip(
            stage.turns(played), ("behavior_unknown", "undelivered"), strict=True
        )
    ]
    zeros = np.zeros(len(recorded[0].output_ids), np.float32)
    recorded[0] = replace(recorded[0], behavior_logprobs=zeros)
    for turn in recorded:
        await stage.writer.append_turn(turn)
    again = await resume(stage, lost)
    await say(stage, again, hello)
    await say(stage, again, [*hello, {"role": "user", "content": "ho"}])
    unknown, delivered = stage.turns(again)
    assert (unknown.loss_spans, unknown.mask_reason) == ((), "behavior_unknown")
    assert delivered.loss_spans == ((0, len(delivered.output_ids)),)
    assert delivered.behavior_logprobs.tobytes() == recorded[1].behavior_logprobs.tobytes()


async def test_a_buffer_that_is_away_costs_no_recorded_turn(make_stage) -> None:
    """The replay that could not be recorded is what the client's retry gets."""
    stage = await make_stage(router={"buffer_timeout_s": 0})
    stage.says("one", "two")
    lost = await stage.open()
    hello = [{"role": "user", "content": "hi"}]
    await say(stage, lost, hello)
    again = await resume(stage, lost)
    await say(stage, again, [{"role": "user", "content": "something else"}])
    stage.buffer.twin.is_away = True
    body = {"model": "policy", "messages": hello}
    answer = await stage.post("/v1/chat/completions", body, again["api_key"])
    assert answer.status_code == 503
    stage.buffer.twin.is_away = False
    answer = await say(stage, again, hello)
    assert answer["choices"][0]["message"]["content"] == "one"
