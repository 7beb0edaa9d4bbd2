"""Requests of Anthropic's messages, `/v1/messages`.

Pure functions; the blocks of one answer become one assistant message again, so that an answer that
is handed back is recognised.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from outloop.router.dialects import fields
from outloop.router.dialects.base import Message, ToolCall, TurnRequest
from outloop.router.errors import Refusal

_BETWEEN_TEXTS = "\n"
_BILLING = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _no_input() -> msgspec.Raw:
    return msgspec.Raw(b"{}")


class Block(msgspec.Struct):
    """A content block: text, a tool call, its result, or thinking."""

    type: str = "text"
    text: str | None = None
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.field(default_factory=_no_input)
    tool_use_id: str = ""
    content: str | list[Block] | None = None


class MessageParam(msgspec.Struct):
    """One message as Anthropic's API has it."""

    role: str
    content: str | list[Block]


class _ToolChoice(msgspec.Struct):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: str = ""


class _OutputConfig(msgspec.Struct):
    format: dict[str, Any] | None = None


class MessagesRequest(msgspec.Struct):
    """Body of `POST /v1/messages`."""

    model: str
    messages: list[MessageParam]
    max_tokens: int
    system: str | list[Block] | None = None
    tools: msgspec.Raw = msgspec.field(default_factory=fields.absent)
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: _Thinking | None = None
    output_format: dict[str, Any] | None = None
    output_config: _OutputConfig | None = None
    stream: bool | None = None
    thread: Any = None
    container: Any = None


class CountRequest(msgspec.Struct):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: list[MessageParam]
    system: str | list[Block] | None = None
    tools: msgspec.Raw = msgspec.field(default_factory=fields.absent)
    thread: Any = None
    container: Any = None


_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


def decode(body: bytes) -> TurnRequest:
    """The turn request in a body.

    Raises:
        Refusal: 400, not JSON, or a value that cannot be.
    """
    asked = fields.read(_decoder, body)
    choice = asked.tool_choice
    tools = _tools(bytes(asked.tools))
    messages, prefill = fields.split_prefill(_messages(asked))
    return TurnRequest(
        model=asked.model,
        messages=messages,
        prefill=prefill,
        tools=tools,
        num_tool_bytes=len(bytes(asked.tools)),
        tool_choice=fields.tool_choice_of(_tool_choice(choice), tools),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        max_new_tokens=fields.whole("max_tokens", asked.max_tokens, 1, None),
        asked=fields.asked(asked),
        json_schema=fields.json_schema("output_format", asked.output_format, None)
        or fields.json_schema(
            "output_config.format",
            asked.output_config.format if asked.output_config is not None else None,
            None,
        ),
        stop=fields.stops("stop_sequences", asked.stop_sequences),
        wants_reasoning=asked.thinking is not None and asked.thinking.type != "disabled",
        stream=bool(asked.stream),
        wants_usage=True,
    )


def decode_count(body: bytes) -> TurnRequest:
    """The turn request whose ids are to be counted.

    Raises:
        Refusal: 400, not JSON, or a value that cannot be.
    """
    asked = fields.read(_count_decoder, body)
    messages, prefill = fields.split_prefill(_messages(asked))
    tools = _tools(bytes(asked.tools))
    return TurnRequest(
        model=asked.model,
        messages=messages,
        prefill=prefill,
        tools=tools,
        num_tool_bytes=len(bytes(asked.tools)),
    )


def _messages(asked: MessagesRequest | CountRequest) -> tuple[Message, ...]:
    _refuse_state(asked)
    messages = []
    system = _system(asked.system)
    if system:
        messages.append(Message("system", system))
    if not asked.messages:
        fields.refuse("messages", "messages=[]; at least one is needed")
    fields.check_number("messages", len(asked.messages))
    num_parts = sum(_num_parts(message.content) for message in asked.messages)
    fields.check_number("messages.content", num_parts + _num_parts(asked.system))
    for index, message in enumerate(asked.messages):
        where = f"messages[{index}]"
        if message.role == "assistant":
            messages.append(_answer(where, message.content))
        elif message.role == "user":
            messages += _user_messages(where, message.content)
        elif message.role == "system":
            messages.append(Message("system", _text(f"{where}.content", message.content)))
        else:
            fields.refuse(
                f"{where}.role",
                f"{where}.role={message.role!r}; allowed: user, assistant, system",
            )
    return tuple(messages)


