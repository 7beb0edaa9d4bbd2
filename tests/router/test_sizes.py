"""How many items one request may have, in every dialect."""

import json

import pytest

from outloop.router.dialects.fields import MAX_ITEMS
from outloop.router.dialects.table import DIALECTS
from outloop.router.errors import Refusal

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS = "/v1/completions"
HI = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
TOOL = {"type": "function", "function": {"name": "f"}}


def in_messages(*parts: int) -> list[dict]:
    """Messages with so many parts."""
    return [{"role": "user", "content": [TEXT] * number} for number in parts]


SIZES = {
    # What n items make of a body, by dialect, and the parameter that a refusal names.
    (CHAT, "messages"): lambda n: {"messages": [HI] * n},
    (CHAT, "messages.content"): lambda n: {"messages": in_messages(n)},
    (CHAT, "messages.content of all"): lambda n: {"messages": in_messages(n - 9, 9)},
    (CHAT, "messages.content, calls"): lambda n: {
        "messages": [HI, {"role": "assistant", "tool_calls": [CALL] * n}]
    },
    (CHAT, "tools"): lambda n: {"messages": [HI], "tools": [TOOL] * n},
    (MESSAGES, "messages"): lambda n: {"messages": [HI] * n},
    (MESSAGES, "messages.content"): lambda n: {"messages": in_messages(n)},
    (MESSAGES, "messages.content of all"): lambda n: {"messages": in_messages(n - 9, 9)},
    (MESSAGES, "messages.content, results"): lambda n: {
        "messages": [{"role": "user", "content": [{**RESULT, "content": [TEXT] * (n - 1)}]}]
    },
    (MESSAGES, "messages.content, system"): lambda n: {"messages": [HI], "system": [TEXT] * n},
    (MESSAGES, "tools"): lambda n: {"messages": [HI], "tools": [{"name": "f"}] * n},
    (RESPONSES, "input"): lambda n: {"input": [HI] * n},
    (RESPONSES, "input.content"): lambda n: {"input": in_messages(n)},
    (RESPONSES, "input.content of all"): lambda n: {"input": in_messages(n - 9, 9)},
    (RESPONSES, "input.content, results"): lambda n: {
        "input": [{"type": "function_call_output", "call_id": "c", "output": [TEXT] * n}]
    },
    (RESPONSES, "tools"): lambda n: {
        "input": "hi",
        "tools": [{"type": "function", "name": "f"}] * n,
    },
}
STOPS = {
    CHAT: ("stop", {"messages": [HI]}),
    MESSAGES: ("stop_sequences", {"messages": [HI]}),
    COMPLETIONS: ("stop", {"prompt": "hi"}),
}


def decode(path: str, body: dict):
    """The turn request in a body."""
    return DIALECTS[path].dialect.decode(
        json.dumps({"model": "policy", "max_tokens": 9, **body}).encode()
    )


@pytest.mark.parametrize(("path", "name"), SIZES)
def test_a_request_has_at_most_so_many_items(path, name) -> None:
    """Each costs far more than its bytes; one more is refused by name."""
    make = SIZES[path, name]
    decode(path, make(MAX_ITEMS))
    with pytest.raises(Refusal, match="at most 4096") as refused:
        decode(path, make(MAX_ITEMS + 1))
    assert refused.value.status == 400
    assert refused.value.param == name.split(",")[0].removesuffix(" of all")


@pytest.mark.parametrize("path", STOPS)
@pytest.mark.parametrize("given", [["x"] * 17, ["x" * 4097], ["x" * 400] * 11, [""]])
def test_stop_strings_are_few_and_short(path, given) -> None:
    """A server looks for each of them at every token."""
    name, body = STOPS[path]
    decode(path, {**body, name: ["x" * 256] * 16})
    with pytest.raises(Refusal, match="at most 16") as refused:
        decode(path, {**body, name: given})
    assert refused.value.param == name
    assert len(str(refused.value)) < 300
