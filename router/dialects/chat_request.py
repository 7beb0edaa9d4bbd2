"""Requests of OpenAI's chat completions, `/v1/chat/completions`.

Pure functions. Unknown fields are ignored; invalid values are refused with 400 and the name of the
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from outloop.router.dialects import fields
from outloop.router.dialects.base import Message, ToolCall, TurnRequest
from outloop.router.errors import Refusal

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str | dict[str, Any] | None = ""


class _ToolCall(msgspec.Struct):
    id: str | None = ""
    type: str = "function"
    function: _Function = msgspec.field(default_factory=_Function)


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct):
    """One message as OpenAI's API has it."""

    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    """Body of `POST /v1/chat/completions`."""

    model: str
    messages: list[ChatMessage]
    tools: msgspec.Raw = msgspec.field(default_factory=fields.absent)
    functions: list[Any] | None = None
    """Deprecated by OpenAI in favour of `tools`."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    """As vLLM has it."""
    continue_final_message: bool | None = None
    """As SGLang and vLLM have it: the last message is the beginning of the answer."""


_decoder = msgspec.json.Decoder(ChatRequest)


def decode(body: bytes) -> TurnRequest:
    """The turn request in a body.

    Raises:
        Refusal: 400, not JSON, or a value that cannot be.
    """
    chat = fields.read(_decoder, body)
    messages = to_messages(chat.messages)
    tools = to_tools(bytes(chat.tools))
    if chat.functions:
        fields.refuse(
            "functions",
            "functions is not served, and to ignore it would leave the policy without tools; "
            'send each as {"type": "function", "function": ...} in tools',
            "unsupported_parameter",
        )
    prefill = ""
    if chat.continue_final_message:
        messages, prefill = fields.split_prefill(messages)
    return TurnRequest(
        model=chat.model,
        messages=messages,
        prefill=prefill,
        tools=tools,
        num_tool_bytes=len(bytes(chat.tools)),
        tool_choice=fields.tool_choice_of(_tool_choice(chat.tool_choice), tools),
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        num_choices=fields.whole("n", chat.n, 1, fields.MAX_CHOICES) or 1,
        max_new_tokens=fields.whole("max_tokens", chat.max_tokens, 1, None)
        if chat.max_completion_tokens is None
        else fields.whole("max_completion_tokens", chat.max_completion_tokens, 1, None),
        asked=fields.asked(chat),
        has_logit_bias=bool(chat.logit_bias),
        json_schema=fields.json_schema("response_format", chat.response_format, "json_schema"),
        stop=fields.stops("stop", chat.stop),
        seed=fields.seed(chat.seed),
        wants_logprobs=bool(chat.logprobs),
        num_top_logprobs=fields.top_logprobs(chat.top_logprobs, is_asked=bool(chat.logprobs)),
        wants_token_ids=bool(chat.return_token_ids),
        stream=bool(chat.stream),
        wants_usage=bool(chat.stream_options and chat.stream_options.include_usage),
    )


def to_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Normalised messages.

    Raises:
        Refusal: 400, none, an unknown role, or content that is not text.
    """
    if not messages:
        raise Refusal(400, "invalid_value", "messages=[]; at least one is needed", param="messages")
    fields.check_number("messages", len(messages))
    parts = [message.content for message in messages if isinstance(message.content, list)]
    calls = [message.tool_calls for message in messages if message.tool_calls]
    fields.check_number("messages.content", sum(map(len, parts)) + sum(map(len, calls)))
    return tuple([_message(index, message) for index, message in enumerate(messages)])


@lru_cache(maxsize=256)
def to_tools(raw: bytes) -> tuple[dict[str, Any], ...]:
    """The function tools among `raw`, as sent; other kinds are left out.

    Raises:
        Refusal: 400, not a list of objects, or a function without a name.
    """
    functions = [
        tool for tool in fields.tool_objects(raw) if tool.get("type", "function") == "function"
    ]
    for index, tool in enumerate(functions):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(
                400,
                "invalid_value",
                f"tools[{index}] has no function.name; a function tool is "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}',
                param=f"tools[{index}]",
            )
    return tuple(functions)


def _message(index: int, message: ChatMessage) -> Message:
    role: Any = _ROLES.get(message.role)
    if role is None:
        raise Refusal(
            400,
            "invalid_value",
            f"messages[{index}].role={message.role!r}; allowed: {', '.join(_ROLES)}",
            param=f"messages[{index}].role",
        )
    content = message.content
    text = content if isinstance(content, str) else _text_of(index, content or ())
    calls: tuple[ToolCall, ...] = ()
    if message.tool_calls:
        calls = tuple(
            ToolCall(call.id or "", call.function.name, fields.arguments(call.function.arguments))
            for call in message.tool_calls
        )
    return Message(
        role,
        text,
        message.reasoning_content or "",
        calls,
        message.tool_call_id or "",
        message.name or "",
    )


def _text_of(index: int, parts: Sequence[_Part]) -> str:
    pieces = []
    for part in parts:
        if part.type == "refusal":
            pieces.append(part.refusal or "")
        elif part.text is not None and part.type in ("text", "input_text", "output_text"):
            pieces.append(part.text)
        else:
            raise Refusal(
                400,
                "unsupported_content",
                fields.no_text(f"messages[{index}].content", "part", part.type),
                param=f"messages[{index}].content",
            )
    return "".join(pieces)


def _tool_choice(choice: str | dict[str, Any] | None) -> str:
    if isinstance(choice, dict):
        function, kind = choice.get("function"), choice.get("type", "function")
        if kind == "function":
            return f"function:{function.get('name') if isinstance(function, dict) else ''}"
        # Tools of other kinds are left out, and so is the demand to use one.
        return fields.mode_of(choice.get("allowed_tools"))
    if choice == "any":
        return "required"
    if choice not in (None, "auto", "none", "required"):
        raise Refusal(
            400,
            "invalid_value",
            f"tool_choice={choice!r}; allowed: auto, none, required or a function",
            param="tool_choice",
        )
    return choice or "auto"
