"""Each cause of a branch, by conversations that have exactly this one."""

import pytest

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = 'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nSo.\n</think>\n\n"


def user(text: str) -> dict:
    """A user's message."""
    return {"role": "user", "content": text}


def said(text: str) -> dict:
    """An assistant's message that no turn answered."""
    return {"role": "assistant", "content": text}


class Talk:
    """One episode's conversations, whose answers are kept."""

    def __init__(self, stage, episode) -> None:
        self.stage, self.episode = stage, episode

    async def turn(self, messages, text="fine", **fields):
        """The answer to these messages."""
        self.stage.says(*[text] * fields.get("n", 1))
        body = {"model": "policy", "messages": messages, "tools": [TOOL], **fields}
        key = self.episode["api_key"]
        answer = await self.stage.post("/v1/chat/completions", body, key)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    async def play(self, num_rounds: int, text: str = CALLS) -> list[dict]:
        """The messages of a conversation with so many answers, and what follows the last."""
        messages = [SYSTEM, user("question 0")]
        for number in range(num_rounds):
            reply = await self.turn(messages, text)
            follow = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
                for call in reply.get("tool_calls") or ()
            ]
            messages += [reply, *(follow or [user(f"question {number + 1}")])]
        return messages

    @property
    def causes(self) -> list[str]:
        """Of the recorded turns."""
        return [turn.branch_cause for turn in self.stage.turns(self.episode)]


def changed(message: dict, text: str) -> dict:
    """A message with another text."""
    return {**message, "content": text}


LAST = {
    # What is sent after three answers, from the messages that go on after the third.
    "extension": lambda m: m,
    "extension: text beside a call is left out": lambda m: [
        {**x, "content": None} if x["role"] == "assistant" else x for x in m
    ],
    "resampled: the last request again": lambda m: m[:-2],
    "resampled: an earlier request again": lambda m: m[:-4],
    "resampled: an earlier answer goes on in another way": lambda m: [*m[:-4], user("else")],
    "history_rewritten: an answer": lambda m: [*m[:2], changed(m[2], "no"), *m[3:]],
    "history_rewritten: a later answer": lambda m: [*m[:4], changed(m[4], "no"), *m[5:]],
    "history_rewritten: a result": lambda m: [*m[:3], changed(m[3], "cut"), *m[4:]],
    "history_rewritten: a later result": lambda m: [*m[:5], changed(m[5], "cut"), *m[6:]],
    "history_rewritten: the first question": lambda m: [SYSTEM, user("else"), *m[2:]],
    "history_rewritten: an argument is added": lambda m: [*m[:-2], with_argument(m[-2]), m[-1]],
    "history_rewritten: the system message and the last": lambda m: [SYSTEM, *m[-4:]],
    "history_rewritten: the last without a system message": lambda m: m[-4:],
    "history_rewritten: a summary": lambda m: [SYSTEM, user("So far: a lot."), *m[-2:]],
    "history_rewritten: a summary and the question": lambda m: [SYSTEM, user("A lot."), m[1]],
    "system_changed": lambda m: [changed(SYSTEM, "Be long."), *m[1:]],
    "system_changed: it is left out": lambda m: m[1:],
    "new_conversation": lambda m: [user("A title, please.")],
    "new_conversation: the same system message": lambda m: [SYSTEM, user("Another task.")],
    "new_conversation: under another system message": lambda m: [
        changed(SYSTEM, "You plan."),
        user("A plan for: question 0"),
    ],
    "prefill": lambda m: [*m[:2], said("It is")],
    "prefill: of an earlier answer": lambda m: [*m[:4], said("It is")],
}


def with_argument(message: dict) -> dict:
    """A message whose call has one argument more."""
    (call,) = message["tool_calls"]
    function = {**call["function"], "arguments": '{"a": 1, "request": "f"}'}
    return {**message, "tool_calls": [{**call, "function": function}]}


@pytest.mark.parametrize("name", LAST)
async def test_a_conversation_is_given_its_one_cause(stage, name) -> None:
    """Whatever part of it the ids of a recorded turn share."""
    talk = Talk(stage, await stage.open())
    messages = await talk.play(3)
    assert talk.causes == ["root", "extension", "extension"]
    await talk.turn(LAST[name](messages))
    assert talk.causes[3:] == [name.partition(":")[0]]


async def test_other_tools_are_the_cause(stage) -> None:
    """Though all messages are the same."""
    talk = Talk(stage, await stage.open())
    messages = await talk.play(3)
    await talk.turn(messages, tools=[TOOL, {**TOOL, "function": {"name": "g"}}])
    assert talk.causes[3:] == ["tools_changed"]


