"""Tools of MCP servers, offered to the policy of any rollout function.

    from outloop.envs.adapters.mcp_tools import McpTools

    async def play(task, episode):
        messages = [{"role": "user", "content": task.payload["question"]}]
        async with McpTools({"shop": ["python", "shop_server.py"]}) as tools:
            answer = await tools.converse(episode, messages)
        return float(task.payload["answer"] in answer)

Needs the package `mcp`, 2.3 or newer (`outloop[mcp]`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.envs.rollout.episode import Episode

if TYPE_CHECKING:
    from mcp import Client

_NAME = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_CHARS = 64
_REFUSALS = (-32601, -32602)
"""JSON-RPC's codes for an unknown method and for parameters that are not allowed."""


class McpTools:
    """The tools of one or more MCP servers for one episode; an asynchronous context manager.

    What the policy does wrong (no such tool, arguments that are no JSON object, a tool that
    refuses them) is answered to it as the tool's result. A server that does not start, dies or does
    not answer in time is an EnvironmentFailure.

    Args:
        servers: by name, each a command (a server started for this episode, over its standard
            input and output) or the URL of a streamable HTTP endpoint.
        timeout_s: for one call.
        environment: variables for servers that are started; they get no others of this process but
            those that MCP passes to every server (HOME, PATH and the like).
    """

    def __init__(
        self,
        servers: Mapping[str, Sequence[str] | str],
        *,
        timeout_s: float = 30.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._servers, self._timeout_s = servers, timeout_s
        self._environment = dict(environment or {})
        self._open = AsyncExitStack()
        self._clients: dict[str, tuple[str, Client, str]] = {}
        self.definitions: list[dict[str, Any]] = []
        """The tools as `tools=` of a chat completion; with several servers a tool's name begins
        with its server's."""

    async def __aenter__(self) -> Self:
        try:
            import mcp
        except ModuleNotFoundError as error:
            raise SettingsError(
                "outloop.envs.adapters.mcp_tools needs the package mcp; install it, for example "
                "by: pip install 'outloop[mcp]'"
            ) from error
        try:
            for server, address in self._servers.items():
                transport: str | mcp.StdioServerParameters
                if isinstance(address, str):
                    transport = address
                else:
                    command, *arguments = address
                    transport = mcp.StdioServerParameters(
                        command=command, args=arguments, env=self._environment
                    )
                client = mcp.Client(transport, read_timeout_seconds=self._timeout_s)
                try:
                    await self._open.enter_async_context(client)
                    await self._add_tools(server, client)
                except Exception as error:  # a server may fail in any way
                    raise self._failure(server, "did not start", error) from error
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def call(self, name: str, arguments: str) -> str:
        """Call a tool as a policy asked for it; the text for the policy, its errors included.

        Args:
            arguments: a JSON object as text, as in a chat completion's tool call.

        Raises:
            EnvironmentFailure: the server died or did not answer.
        """
        if name not in self._clients:
            return f"Error: there is no tool {name!r}; there are: {', '.join(self._clients)}"
        try:
            decoded = json.loads(arguments or "{}")
        except ValueError as error:
            return f"Error: the arguments are no JSON: {error}"
        if not isinstance(decoded, dict):
            return "Error: the arguments are no JSON object"
        server, client, own_name = self._clients[name]
        from mcp import MCPError

        try:
            result = await client.call_tool(own_name, decoded)
        except MCPError as error:
            if error.code in _REFUSALS:
                return f"Error: {error}"
            raise self._failure(server, f"failed in {own_name!r}", error) from error
        except Exception as error:  # a connection may break in any way
            raise self._failure(server, f"failed in {own_name!r}", error) from error
        text = "\n".join(
            part.text if part.type == "text" else f"[{part.type}]" for part in result.content
        )
        return f"Error: {text}" if result.is_error else text

    async def converse(
        self, episode: Episode, messages: list[dict[str, Any]], *, max_turns: int = 16
    ) -> str:
        """Let the policy call tools until it answers without; its last text.

        `messages` gets every answer and every tool's result. After `max_turns` answers the last
        text is returned as it is.
        """
        text = ""
        for _ in range(max_turns):
            answer = await episode.client.chat.completions.create(
                model="policy",
                messages=messages,  # type: ignore[arg-type]  # plain dictionaries are allowed
                tools=self.definitions,  # type: ignore[arg-type]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            text = message.content or ""
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                if call.type != "function":
                    continue
                result = await self.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return text

    async def _add_tools(self, server: str, client: Client) -> None:
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                prefix = f"{server}_" if len(self._servers) > 1 else ""
                name = _NAME.sub("_", prefix + tool.name)[:_MAX_NAME_CHARS]
                if name in self._clients:
                    raise SettingsError(
                        f"two tools are named {name!r}, of {self._clients[name][0]!r} and "
                        f"{server!r}; give the servers other names"
                    )
                self._clients[name] = (server, client, tool.name)
                function = {
                    "name": name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                self.definitions.append({"type": "function", "function": function})
            cursor = page.next_cursor
            if cursor is None:
                return

    def _failure(self, server: str, what: str, error: Exception) -> Exception:
        if isinstance(error, SettingsError):
            return error
        address = self._servers[server]
        shown = address if isinstance(address, str) else " ".join(address)
        return EnvironmentFailure(
            f"MCP server {server!r} ({shown}) {what}: {type(error).__name__}: {error}"
        )
