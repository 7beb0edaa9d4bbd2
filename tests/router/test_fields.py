"""Every field of every dialect's requests: used, refused, or ignored and said to be."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from outloop.router.dialects.base import TurnRequest
from outloop.router.dialects.table import DIALECTS
from outloop.router.errors import Refusal

PAGE = Path(__file__).parents[2] / "docs" / "limitations.md"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "tools": [TOOL], "logprobs": True},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {
        "input": HI,
        "tools": [{"type": "function", "name": "f"}],
        "include": ["message.output_text.logprobs"],
    },
    "/v1/messages": {"messages": HI, "max_tokens": 9, "tools": [{"name": "f"}]},
}
SDKS = {
    "/v1/chat/completions": [chat.CompletionCreateParamsStreaming],
    "/v1/completions": [completions.CompletionCreateParamsStreaming],
    "/v1/responses": [responses.ResponseCreateParamsStreaming],
    "/v1/messages": [
        messages.MessageCreateParamsStreaming,
        beta_messages.MessageCreateParamsStreaming,
    ],
}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
VALUES = {
    # Of fields that are used: one that says something else than leaving it out does.
    "model": "policy@1",
    "messages": [*HI, *HI],
    "input": [*HI, *HI],
    "prompt": "ho",
    "system": "s",
    "instructions": "s",
    "tools": [],
    "functions": [{"name": "f"}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "n": 2,
    "best_of": 2,
    "echo": True,
    "suffix": "s",
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "max_output_tokens": 5,
    "top_k": 3,
    "seed": 3,
    "stop": ["s"],
    "stop_sequences": ["s"],
    "logprobs": False,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_object"},
    "output_format": SCHEMA,
    "output_config": {"format": SCHEMA},
    "text": {"format": {"name": "n", **SCHEMA}},
    "include": [],
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "continue_final_message": True,
    "thinking": {"type": "enabled"},
    "thread": "t",
    "container": "c",
    "background": True,
    "previous_response_id": "resp_1",
    "conversation": "c",
}
PER_DIALECT = {
    ("/v1/messages", "tool_choice"): {"type": "any"},
    ("/v1/responses", "prompt"): {"id": "p"},
    ("/v1/completions", "logprobs"): 2,
}
ECHOED = {
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "reasoning": {"effort": "low"},
    "safety_identifier": "s",
    "store": False,
    "user": "u",
}
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def decode(path: str, **fields: Any) -> TurnRequest:
    """The turn request in the path's body with these fields."""
    body = {"model": "policy", **BODIES[path], **fields}
    return DIALECTS[path].dialect.decode(json.dumps(body).encode())


def read(path: str, **fields: Any) -> TurnRequest | Refusal:
    """The same, or why it is refused."""
    try:
        return decode(path, **fields)
    except Refusal as refusal:
        return refusal


def ignored(path: str) -> set[str]:
    """What the page says to be ignored."""
    rows = re.findall(rf"^\| `{re.escape(path)}`[^|]*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("path", SDKS)
def test_a_field_of_the_api_is_read_or_said_to_be_ignored(path) -> None:
    """Whatever the clients' own packages let one send."""
    sent: set[str] = set()
    for kind in SDKS[path]:
        sent |= kind.__required_keys__ | kind.__optional_keys__
    known = set(DIALECTS[path].body.__struct_fields__)
    assert sent - known - ignored(path) == set()


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path in BODIES for name in DIALECTS[path].body.__struct_fields__],
)
def test_a_field_that_is_read_has_its_effect(path, name) -> None:
    """It changes the turn, or is refused by name; or it is repeated in the answer, as is said."""
    if path == "/v1/responses" and name in ECHOED:
        changed = decode(path, **{name: ECHOED[name]})
        assert changed.echoed[name] != decode(path).echoed[name]
        assert name in ignored(path)
        return
    value = PER_DIALECT.get((path, name), 0.5 if name in NUMBERS else VALUES.get(name))
    assert value is not None, f"no value of {name} is known here"
    more = {"messages": [*HI, {"role": "assistant", "content": "It is"}]}
    more = more if name == "continue_final_message" else {}
    found = read(path, **more, **{name: value})
    if isinstance(found, Refusal):
        assert found.param == name
        assert found.code in ("unsupported_parameter", "unsupported_content")
    else:
        assert found != decode(path, **more)


@pytest.mark.parametrize("path", BODIES)
def test_what_is_ignored_changes_nothing(path) -> None:
    """Whatever its value is; unknown fields are ignored too."""
    names = ignored(path) - set(DIALECTS[path].body.__struct_fields__) | {"not_a_field"}
    assert len(names) >= 2
    for name in names:
        for value in (None, 5, "x", [1], {"a": 1}, True):
            assert decode(path, **{name: value}) == decode(path)