@pytest.mark.parametrize("num_calls", [1, 2, 3])
async def test_a_thought_that_the_format_drops_is_the_formats_doing(make_stage, num_calls) -> None:
    """Qwen3's, when the user speaks again: also where ids of an earlier turn are shared."""
    stage = await make_stage(model={"renderer_options": {"enable_thinking": True}})
    talk = Talk(stage, await stage.open())
    messages = await talk.play(num_calls, THOUGHT + CALLS)
    reply = await talk.turn(messages, THOUGHT + "It is 85.")
    await talk.turn([*messages, reply, user("And now?")])
    assert talk.causes[num_calls + 1 :] == ["template"]


async def test_a_first_call_without_a_thought_before_thoughts_is_no_second_try(make_stage) -> None:
    """The new rendering goes on after the first turn's ids, where the second does too."""
    stage = await make_stage(model={"renderer_options": {"enable_thinking": True}})
    talk = Talk(stage, await stage.open())
    messages = await talk.play(1, "<think>\n\n</think>\n\n" + CALLS)
    reply = await talk.turn(messages, THOUGHT + "It is 85.")
    await talk.turn([*messages, reply, user("And now?")])
    assert talk.causes[2:] == ["template"]


async def test_choices_and_another_processs_turns_have_causes_of_their_own(make_stage) -> None:
    """`choice`, and `history_unknown` where ids do not fit."""
    one = await make_stage()
    talk = Talk(one, await one.open())
    messages = await talk.play(1)
    await talk.turn([user("three")], n=2)
    assert talk.causes[1:] == ["new_conversation", "choice"]
    other = await make_stage(beside=one)
    one.says("fine")
    rewritten = [*messages[:-2], changed(messages[-2], "no"), messages[-1]]
    body = {"model": "policy", "messages": rewritten, "tools": [TOOL]}
    answer = await other.post("/v1/chat/completions", body, talk.episode["api_key"])
    assert answer.status_code == 200
    assert talk.causes[3:] == ["history_unknown"]


def chat_call(answer: dict) -> list[dict]:
    """The call of an answer alone, as semantic-kernel and crewai send it back, and its result."""
    message = answer["choices"][0]["message"]
    assert message["content"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
    return [{"role": "assistant", "tool_calls": [call]}, result]


def messages_call(answer: dict) -> list[dict]:
    """The same for Anthropic's messages."""
    text, call = answer["content"]
    assert text["text"]
    assert call["type"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "4"}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def responses_call(answer: dict) -> list[dict]:
    """The same for responses."""
    text, call = answer["output"]
    assert (text["type"], call["type"]) == ("message", "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    return [{name: call[name] for name in ("type", "call_id", "name", "arguments")}, result]


DIALECTS = {
    "/v1/chat/completions": ("messages", TOOL, chat_call),
    "/v1/messages": ("messages", {"name": "f", "input_schema": {}}, messages_call),
    "/v1/responses": ("input", {"type": "function", "name": "f"}, responses_call),
}


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_call_without_the_text_beside_it_continues_its_turn(stage, path) -> None:
    """Its id is the turn's own: what is generated and trained goes on after the turn's ids."""
    field, tool, call_of = DIALECTS[path]
    episode = await stage.open()
    body = {"model": "policy", field: [user("go")], "tools": [tool], "max_tokens": 64}
    for _ in range(3):
        stage.says(CALLS)
        answer = await stage.post(path, body, episode["api_key"])
        assert answer.status_code == 200, answer.text
        body[field] = [*body[field], *call_of(answer.json())]
    first, second, third = stage.turns(episode)
    assert [turn.branch_cause for turn in (second, third)] == ["extension", "extension"]
    sent = stage.server.requests[2]["input_ids"]
    path_ids = [first.prompt_ids, first.output_ids, second.prompt_ids, second.output_ids]
    assert sent == [*(i for ids in path_ids for i in ids.tolist()), *third.prompt_ids.tolist()]


@pytest.mark.parametrize("change", ["id", "name", "arguments", "text", "none"])
async def test_another_call_is_no_echo(stage, change) -> None:
    """Neither by its name, its arguments or its id, nor with a text that was not said."""
    talk = Talk(stage, await stage.open())
    *before, reply, result = await talk.play(1)
    (call,) = reply["tool_calls"]
    function = call["function"]
    calls = {
        "id": [{**call, "id": "call_1"}],
        "name": [{**call, "function": {**function, "name": "g"}}],
        "arguments": [{**call, "function": {**function, "arguments": "{}"}}],
        "none": [],
    }
    sent = {
        **reply,
        "content": "x" if change == "text" else "",
        "tool_calls": calls.get(change, [call]),
    }
    await talk.turn([*before, sent, result])
    assert talk.causes == ["root", "history_rewritten"]
