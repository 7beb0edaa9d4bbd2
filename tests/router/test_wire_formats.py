"""The wire format of the four dialects, byte for byte, against recorded exchanges.

`wire_formats/NAME.http` holds the requests and answers of one case as they went over the wire, with
ids, times and the sentences of errors replaced by names. After a wanted change renew them with
`OUTLOOP_WRITE_WIRE_FORMATS=1 pytest tests/router/test_wire_formats.py`, and read the difference.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fakes.fake_server import Script
from outloop.router.rendering.renderer import PolicyRenderer

FOLDER = Path(__file__).parent / "wire_formats"
WRITES = bool(os.environ.get("OUTLOOP_WRITE_WIRE_FORMATS"))
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SHOWN_HEADERS = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "connection")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
QUESTION = "What is 12 * 7?"
THOUGHT = "<think>\nI need the tool.\n</think>\n\nLet me see.\n"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call>\n'
CALLS = CALL + CALL.replace("12 * 7", "7 * é")
ANSWER = "The answer is 84 → ok 👍."
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
FUNCTION = {"name": "calculator", "description": "Computes.", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS = [{"type": "function", **FUNCTION}]
MESSAGES_TOOLS = [{"name": "calculator", "description": "Computes.", "input_schema": PARAMETERS}]
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}}


@dataclass(frozen=True)
class Request:
    """One request; `body` may name ids of earlier answers as TURN0, TURN1 and so on."""

    path: str
    body: Any
    method: str = "POST"
    key: str | None = "episode"
    """`x-api-key` instead of the episode's key; None: no key."""


@dataclass(frozen=True)
class Case:
    """An episode's requests and what the policy generates for them."""

    name: str
    requests: tuple[Request, ...]
    texts: tuple[str, ...] = (ANSWER,)
    change: dict[str, Any] = field(default_factory=dict)
    """Fields of every script: how generation ends, or fails."""
    sections: dict[str, Any] = field(default_factory=dict)
    is_closed: bool = False
    has_server: bool = True


def chat(*messages: Any, **fields: Any) -> Request:
    """A chat completion of these messages, or of the question."""
    asked = list(messages) or [{"role": "user", "content": QUESTION}]
    return Request(CHAT, {"model": "policy", "messages": asked, **fields})


def completions(**fields: Any) -> Request:
    """A completion of a text."""
    return Request(COMPLETIONS, {"model": "policy", "prompt": "12 * 7 =", **fields})


def responses(given: Any = QUESTION, **fields: Any) -> Request:
    """A response to an input."""
    return Request(RESPONSES, {"model": "policy", "input": given, **fields})


def messages(*given: Any, **fields: Any) -> Request:
    """A message after these, or after the question."""
    asked = list(given) or [{"role": "user", "content": QUESTION}]
    return Request(MESSAGES, {"model": "policy", "max_tokens": 256, "messages": asked, **fields})


def in_both_ways(name: str, request: Request, *texts: str, **values: Any) -> list[Case]:
    """A plain and a streamed case of one request."""
    more = (
        {"stream_options": {"include_usage": True}} if request.path in (CHAT, COMPLETIONS) else {}
    )
    streamed = replace(request, body={**request.body, "stream": True, **more})
    texts = texts or (ANSWER,)
    return [
        Case(name, (request,), texts, **values),
        Case(f"{name}-stream", (streamed,), texts, **values),
    ]


