"""Tool calls are streamed while they are generated."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fakes.talkers import Meeting
from outloop.router.dialects.base import Message, TurnRequest
from outloop.router.episodes.turn_tree import Plan
from outloop.router.turns.answer_reader import AnswerReader

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
)
PLAN = Plan(parent=None, previous=None, prompt_ids=[], cause="root")
QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
each_dialect = pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])


def request(**fields) -> TurnRequest:
    """A streamed request with two tools."""
    return TurnRequest(
        **{"model": "policy", "messages": (Message("user", "go"),), "tools": TOOLS, "stream": True}
        | fields
    )


def read(renderer, ids: list[int], cuts: list[int], **fields):
    """What was shown of `ids` cut like this (text, calls), and what they say in the end."""
    reader, asked = AnswerReader(renderer), request(**fields)
    live, text, calls, rest = reader.live(asked, PLAN), "", {}, list(ids)
    for cut in [*cuts, len(ids)]:
        shown = live.add(rest[:cut])
        rest = rest[cut:]
        assert not (calls and shown.text), "text after a call"
        text += shown.text
        for piece in shown.calls:
            name, arguments = calls.get(piece.number, (piece.name, ""))
            assert name == piece.name
            calls[piece.number] = (name, arguments + piece.arguments)
    reply = reader.read(asked, list(ids), PLAN, "t", None, live.shown_calls)
    return text, list(calls.values()), reply


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 99)
    | st.text('ab"\\{}\u00e9\U0001f600\n', max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("xy", max_size=2), inner),
    max_leaves=4,
)
arguments = st.dictionaries(st.sampled_from("xyz"), values, max_size=3)
spaces = st.sampled_from(["", " ", "\n", "\n  "])


@st.composite
def written_calls(draw):
    """A well-formed answer and its calls, in every spelling that JSON allows."""
    text, calls = draw(st.sampled_from(["", "Let me see.", "a <", "two\n\n"])), []
    for _ in range(draw(st.integers(1, 3))):
        name, values_ = draw(st.sampled_from("fg")), draw(arguments)
        separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]))
        written = json.dumps(values_, ensure_ascii=draw(st.booleans()), separators=separators)
        a, b, c = draw(spaces), draw(spaces), draw(spaces)
        text += f'<tool_call>{a}{{"name":{b}"{name}", "arguments":{c}{written}{a}}}{b}</tool_call>'
        text += draw(st.sampled_from(["", "\n"]))
        calls.append((name, written))
    return text, calls


@pytest.mark.medium
@QUICK
@given(written=written_calls(), cuts=st.lists(st.integers(1, 4), max_size=90))
def test_joined_pieces_are_the_recorded_call(renderer, written, cuts) -> None:
    """However the ids are cut, what was shown of each call is all of it, as the policy wrote it."""
    text, calls = written
    ids = renderer.tokenizer.encode(text)
    shown_text, shown, reply = read(renderer, ids, cuts)
    assert shown == calls
    assert [(call.name, call.arguments) for call in reply.message.tool_calls] == calls
    assert reply.message.text == shown_text == text.partition("<tool_call>")[0].strip()
    plain = AnswerReader(renderer).read(request(stream=False), ids, PLAN, "t", None)
    assert plain == reply


@pytest.mark.medium
@QUICK
@given(
    text=st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "{", "}"),
                *("<think>", "</think>", "\n", '"', "<|im_end|>", CALL % ("g", "{}"), "\u00e9"),
                *('"x": 1', "a", ", "),
            ]
        ),
        max_size=14,
    ).map("".join),
    cuts=st.lists(st.integers(1, 4), max_size=60),
    parallel=st.booleans(),
)
@example(text=CALL % ("f", '{"x": }'), cuts=[], parallel=True)
@example(text=CALL % ("f", '{"x": ' + "9" * 5000 + "}"), cuts=[], parallel=True)
@example(text=CALL % ("f", '{"x": 1}') + CALL % ("g", "{"), cuts=[3] * 20, parallel=False)
def test_what_was_streamed_of_a_call_stays_in_the_answer(renderer, text, cuts, parallel) -> None:
    """Whatever the policy writes: what was shown begins a recorded call."""
    ids = renderer.tokenizer.encode(text)
    shown_text, shown, reply = read(renderer, ids, cuts, parallel_tool_calls=parallel)
    assert (shown_text, shown, reply) == read(
        renderer, ids, [1] * len(ids), parallel_tool_calls=parallel
    )
    calls = reply.message.tool_calls
    assert len(calls) >= len(shown)
    for call, (name, pieces) in zip(calls, shown, strict=False):
        assert call.name == name
        assert call.arguments.startswith(pieces)
    assert reply.message.text.startswith(shown_text)
    if shown:
        assert reply.message.text == shown_text
    assert parallel or len(calls) <= 1


PIECES = {
    "chat": lambda event: [
        (call.get("id"), call["function"].get("name"), call["function"]["arguments"])
        for call in event["choices"][0]["delta"].get("tool_calls", ())
    ],
    "responses": lambda event: (
        [(event["item"]["call_id"], event["item"]["name"], "")]
        if event["type"] == "response.output_item.added"
        and event["item"]["type"] == "function_call"
        else [(None, None, event["delta"])]
        if event["type"] == "response.function_call_arguments.delta"
        else []
    ),
    "messages": lambda event: (
        [(event["content_block"]["id"], event["content_block"]["name"], "")]
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use"
        else [(None, None, event["delta"]["partial_json"])]
        if event.get("delta", {}).get("type") == "input_json_delta"
        else []
    ),
}


@each_dialect
async def test_a_call_is_streamed_while_it_is_generated(stage, dialect) -> None:
    """Its name comes first, then its arguments piece by piece, before the server has finished."""
    stage.server.step_gate = asyncio.Event()
    stage.server.chunk = 8
    written = '{"expression": "12 * 7 + 12 * 7 + 12 * 7", "note":1e3}'
    stage.says("I compute.\n" + CALL % ("calculator", written))
    episode = await stage.open()
    meeting = Meeting(dialect, stage.url)
    stage.stack.push_async_callback(meeting.close)
    talker = meeting.begin(episode)
    talker.tell("go")
    headers = {"Authorization": f"Bearer {episode['api_key']}"}
    options = {**talker.options, "stream": True}
    pieces = []
    async with stage.http.stream("POST", talker.path, json=options, headers=headers) as answer:
        async for line in answer.aiter_lines():
            new = PIECES[dialect](json.loads(line[6:])) if line.startswith("data: {") else []
            if any(arguments for *_, arguments in new) and not stage.server.step_gate.is_set():
                assert not stage.turns(episode)
            if line.startswith("data: {"):
                # The server waits for us after its first piece.
                stage.server.step_gate.set()
            pieces += new
    assert [name for _, name, _ in pieces] == ["calculator", *[None] * (len(pieces) - 1)]
    assert "".join(arguments for *_, arguments in pieces) == written
    assert sum(bool(arguments) for *_, arguments in pieces) > 2
    turn = stage.turns(episode)[0]
    assert pieces[0][0] == f"call_{turn.turn_id}_0"
    assert (turn.finish_reason, turn.loss_spans) == ("tool_calls", ((0, len(turn.output_ids)),))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("dialect", "is_cut"),
    # openai's chat helper raises on a cut answer, before there is anything to hand back.
    [
        ("chat", False),
        ("responses", False),
        ("responses", True),
        ("messages", False),
        ("messages", True),
    ],
)
async def test_a_call_that_breaks_off_is_handed_back_exactly(stage, dialect, is_cut) -> None:
    """The client keeps what it was shown; the conversation goes on by ids, also elsewhere."""
    script = stage.script('<tool_call>\n{"name": "calculator", "arguments": {"expression": "1')
    if is_cut:
        script.ids, script.finish = script.ids[:-1], {"type": "length"}
    answers = iter([script, stage.script("fine")])
    stage.server.answer = lambda request: next(answers)
    episode = await stage.open()
    meeting = Meeting(dialect, stage.url)
    stage.stack.push_async_callback(meeting.close)
    talker = meeting.begin(episode)
    talker.tell("go")
    reply = await talker.ask(stream=True)
    assert [name for _, name, _ in reply.calls] == ["calculator"]
    session = stage.app.state.parts.episodes.known(episode["episode_id"])
    session.turns.clear()
    again = await talker.ask(stream=True, extra_headers={"x-stainless-retry-count": "1"})
    assert (again.calls, again.finish, again.text) == (reply.calls, reply.finish, reply.text)
    assert stage.turns(episode)[0].finish_reason == ("length" if is_cut else "tool_calls")
    if dialect != "messages":
        # Anthropic's client repairs what it hands back.
        talker.hand_back(reply)
        talker.hand_results([(reply.calls[0][0], "not JSON")])
        assert (await talker.ask(stream=False)).text == "fine"
        assert [t.branch_cause for t in stage.turns(episode)] == ["root", "extension"]


async def test_calls_are_whole_where_a_piece_might_be_taken_back(stage) -> None:
    """With stop strings, which may cut a call anywhere, nothing of it is shown before the end."""
    stage.says(CALL % ("calculator", '{"expression": "12 * 7"}'))
    episode = await stage.open()
    client = await stage.client(episode)
    stream = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "hi"}],
        tools=list(TOOLS),
        stop=["Observation:"],
        stream=True,
    )
    calls = []
    async for chunk in stream:
        calls += chunk.choices[0].delta.tool_calls or []
    assert [call.function.arguments for call in calls] == ['{"expression": "12 * 7"}']
