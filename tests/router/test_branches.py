"""Which requests continue a branch, and the cause when one does not."""

import pytest

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Say something."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def turn(stage, episode, messages, text="fine", **fields):
    """One turn with a raw request; returns the answer's message."""
    stage.says(*[text] * fields.get("n", 1))
    body = {"model": "policy", "messages": messages, **fields}
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def causes(stage, episode):
    """Branch causes of the recorded turns."""
    return [t.branch_cause for t in stage.turns(episode)]


async def test_a_client_that_drops_extra_fields_continues(stage) -> None:
    """An echo is what was said, not how it was serialised."""
    episode = await stage.open()
    reply = await turn(stage, episode, [SYSTEM, USER])
    echo = {"role": "assistant", "content": [{"type": "text", "text": reply["content"]}]}
    await turn(stage, episode, [SYSTEM, USER, echo, USER])
    assert causes(stage, episode) == ["root", "extension"]


@pytest.mark.parametrize(
    "said",
    ["", "fine \n", "<tool_call>\n{x}\n</tool_call> \n", "<tool_call>\n{x \n", "a <think> b\n"],
)
async def test_a_client_that_strips_what_was_said_continues(stage, said: str) -> None:
    """White space around an answer is nothing that a client rewrites, around a broken call too."""
    episode = await stage.open()
    reply = await turn(stage, episode, [SYSTEM, USER], text=said, tools=[TOOL])
    echo = {"role": "assistant", "content": (reply["content"] or "").strip()}
    await turn(stage, episode, [SYSTEM, USER, echo, USER], tools=[TOOL])
    assert causes(stage, episode) == ["root", "extension"]


@pytest.mark.parametrize(
    ("second", "fields", "cause"),
    [
        ([{**SYSTEM, "content": "Be long."}, USER, "said", USER], {}, "system_changed"),
        ([SYSTEM, USER, "said", USER], {"tools": [TOOL]}, "tools_changed"),
        ([SYSTEM, USER, {"role": "assistant", "content": "no"}, USER], {}, "history_rewritten"),
        ([SYSTEM, USER, {"role": "assistant", "content": "x"}], {}, "prefill"),
        ([{"role": "user", "content": "Scan this."}], {}, "new_conversation"),
        ([SYSTEM, USER], {}, "resampled"),
    ],
)
async def test_causes_of_breaks(stage, second, fields, cause) -> None:
    """What is no extension starts a branch, and its cause is recorded."""
    episode = await stage.open()
    reply = await turn(stage, episode, [SYSTEM, USER])
    messages = [{**reply, "role": "assistant"} if m == "said" else m for m in second]
    await turn(stage, episode, messages, **fields)
    _, other = stage.turns(episode)
    assert other.branch_cause == cause
    assert other.parent_turn_id is None
    assert stage.server.requests[1]["input_ids"] == other.prompt_ids.tolist()
    metrics = (await stage.http.get("/metrics")).text
    assert f'router_branch_breaks_total{{cause="{cause}"}} 1.0' in metrics


async def test_a_rewritten_answer_with_the_same_ids_continues(stage) -> None:
    """If the full rendering extends recorded ids, the branch goes on whatever matching says."""
    episode = await stage.open()
    await turn(stage, episode, [USER], text="fine")
    echo = {"role": "assistant", "content": "fine", "name": "bot"}
    await turn(stage, episode, [{**USER, "name": "u"}, echo, USER])
    first, second = stage.turns(episode)
    assert second.parent_turn_id == first.turn_id
    sent = stage.server.requests[1]["input_ids"]
    assert sent == [*first.prompt_ids, *first.output_ids, *second.prompt_ids]


async def test_choices_are_sibling_turns_and_each_can_be_continued(stage) -> None:
    """n=3 records three turns; the one whose text is echoed gets the next turn."""
    episode = await stage.open()
    scripts = iter([stage.script(text) for text in ("one", "two", "three", "next")])
    stage.server.answer = lambda request: next(scripts)
    body = {"model": "policy", "messages": [USER], "n": 3}
    answer = (await stage.post("/v1/chat/completions", body, episode["api_key"])).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    reply = answer["choices"][1]["message"]
    body = {"model": "policy", "messages": [USER, reply, USER]}
    await stage.post("/v1/chat/completions", body, episode["api_key"])
    *choices, last = stage.turns(episode)
    assert [t.choice_index for t in choices] == [0, 1, 2]
    assert all(t.parent_turn_id is None for t in choices)
    assert last.parent_turn_id == choices[1].turn_id
    assert answer["usage"]["completion_tokens"] == sum(len(t.output_ids) for t in choices)


async def test_a_sub_agent_and_the_main_agent_are_two_branches(stage) -> None:
    """Interleaved conversations on one key each keep their own path."""
    episode = await stage.open()
    histories = [[{"role": "user", "content": text}] for text in ("main", "sub")]
    for _ in range(3):
        for history in histories:
            history.append(await turn(stage, episode, history))
            history.append(USER)
    turns = {t.turn_id: t for t in stage.turns(episode)}
    roots = [t for t in turns.values() if t.parent_turn_id is None]
    assert [t.branch_cause for t in roots] == ["root", "new_conversation"]
    assert len(turns) == 6
    await stage.post(
        f"/episodes/{episode['episode_id']}/close", {"outcome": "completed", "key": "c"}
    )
    metrics = (await stage.http.get("/metrics")).text
    assert 'router_branches_per_episode_bucket{le="2.0"} 1.0' in metrics
    assert 'router_branches_per_episode_bucket{le="1.0"} 0.0' in metrics


async def test_another_router_process_goes_on_with_the_ids(make_stage, stage) -> None:
    """A second router over the same buffer continues the branch by the recorded ids."""
    episode = await stage.open()
    reply = await turn(stage, episode, [SYSTEM, USER])
    other = await make_stage(beside=stage)
    stage.says("again")
    body = {"model": "policy", "messages": [SYSTEM, USER, reply, USER]}
    answer = await other.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200
    first, second = stage.turns(episode)
    assert second.parent_turn_id == first.turn_id


async def test_reasoning_that_is_handed_back_is_rendered(make_stage) -> None:
    """In the middle of a tool loop, where Qwen3's format keeps it, and of a conversation that was
    never recorded: the server sees it, once."""
    stage = await make_stage(model={"renderer_options": {"enable_thinking": True}})
    episode = await stage.open()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}
    for thought in ("I wonder.", ""):
        thinking = {**reply, "reasoning_content": thought} if thought else reply
        await turn(stage, episode, [USER, thinking, result], tools=[TOOL])
        seen = stage.renderer.tokenizer.decode(stage.server.requests[-1]["input_ids"])
        assert seen.count("I wonder.") == bool(thought)