def chat_cases() -> list[Case]:
    """Cases of `/v1/chat/completions`."""
    user = {"role": "user", "content": QUESTION}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_TURN0_0",
                "type": "function",
                "function": {"name": "calculator", "arguments": '{"expression": "12 * 7"}'},
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": "call_TURN0_0", "content": "84"}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    return [
        *in_both_ways("chat", chat()),
        *in_both_ways("chat-tools", chat(tools=CHAT_TOOLS), THOUGHT + CALLS),
        *in_both_ways("chat-reasoning", chat(), THOUGHT + ANSWER),
        *in_both_ways("chat-choices", chat(n=2), "84", "eighty-four"),
        *in_both_ways("chat-logprobs", chat(logprobs=True, top_logprobs=2), "84 é"),
        *in_both_ways("chat-length", chat(max_tokens=8), change={"finish": {"type": "length"}}),
        *in_both_ways("chat-stop-string", chat(stop=["is"]), "The answer is"),
        *in_both_ways("chat-schema", chat(response_format=form), '{"answer": 84}'),
        *in_both_ways(
            "chat-unreadable-call", chat(tools=CHAT_TOOLS), "<tool_call>\n{no\n</tool_call>"
        ),
        *in_both_ways(
            "chat-prefill",
            chat(user, {"role": "assistant", "content": "The"}, continue_final_message=True),
            " answer is 84.",
        ),
        Case(
            "chat-tool-loop",
            (chat(user, tools=CHAT_TOOLS), chat(user, called, result, tools=CHAT_TOOLS)),
            (CALL, ANSWER),
        ),
        Case(
            "chat-invalid",
            (
                Request(CHAT, "{"),
                Request(CHAT, {"model": "policy", "messages": "hi"}),
                Request(CHAT, {"messages": []}),
                chat({"role": "robot", "content": "hi"}),
                chat(
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ),
                chat(temperature=-1),
                chat(n=0),
                chat(stop=[""]),
                chat(top_logprobs=2),
                chat(tools=[{"type": "function"}]),
                chat(tools=CHAT_TOOLS, tool_choice={"type": "function", "function": {"name": "x"}}),
                chat(response_format={"type": "xml"}),
                chat(functions=[FUNCTION]),
            ),
        ),
    ]


def completions_cases() -> list[Case]:
    """Cases of `/v1/completions`."""
    return [
        *in_both_ways("completions", completions()),
        *in_both_ways("completions-choices", completions(n=2), "84", "eighty-four"),
        *in_both_ways("completions-logprobs", completions(logprobs=2), "84 é"),
        *in_both_ways("completions-stop-string", completions(stop="is"), "The answer is"),
        Case(
            "completions-invalid",
            (
                completions(prompt=["a", "b"]),
                completions(prompt=None),
                completions(echo=True),
                completions(suffix="x"),
                completions(best_of=2),
                completions(prompt=[99_999]),
            ),
        ),
    ]


def responses_cases() -> list[Case]:
    """Cases of `/v1/responses`."""
    output = {"type": "function_call_output", "call_id": "call_TURN0_0", "output": "84"}
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    include = ["message.output_text.logprobs"]
    echoed = {
        "instructions": "Be short.",
        "metadata": {"a": "b"},
        "max_output_tokens": 32,
        "temperature": 0.5,
        "reasoning": {"effort": "low"},
        "user": "u",
    }
    return [
        *in_both_ways("responses", responses()),
        *in_both_ways("responses-tools", responses(tools=RESPONSES_TOOLS), THOUGHT + CALLS),
        *in_both_ways("responses-reasoning", responses(), THOUGHT + ANSWER),
        *in_both_ways("responses-logprobs", responses(include=include, top_logprobs=2), "84 é"),
        *in_both_ways("responses-length", responses(), change={"finish": {"type": "length"}}),
        *in_both_ways("responses-schema", responses(text=form), '{"answer": 84}'),
        *in_both_ways("responses-echoed", responses(**echoed)),
        Case(
            "responses-previous-id",
            (
                responses(tools=RESPONSES_TOOLS),
                responses([output], tools=RESPONSES_TOOLS, previous_response_id="resp_TURN0"),
            ),
            (CALL, ANSWER),
        ),
        Case(
            "responses-items",
            (
                responses(tools=RESPONSES_TOOLS),
                responses(
                    [
                        {"role": "user", "content": QUESTION},
                        {
                            "type": "function_call",
                            "call_id": "call_TURN0_0",
                            "name": "calculator",
                            "arguments": '{"expression": "12 * 7"}',
                        },
                        output,
                    ],
                    tools=RESPONSES_TOOLS,
                ),
            ),
            (CALL, ANSWER),
        ),
        Case(
            "responses-item-references",
            (
                responses(tools=RESPONSES_TOOLS),
                responses(
                    [
                        {"role": "user", "content": QUESTION},
                        {"type": "item_reference", "id": "rs_TURN0"},
                        {"type": "item_reference", "id": "msg_TURN0"},
                        {"type": "item_reference", "id": "fc_TURN0_0"},
                        output,
                    ],
                    tools=RESPONSES_TOOLS,
                ),
                responses([{"type": "item_reference", "id": "msg_nothing"}]),
            ),
            (THOUGHT + CALL, ANSWER),
        ),
        Case(
            "responses-invalid",
            (
                Request(RESPONSES, "{"),
                Request(RESPONSES, {"model": "policy"}),
                responses(""),
                responses([{"type": "computer_call"}]),
                responses([{"role": "user", "content": [{"type": "input_image"}]}]),
                responses(background=True),
                responses(conversation="c"),
                responses(previous_response_id="resp_nothing"),
                responses(tool_choice="robot"),
            ),
        ),
    ]


