"""Three dialects say the same: generated requests read alike, answers handed back read as given."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.random_agent import read_stream
from outloop.buffer.records import Sampling, Turn
from outloop.router.dialects.base import AnswerHead, CallPlace, Delta, Message, ToolCall, TurnResult
from outloop.router.dialects.table import DIALECTS

TEXT = st.just("") | st.text(max_size=12)
TEXTS = st.text(min_size=1, max_size=12)
ARGUMENTS = st.dictionaries(
    TEXT,
    st.one_of(st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    max_size=3,
)


@dataclass(frozen=True)
class Knobs:
    """What a request asks for beside its messages."""

    max_tokens: int
    temperature: float | None
    choice: str
    parallel: bool
    stream: bool


@st.composite
def answers(draw) -> Message:
    """Something that an assistant said."""
    calls = [
        ToolCall(f"call_{number}", draw(st.sampled_from("fg")), json.dumps(draw(ARGUMENTS)))
        for number in range(draw(st.integers(0, 3)))
    ]
    return Message("assistant", draw(TEXT), draw(TEXT), tuple(calls))


@st.composite
def conversations(draw) -> tuple[Message, ...]:
    """Everybody's words, where every answer's calls are answered."""
    messages = [Message("system", draw(TEXTS))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(TEXTS)))
    for answer in draw(st.lists(answers(), max_size=3)):
        messages.append(answer)
        for call in answer.tool_calls:
            messages.append(Message("tool", draw(TEXT), tool_call_id=call.id))
        if not answer.tool_calls or draw(st.booleans()):
            messages += [Message(draw(st.sampled_from(["user", "system"])), draw(TEXTS))]
    return tuple(messages)


KNOBS = st.builds(
    Knobs,
    max_tokens=st.integers(1, 1 << 40),
    temperature=st.none() | st.floats(0.0, 1.0),
    choice=st.sampled_from(["auto", "none", "required", "function:g"]),
    parallel=st.booleans(),
    stream=st.booleans(),
)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}


class Chat:
    """As a client of chat completions writes and reads."""

    path = "/v1/chat/completions"

    def body(self, messages: list, knobs: Knobs) -> dict:
        """A request."""
        kind, _, name = knobs.choice.partition(":")
        return {
            "messages": messages,
            "max_completion_tokens": knobs.max_tokens,
            # What it was called before; the newer name is the one that holds.
            "max_tokens": 3,
            "tool_choice": {"type": kind, "function": {"name": name}} if name else kind,
            "parallel_tool_calls": knobs.parallel,
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
                for name in "fg"
            ],
        }

    def write(self, message: Message) -> list[dict]:
        """A message of the history."""
        wire = {"role": message.role, "content": message.text}
        if message.reasoning:
            wire["reasoning_content"] = message.reasoning
        if message.tool_calls:
            wire["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": c.arguments},
                }
                for c in message.tool_calls
            ]
        if message.role == "tool":
            wire["tool_call_id"] = message.tool_call_id
        return [wire]

    def read(self, answer: str) -> list[dict]:
        """A plain answer as history."""
        return [json.loads(answer)["choices"][0]["message"]]

    def read_stream(self, events: str) -> list[dict]:
        """A streamed answer as history."""
        return read_stream(events)[1]


class Responses:
    """As a client of responses writes and reads."""

    path = "/v1/responses"

    def body(self, messages: list, knobs: Knobs) -> dict:
        """A request."""
        kind, _, name = knobs.choice.partition(":")
        return {
            "input": messages,
            "max_output_tokens": knobs.max_tokens,
            "tool_choice": {"type": kind, "name": name} if name else kind,
            "parallel_tool_calls": knobs.parallel,
            "tools": [
                {"type": "function", "name": name, "parameters": PARAMETERS} for name in "fg"
            ],
        }

    def write(self, message: Message) -> list[dict]:
        """A message of the history."""
        if message.role == "tool":
            output = {"call_id": message.tool_call_id, "output": message.text}
            return [{"type": "function_call_output", **output}]
        items = []
        if message.reasoning:
            part = {"type": "reasoning_text", "text": message.reasoning}
            items.append({"type": "reasoning", "summary": [], "content": [part]})
        if message.text or not message.tool_calls:
            items.append({"role": message.role, "content": message.text})
        items += (
            {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": c.arguments}
            for c in message.tool_calls
        )
        return items

    def read(self, answer: str) -> list[dict]:
        """A plain answer as history."""
        return json.loads(answer)["output"]

    def read_stream(self, events: str) -> list[dict]:
        """A streamed answer as history: the items as each was done."""
        sent = _events(events)
        items = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
        assert items == sent[-1]["response"]["output"]
        return items


class Messages:
    """As a client of Anthropic's messages writes and reads."""

    path = "/v1/messages"

    def body(self, messages: list, knobs: Knobs) -> dict:
        """A request."""
        kind, _, name = knobs.choice.partition(":")
        kind = {"required": "any", "function": "tool"}.get(kind, kind)
        choice = {"type": kind, "disable_parallel_tool_use": not knobs.parallel}
        return {
            "messages": messages,
            "max_tokens": knobs.max_tokens,
            "tool_choice": {**choice, "name": name} if name else choice,
            "tools": [{"name": name, "input_schema": PARAMETERS} for name in "fg"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }

    def write(self, message: Message) -> list[dict]:
        """A message of the history."""
        if message.role == "tool":
            sent = {"tool_use_id": message.tool_call_id, "content": message.text}
            return [{"role": "user", "content": [{"type": "tool_result", **sent}]}]
        if message.role != "assistant":
            return [{"role": message.role, "content": message.text}]
        blocks = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.text or not message.tool_calls:
            blocks.append({"type": "text", "text": message.text})
        blocks += (
            {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
            for c in message.tool_calls
        )
        return [{"role": "assistant", "content": blocks}]

    def read(self, answer: str) -> list[dict]:
        """A plain answer as history."""
        return [{"role": "assistant", "content": json.loads(answer)["content"]}]

    def read_stream(self, events: str) -> list[dict]:
        """A streamed answer as history."""
        blocks: list[dict] = []
        for event in _events(events):
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "pieces": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                name = next(name for name in delta if name != "type")
                blocks[event["index"]]["pieces"] += delta[name]
        for block in blocks:
            pieces, kind = block.pop("pieces"), block["type"]
            if kind == "tool_use":
                block["input"] = json.loads(pieces)
            else:
                block[kind] = pieces
        return [{"role": "assistant", "content": blocks}]


def _events(text: str) -> list[dict]:
    # Not splitlines: what was said may hold other ends of lines than the events'.
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


CLIENTS = (Chat(), Responses(), Messages())
each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda one: type(one).__name__)


def decode(client, history: list, knobs: Knobs):
    """The turn request in a request with this history."""
    body = {"model": "policy", "stream": knobs.stream, **client.body(history, knobs)}
    if knobs.temperature is not None:
        body["temperature"] = knobs.temperature
    return DIALECTS[client.path].dialect.decode(json.dumps(body).encode())


def written(client, messages) -> list[dict]:
    """A history on the wire."""
    return [item for message in messages for item in client.write(message)]


def result_of(answer: Message) -> TurnResult:
    """A turn that ended in `answer`."""
    turn = Turn(
        turn_id="t1",
        episode_id="e",
        parent_turn_id=None,
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=np.arange(2, dtype=np.int32),
        behavior_logprobs=None,
        version_spans=(),
        loss_spans=(),
        sampling=Sampling(temperature=1.0),
        finish_reason="tool_calls" if answer.tool_calls else "stop",
        started_at=1.0,
        finished_at=2.0,
    )
    return TurnResult(turn=turn, message=answer, num_prompt_tokens=3)


def deltas_of(answer: Message, cut: int) -> list[Delta]:
    """An answer in pieces of `cut` characters, in the order in which they are generated."""

    def pieces(text: str) -> list[str]:
        return [text[start : start + cut] for start in range(0, len(text), cut)]

    found = [Delta(choice_index=0, text=p, is_reasoning=True) for p in pieces(answer.reasoning)]
    found += (Delta(choice_index=0, text=piece) for piece in pieces(answer.text))
    for number, call in enumerate(answer.tool_calls):
        place = CallPlace(number=number, id=call.id, name=call.name)
        sent = ["", *pieces(call.arguments)]
        found += (Delta(choice_index=0, text=piece, call=place) for piece in sent)
    return found


@pytest.mark.medium
@given(messages=conversations(), knobs=KNOBS)
@settings(max_examples=60, deadline=None)
def test_every_dialect_asks_for_the_same_turn(messages, knobs) -> None:
    """One conversation written in three dialects is one turn request."""
    requests = [decode(client, written(client, messages), knobs) for client in CLIENTS]
    for request in requests:
        assert request.messages == messages
        assert request.asked == (
            {} if knobs.temperature is None else {"temperature": knobs.temperature}
        )
        assert request.tool_choice == knobs.choice
        assert request.parallel_tool_calls == knobs.parallel
        assert (request.max_new_tokens, request.stream) == (knobs.max_tokens, knobs.stream)
        assert request.tools == requests[0].tools
    assert [tool["function"]["name"] for tool in requests[0].tools] == ["f", "g"]


@pytest.mark.medium
@each_client
@given(messages=conversations(), answer=answers(), knobs=KNOBS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_answer_handed_back_is_the_answer(client, messages, answer, knobs, data) -> None:
    """Plain, or streamed up to anywhere before it ended, it comes back as what was said."""
    request = decode(client, written(client, messages), knobs)
    dialect, result = DIALECTS[client.path].dialect, result_of(answer)
    if knobs.stream:
        head = AnswerHead(turn_id="t1", started_at=1.0, num_prompt_tokens=3)
        stream = dialect.stream(head, request)
        deltas = deltas_of(answer, data.draw(st.integers(1, 5)))
        num_shown = data.draw(st.integers(0, len(deltas)))
        events = stream.open() + b"".join(stream.delta(delta) for delta in deltas[:num_shown])
        read_back = client.read_stream((events + stream.close([result])).decode())
    else:
        read_back = client.read(dialect.encode([result], request).decode())
    more = Message("user", "more")
    again = decode(client, [*written(client, messages), *read_back, *client.write(more)], knobs)
    assert again.messages == (*messages, answer, more)
