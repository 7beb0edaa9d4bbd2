"""Tools of real MCP servers, started as programs and reached over HTTP."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.envs.adapters.mcp_tools import McpTools

SERVER = '''
import os
import sys

from mcp.server import MCPServer

server = MCPServer("shop")


@server.tool()
def price(item: str) -> int:
    """The price of an item."""
    if item == "crash":
        os._exit(3)
    if item not in ("tea", "cake"):
        raise ValueError(f"no item {item!r}")
    return {"tea": 3, "cake": 5}[item]


server.run(*sys.argv[1:])
'''


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A shop's server as a program."""
    path = tmp_path / "shop.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


@pytest.mark.medium
async def test_tools_are_offered_and_called(command: list[str]) -> None:
    """What the policy does wrong is an answer to it, and never an exception."""
    async with McpTools({"shop": command}) as tools:
        (definition,) = tools.definitions
        assert definition["function"]["name"] == "price"
        assert definition["function"]["description"] == "The price of an item."
        assert definition["function"]["parameters"]["properties"]["item"]["type"] == "string"
        assert await tools.call("price", '{"item": "tea"}') == "3"
        for name, arguments in (
            ("prise", "{}"),
            ("price", "{"),
            ("price", "[]"),
            ("price", '{"item": "gold"}'),
            ("price", '{"thing": 1}'),
        ):
            assert (await tools.call(name, arguments)).startswith("Error: ")


@pytest.mark.medium
async def test_names_of_two_servers_do_not_meet(command: list[str]) -> None:
    """A tool's name begins with its server's."""
    async with McpTools({"one": command, "two": command}) as tools:
        names = [definition["function"]["name"] for definition in tools.definitions]
        assert names == ["one_price", "two_price"]
        assert await tools.call("two_price", '{"item": "cake"}') == "5"


@pytest.mark.medium
async def test_a_server_that_fails_is_the_environments_failure(
    command: list[str], tmp_path: Path
) -> None:
    """One that cannot be started, one that ends at once, and one that dies in a call."""
    for broken in (["/no/such/program"], [sys.executable, "-c", "raise SystemExit(1)"]):
        with pytest.raises(EnvironmentFailure, match="did not start"):
            async with McpTools({"shop": broken}, timeout_s=5):
                pass
    with pytest.raises(EnvironmentFailure, match="failed in 'price'"):
        async with McpTools({"shop": command}, timeout_s=5) as tools:
            await tools.call("price", '{"item": "crash"}')


class Policy:
    """Chat completions in the shape of the openai package, from a list of messages."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = iter(messages)
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **request: Any) -> Any:
        from openai.types.chat import ChatCompletion

        message = {"role": "assistant", **next(self._messages)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return ChatCompletion.model_validate(
            {
                "id": "c",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request["model"],
                "choices": [choice],
            }
        )


@pytest.mark.medium
async def test_a_policy_calls_tools_until_it_answers(command: list[str]) -> None:
    """The conversation holds every call and its result."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "price", "arguments": json.dumps({"item": "cake"})},
    }
    policy = Policy({"tool_calls": [call], "content": None}, {"content": "It costs 5."})
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What does cake cost?"}]
    async with McpTools({"shop": command}) as tools:
        answer = await tools.converse(SimpleNamespace(client=policy), messages)  # type: ignore[arg-type]
    assert answer == "It costs 5."
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "5"}


@pytest.mark.medium
async def test_two_tools_of_one_name_are_refused(command: list[str]) -> None:
    """After names are made fit for a chat completion."""
    with pytest.raises(SettingsError, match="two tools are named 'a_b_price'"):
        async with McpTools({"a b": command, "a.b": command}):
            pass
