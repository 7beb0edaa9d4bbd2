"""OpenAI chat completions, the request: its wire format to a turn request.

Owns: field names, types and limits of a body of `/v1/chat/completions`. Does not own: anything
behind `TurnRequest`. Invariant: pure functions; unknown fields are ignored, impossible
values are refused with 400 and the name of the parameter.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from outloop.router.dialects import fields
from outloop.router.dialects.base import Message, Terms, Told, ToolCall, TurnRequest
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
    arguments: str = ""


class _ToolCall(msgspec.Struct):
    id: str = ""
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
    """What tools were before there were tools."""
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
    continue_final_message: bool | None = None
    """As SGLang and vLLM have it: the last message is the beginning of the answer."""


class _Shallow(ChatRequest, kw_only=True):
    """The body with its messages unread: what an earlier request said is not read again."""

    messages: msgspec.Raw  # type: ignore[assignment]


_MAX_TAIL_BYTES = 32 * 1024
_EARLIER = secrets.token_hex(16)
"""The role of a message that no client sends: it stands for all that an earlier body said."""
_EARLIER_JSON = msgspec.json.encode({"role": _EARLIER})
_decoder = msgspec.json.Decoder(ChatRequest)
_shallow = msgspec.json.Decoder(_Shallow)
_messages = msgspec.json.Decoder(list[ChatMessage])


def decode(body: bytes, earlier: Told | None = None) -> TurnRequest:
    """The turn request in a body; messages that it repeats from `earlier` are not read again.

    Raises:
        Refusal: 400, not JSON, or a value that cannot be.
    """
    request = _read_on(body, earlier) if earlier is not None else None
    if request is not None:
        return request
    read = _read_after(body, earlier) if earlier is not None else None
    chat, messages, told = read or _read(body)
    request = _as_request(chat, messages)
    if told is None:
        return request
    if read is not None and not chat.continue_final_message:
        tail = body[len(told.text) :]
        # A long one would be kept for each open episode where no two are alike.
        if len(tail) <= _MAX_TAIL_BYTES:
            told = replace(told, terms=_terms(told.text[: told.num_head], tail))
    return replace(request, told=told)


def _as_request(chat: ChatRequest, messages: tuple[Message, ...]) -> TurnRequest:
    """The body as read; raises as decode."""
    tools = to_tools(bytes(chat.tools))
    if chat.functions:
        fields.refuse(
            "functions",
            "functions is not served, and leaving them out unsaid would leave the policy without; "
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
        stream=bool(chat.stream),
        wants_usage=bool(chat.stream_options and chat.stream_options.include_usage),
    )


def _read_on(body: bytes, earlier: Told) -> TurnRequest | None:
    """As decode, of a body that is an earlier one with more messages; None: it may be another.

    What stands between the earlier body's last message and its end goes on with the list if it
    does so after any other message; then nothing else can have changed.
    """
    terms, num_text = earlier.terms, len(earlier.text)
    if terms is None or not (body.startswith(earlier.text) and body.endswith(terms.tail)):
        return None
    end = len(body) - len(terms.tail)
    if end < num_text:
        return None
    try:
        _, *new = _messages.decode(b"".join((b"[", _EARLIER_JSON, body[num_text:end], b"]")))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not new:
        return replace(terms.request, messages=earlier.messages, told=earlier)
    messages = earlier.messages + to_messages(new, start=len(earlier.messages))
    told = Told(body[:end], earlier.num_head, messages, terms)
    return replace(terms.request, messages=messages, told=told)


@lru_cache(maxsize=256)
def _terms(head: bytes, tail: bytes) -> Terms:
    """What a body says around its messages; most episodes of a run say the same."""
    return Terms(tail, _as_request(_shallow.decode(head + _EARLIER_JSON + tail), ()))


_Read = tuple[ChatRequest, tuple[Message, ...], Told | None]


def _read(body: bytes) -> _Read:
    """The body, its messages, and what the next one may repeat; raises as decode."""
    try:
        chat: ChatRequest = _shallow.decode(body)
        text = bytes(chat.messages)  # type: ignore[arg-type]
        messages = to_messages(_messages.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Read as a whole, it says where it is wrong.
        chat = fields.read(_decoder, body)
        return chat, to_messages(chat.messages), None
    start = body.find(text)
    told = Told(body[: start + len(text[:-1].rstrip())], start + 1, messages)
    return chat, messages, told


def _read_after(body: bytes, earlier: Told) -> _Read | None:
    """As _read, of a body that begins as `earlier` did; None when it has to be read from its start.

    What is repeated is neither read nor passed over: one message stands for it. Where the list that
    is read begins with that message, it is the list that was read before.
    """
    if not body.startswith(earlier.text):
        return None
    num_text = len(earlier.text)
    short = b"".join((earlier.text[: earlier.num_head], _EARLIER_JSON, body[num_text:]))
    try:
        chat: ChatRequest = _shallow.decode(short)
        text = bytes(chat.messages)  # type: ignore[arg-type]
        stand_in, *new = _messages.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return None
    if stand_in.role != _EARLIER:
        return None
    if not new:
        return chat, earlier.messages, earlier
    messages = earlier.messages + to_messages(new, start=len(earlier.messages))
    num_new = len(text[:-1].rstrip()) - len(b"[" + _EARLIER_JSON)
    return chat, messages, Told(body[: num_text + num_new], earlier.num_head, messages)


def to_messages(messages: Sequence[ChatMessage], *, start: int = 0) -> tuple[Message, ...]:
    """Normalised messages; `start` come before them.

    Raises:
        Refusal: 400, none, an unknown role, or content that is not text.
    """
    if not messages:
        raise Refusal(400, "invalid_value", "messages=[]; at least one is needed", param="messages")
    return tuple([_message(index, message) for index, message in enumerate(messages, start)])


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
            ToolCall(call.id, call.function.name, call.function.arguments)
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
                f"messages[{index}].content holds a part of type={part.type!r}; "
                "only text is served. Leave other parts out.",
                param=f"messages[{index}].content",
            )
    return "".join(pieces)


def _tool_choice(choice: str | dict[str, Any] | None) -> str:
    if isinstance(choice, dict):
        function, kind = choice.get("function"), choice.get("type", "function")
        if kind == "function":
            return f"function:{function.get('name') if isinstance(function, dict) else ''}"
        # Tools of other kinds are left out, and so is having to use one.
        return fields.mode_of(choice.get("allowed_tools"))
    if choice not in (None, "auto", "none", "required"):
        raise Refusal(
            400,
            "invalid_value",
            f"tool_choice={choice!r}; allowed: auto, none, required or a function",
            param="tool_choice",
        )
    return choice or "auto"