def _system(system: str | list[Block] | None) -> str:
    """The system prompt without the line that Claude Code puts there for Anthropic's servers: it
    differs in each request, so that no prompt would begin as the one before."""
    if isinstance(system, list):
        blocks = [_without_billing(_text_of("system", block)) for block in system]
        return _BETWEEN_TEXTS.join(text for text in blocks if text is not None)
    return _without_billing(system or "") or ""


def _without_billing(text: str) -> str | None:
    """`text` without the line; None: nothing else was in it."""
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2] or None


def _num_parts(content: str | list[Block] | None) -> int:
    if not isinstance(content, list):
        return 0
    return len(content) + sum(_num_parts(block.content) for block in content)


def _refuse_state(asked: MessagesRequest | CountRequest) -> None:
    """Refuse state that Anthropic's API keeps: `messages` would be a part of the conversation.

    `details` tell Anthropic's tool runners to continue without threads, with whole histories.
    """
    if asked.thread is not None:
        raise Refusal(
            400,
            "unsupported_parameter",
            "thread is not served: send the whole conversation as `messages`, without `thread`",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    if asked.container is not None:
        fields.refuse(
            "container",
            "container is not served: no code runs here; leave it out",
            "unsupported_parameter",
        )


def _answer(where: str, content: str | list[Block]) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    texts, reasoning, calls = [], [], []
    for block in content:
        if block.type == "tool_use":
            calls.append(ToolCall(block.id, block.name, bytes(block.input).decode()))
        elif block.type == "thinking":
            reasoning.append(block.thinking)
        elif block.type != "redacted_thinking":
            texts.append(_text_of(where, block))
    return Message("assistant", "".join(texts), "".join(reasoning), tuple(calls))


def _user_messages(where: str, content: str | list[Block]) -> list[Message]:
    """Tool results and the user's texts between them, in order."""
    if isinstance(content, str):
        return [Message("user", content)]
    messages: list[Message] = []
    texts: list[str] = []
    for block in content:
        if block.type != "tool_result":
            texts.append(_text_of(where, block))
            continue
        if texts:
            messages.append(Message("user", _BETWEEN_TEXTS.join(texts)))
            texts = []
        result = _text(f"{where}.content", block.content)
        messages.append(Message("tool", result, tool_call_id=block.tool_use_id))
    if texts or not messages:
        messages.append(Message("user", _BETWEEN_TEXTS.join(texts)))
    return messages


def _text(where: str, content: str | list[Block] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return _BETWEEN_TEXTS.join(_text_of(where, block) for block in content)


def _text_of(where: str, block: Block) -> str:
    if block.type != "text" or block.text is None:
        fields.refuse(
            where,
            fields.no_text(where, "block", block.type),
            "unsupported_content",
        )
    return block.text


@lru_cache(maxsize=256)
def _tools(raw: bytes) -> tuple[dict[str, Any], ...]:
    functions = []
    for index, tool in enumerate(fields.tool_objects(raw)):
        if tool.get("type") not in (None, "custom"):
            continue
        if not isinstance(tool.get("name"), str):
            fields.refuse(
                f"tools[{index}]",
                f'tools[{index}] has no name; a tool is {{"name": ..., "input_schema": ...}}',
            )
        functions.append(
            fields.function_tool(tool["name"], tool.get("description"), tool.get("input_schema"))
        )
    return tuple(functions)


def _tool_choice(choice: _ToolChoice | None) -> str:
    if choice is None:
        return "auto"
    if choice.type == "tool":
        return f"function:{choice.name}"
    if choice.type not in _CHOICES:
        fields.refuse(
            "tool_choice", f"tool_choice.type={choice.type!r}; allowed: auto, any, tool, none"
        )
    return _CHOICES[choice.type]