def messages_cases() -> list[Case]:
    """Cases of `/v1/messages`."""
    user = {"role": "user", "content": QUESTION}
    block = {
        "type": "tool_use",
        "id": "call_TURN0_0",
        "name": "calculator",
        "input": {"expression": "12 * 7"},
    }
    called = {"role": "assistant", "content": [block]}
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "call_TURN0_0", "content": "84"}],
    }
    thinking = {"type": "enabled", "budget_tokens": 1024}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    return [
        *in_both_ways("messages", messages(system="Be short.")),
        *in_both_ways(
            "messages-tools", messages(tools=MESSAGES_TOOLS, thinking=thinking), THOUGHT + CALLS
        ),
        *in_both_ways("messages-no-thinking", messages(), THOUGHT + ANSWER),
        *in_both_ways("messages-length", messages(), change={"finish": {"type": "length"}}),
        *in_both_ways("messages-stop-string", messages(stop_sequences=["is"]), "The answer is"),
        *in_both_ways("messages-schema", messages(output_config=form), '{"answer": 84}'),
        *in_both_ways(
            "messages-prefill",
            messages(user, {"role": "assistant", "content": "The"}),
            " answer is 84.",
        ),
        Case(
            "messages-tool-loop",
            (
                messages(user, tools=MESSAGES_TOOLS),
                messages(user, called, result, tools=MESSAGES_TOOLS),
            ),
            (CALL, ANSWER),
        ),
        Case(
            "messages-count",
            (Request(f"{MESSAGES}/count_tokens", {"model": "policy", "messages": [user]}),),
        ),
        Case(
            "messages-invalid",
            (
                Request(MESSAGES, "{"),
                Request(MESSAGES, {"model": "policy", "messages": [user]}),
                messages(max_tokens=0),
                messages(thread={"type": "create"}),
                messages(container="container_x"),
                messages({"role": "robot", "content": "hi"}),
                messages({"role": "user", "content": [{"type": "image"}]}),
                messages(tools=[{"type": "custom"}]),
                messages(tools=MESSAGES_TOOLS, tool_choice={"type": "robot"}),
                messages(system=[{"type": "image"}]),
            ),
        ),
    ]


def refusal_cases() -> list[Case]:
    """What every dialect answers to the same mistakes."""
    every = (chat(), completions(), responses(), messages())
    return [
        Case(
            "models",
            (Request("/v1/models", None, "GET"), Request("/v1/models/policy", None, "GET")),
        ),
        Case("refused-no-key", tuple(replace(one, key=None) for one in every)),
        Case("refused-wrong-key", tuple(replace(one, key="nonsense") for one in every)),
        Case("refused-method", tuple(replace(one, method="GET", body=None) for one in every)),
        Case(
            "refused-model",
            tuple(replace(one, body={**one.body, "model": "other"}) for one in every),
        ),
        Case("refused-closed", every, is_closed=True),
        Case("refused-context", every, sections={"model": {"max_context_tokens": 8}}),
        Case("refused-turn-budget", every, sections={"router": {"max_turns_per_episode": 1}}),
        Case(
            "refused-no-server",
            every,
            sections={"router": {"turn_timeout_s": 0.2}},
            has_server=False,
        ),
        Case("refused-by-server", every, change={"fail": 400}),
        Case(
            "refused-in-stream",
            tuple(replace(one, body={**one.body, "stream": True}) for one in every),
            ("fail",),
        ),
    ]


CASES = [
    *chat_cases(),
    *completions_cases(),
    *responses_cases(),
    *messages_cases(),
    *refusal_cases(),
]


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single bytes: no training whose details could change token counts."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


