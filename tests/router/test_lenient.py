"""What clients send that differs a little from the APIs and has one meaning only."""

import codecs
import json

import pytest

from outloop.router.dialects import chat_request, responses_request

CALL = {"name": "f", "arguments": {"x": 1}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_arguments_may_come_back_as_an_object_and_a_call_without_an_id() -> None:
    """As some agents keep them."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": None, "function": CALL}]}
    body = {"model": "policy", "messages": [{"role": "user", "content": "go"}, called]}
    (call,) = chat_request.decode(json.dumps(body).encode()).messages[1].tool_calls
    assert (call.id, json.loads(call.arguments)) == ("", {"x": 1})
    item = {"type": "function_call", "call_id": "c", **CALL}
    body = {"model": "policy", "input": [{"role": "user", "content": "go"}, item]}
    (call,) = responses_request.decode(json.dumps(body).encode()).messages[1].tool_calls
    assert json.loads(call.arguments) == {"x": 1}


def test_any_is_required() -> None:
    """Anthropic's and Mistral's word."""
    body = {"model": "policy", "tool_choice": "any", "tools": TOOLS}
    chat = {**body, "messages": [{"role": "user", "content": "go"}]}
    assert chat_request.decode(json.dumps(chat).encode()).tool_choice == "required"
    tools = [{"type": "function", "name": "f"}]
    asked = {**body, "input": "go", "tools": tools}
    assert responses_request.decode(json.dumps(asked).encode()).tool_choice == "required"


def test_a_byte_order_mark_is_passed_over() -> None:
    """RFC 8259 section 8.1 lets parsers do so."""
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "go"}]})
    assert chat_request.decode(codecs.BOM_UTF8 + body.encode()).messages[0].text == "go"


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/models/"])
async def test_a_slash_at_the_end_of_a_path_changes_nothing(stage, path: str) -> None:
    """The same route."""
    stage.says("fine")
    key = (await stage.open())["api_key"]
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    answer = await (stage.get(path, key) if "models" in path else stage.post(path, body, key))
    assert answer.status_code == 200