class Names:
    """Names in place of what differs from run to run."""

    def __init__(self, known: dict[str, str]) -> None:
        self._names = dict(known)
        self._num_turns = 0

    def hide(self, text: str) -> str:
        """Ids and times become names."""
        for value, name in self._names.items():
            text = text.replace(value, name)
        text = re.sub(r"[0-9a-f]{24}", self._turn, text)
        # What an error says may be worded better; its code and type are the format.
        text = re.sub(r'"message":"(?:[^"\\]|\\.)*"', '"message":"SENTENCE"', text)
        return re.sub(r'("(?:created|created_at|completed_at)":)[0-9]+', r"\1TIME", text)

    def show(self, text: str) -> str:
        """Names of turns become their ids."""
        for value, name in self._names.items():
            text = text.replace(name, value) if name.startswith("TURN") else text
        return text

    def _turn(self, match: re.Match[str]) -> str:
        name = self._names.get(match[0])
        if name is None:
            name = self._names[match[0]] = f"TURN{self._num_turns}"
            self._num_turns += 1
        return name


async def exchange(http: httpx.AsyncClient, request: Request, key: str, names: Names) -> str:
    """Send one request; both sides as they went over the wire, under their names."""
    body = request.body
    text = "" if body is None else body if isinstance(body, str) else json.dumps(body)
    given = key if request.key == "episode" else request.key
    answer = await http.request(
        request.method,
        request.path,
        content=names.show(text).encode(),
        headers={} if given is None else {"x-api-key": given},
    )
    headers = [
        f"{name}: {answer.headers[name]}" for name in SHOWN_HEADERS if name in answer.headers
    ]
    lines = [f"{request.method} {request.path}", text, "", str(answer.status_code), *headers, ""]
    return names.hide("\n".join(lines) + "\n" + answer.text) + "\n"


def scripts_of(case: Case, renderer: PolicyRenderer) -> Callable[[dict], Script]:
    """What the server generates, call by call; the last text again and again."""
    stop = renderer.stop_ids[0]
    texts = list(case.texts)

    def answer(request: dict) -> Script:
        if texts[0] == "fail":
            ids = renderer.tokenizer.encode(ANSWER)
            is_first = next(calls) % 2 == 0
            return Script(ids=ids, drop_after=6) if is_first else Script([], fail=400)
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        ids = renderer.tokenizer.encode(text)
        stops = request["sampling_params"]["stop"]
        if stops:
            return Script(ids=ids, finish={"type": "stop", "matched": stops[0]})
        script = Script(ids=[*ids, stop], finish={"type": "stop", "matched": stop})
        if "finish" in case.change:
            script.ids.pop()
        return replace(script, **case.change)

    calls = count()
    return answer


async def play(case: Case, make_stage: Callable, folder: Path) -> str:
    """Every exchange of a case."""
    model = {"path": str(folder), **case.sections.get("model", {})}
    stage = await make_stage(**{**case.sections, "model": model})
    renderer = PolicyRenderer(stage.run.settings.model)
    stage.server.answer = scripts_of(case, renderer)
    stage.server.chunk, stage.server.num_rounds = 5, 50
    episode = await stage.open()
    if case.is_closed:
        await stage.post(
            f"/episodes/{episode['episode_id']}/close", {"outcome": "completed", "key": "close"}
        )
    if not case.has_server:
        stage.server.answer = lambda request: Script([], fail=500)
    names = Names(
        {episode["episode_id"]: "EPISODE", stage.url: "ROUTER", stage.server.url: "SERVER"}
    )
    found = [await exchange(stage.http, one, episode["api_key"], names) for one in case.requests]
    return "\n".join(found)


@pytest.mark.medium
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_the_wire_format_is_the_recorded_one(
    case: Case, make_stage: Callable, byte_model: Path
) -> None:
    """Bodies, events, statuses and retry headers, in this order and with these fields."""
    found = await play(case, make_stage, byte_model)
    path = FOLDER / f"{case.name}.http"
    if WRITES:
        path.write_text(found)
    assert found == path.read_text()


def test_every_recorded_case_is_played() -> None:
    """No fixture outlives its case."""
    assert {path.stem for path in FOLDER.iterdir()} == {case.name for case in CASES}
