"""Requests of OpenAI's responses, `/v1/responses`.

Pure functions; the items of one answer become one assistant message again, so that an answer that
is handed back is recognised.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from outloop.router.dialects import fields
from outloop.router.dialects.base import Message, Reference, ToolCall, TurnRequest

_ROLES: dict[str, Any] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_STATEFUL = ("conversation", "prompt")
_PLAIN = MappingProxyType({"type": "text"})
_PARTS = {"rs": "reasoning", "msg": "text", "fc": "call"}
_ITEM_ID = re.compile(r"(rs|msg|fc)_([^_]+)(?:_([0-9]{1,9}))?")
_LOGPROBS = "message.output_text.logprobs"


class _Part(msgspec.Struct):
    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """One item of a conversation: a message, a function call or its output, reasoning, or the id of
    one that this API answered with."""

    type: str = "message"
    id: str | None = None
    role: str = ""
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str | dict[str, Any] | None = ""
    output: str | list[_Part] | None = None


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct):
    """Body of `POST /v1/responses`."""

    model: str
    input: str | list[Item]
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.field(default_factory=fields.absent)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: _Text | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: _Reasoning | None = None
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


_decoder = msgspec.json.Decoder(ResponsesRequest)


def decode(body: bytes) -> TurnRequest:
    """The turn request in a body.

    Raises:
        Refusal: 400, not JSON, a value that cannot be, or state that is not kept here.
    """
    asked = fields.read(_decoder, body)
    for name in _STATEFUL:
        if getattr(asked, name) is not None:
            fields.refuse(
                name,
                f"{name} is not served: conversations are kept as token ids, not by name; "
                "send the whole conversation as `input`",
                "unsupported_parameter",
            )
    if asked.background:
        fields.refuse(
            "background",
            "background=true is not served; wait for the answer, or stream it",
            "unsupported_parameter",
        )
    tools = _tools(bytes(asked.tools))
    messages, references = _messages(asked)
    wants_logprobs = _LOGPROBS in (asked.include or ())
    return TurnRequest(
        model=asked.model,
        messages=messages,
        references=references,
        after=asked.previous_response_id.removeprefix("resp_")
        if asked.previous_response_id is not None
        else None,
        tools=tools,
        num_tool_bytes=len(bytes(asked.tools)),
        tool_choice=fields.tool_choice_of(_tool_choice(asked.tool_choice), tools),
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        max_new_tokens=fields.whole("max_output_tokens", asked.max_output_tokens, 1, None),
        asked=fields.asked(asked),
        json_schema=fields.json_schema(
            "text.format", asked.text.format if asked.text is not None else None, None
        ),
        wants_logprobs=wants_logprobs,
        num_top_logprobs=fields.top_logprobs(asked.top_logprobs, is_asked=wants_logprobs),
        stream=bool(asked.stream),
        wants_usage=True,
        echoed=_echoed(asked),
    )


def _echoed(asked: ResponsesRequest) -> dict[str, Any]:
    """Fields that answers repeat and that have no other use here."""
    text, reasoning = asked.text or _Text(), asked.reasoning or _Reasoning()
    return {
        "instructions": asked.instructions,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": asked.safety_identifier,
        "store": asked.store is not False,
        "text": {"format": text.format or dict(_PLAIN), "verbosity": text.verbosity or "medium"},
        "user": asked.user,
    }


def _messages(asked: ResponsesRequest) -> tuple[tuple[Message, ...], tuple[Reference, ...]]:
    conversation = _Conversation()
    if asked.instructions:
        conversation.messages.append(Message("system", asked.instructions))
    if isinstance(asked.input, str):
        conversation.messages.append(Message("user", asked.input))
    else:
        fields.check_number("input", len(asked.input))
        texts = [text for item in asked.input for text in (item.content, item.output)]
        fields.check_number(
            "input.content", sum(len(text) for text in texts if isinstance(text, list))
        )
        conversation.read(asked.input)
    if not asked.input or not conversation.messages:
        fields.refuse("input", "input is empty; a text or at least one message is needed")
    return tuple(conversation.messages), tuple(conversation.references)


class _Conversation:
    """Items to messages: reasoning, text and calls that follow each other are one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.references: list[Reference] = []
        self._reasoning = ""
        self._text: str | None = None
        self._calls: list[ToolCall] = []
        self._turn_id: str | None = None
        """The turn that references to the message under way name."""

    def read(self, items: Sequence[Item]) -> None:
        """Add every item's part in the conversation.

        Raises:
            Refusal: 400, an unknown role or kind of item, or content that is not text.
        """
        for index, item in enumerate(items):
            where = f"input[{index}]"
            if item.type == "reasoning":
                self._begin_reasoning()
                self._reasoning += _text(f"{where}.content", item.content)
            elif item.type == "function_call":
                self._calls.append(
                    ToolCall(item.call_id, item.name, fields.arguments(item.arguments))
                )
            elif item.type == "function_call_output":
                self._end_answer()
                output = _text(f"{where}.output", item.output)
                self.messages.append(Message("tool", output, tool_call_id=item.call_id))
            elif item.type == "message":
                self._add_message(where, item)
            elif item.type == "item_reference":
                self._add_reference(f"{where}.id", item.id or "")
            else:
                fields.refuse(
                    f"{where}.type",
                    f"{where}.type={item.type!r}; allowed: message, function_call, "
                    "function_call_output, reasoning, item_reference. Leave other items out.",
                    "unsupported_content",
                )
        self._end_answer()

    def _add_reference(self, param: str, item_id: str) -> None:
        """A place in the message for an item that the episode knows."""
        match = _ITEM_ID.fullmatch(item_id)
        turn_id = match[2] if match is not None else ""
        part: Any = _PARTS[match[1]] if match is not None else "text"
        if self._turn_id not in (None, turn_id):
            self._end_answer()
        if part == "reasoning":
            self._begin_reasoning()
        elif part == "text":
            self._begin_text("")
        self.references.append(
            Reference(
                item_id=item_id,
                param=param,
                message=len(self.messages),
                turn_id=turn_id,
                part=part,
                call=int(match[3] or 0) if match is not None else 0,
                position=len(self._calls),
            )
        )
        if part == "call":
            self._calls.append(ToolCall("", "", ""))
        self._turn_id = turn_id

    def _add_message(self, where: str, item: Item) -> None:
        role = _ROLES.get(item.role)
        if role is None:
            fields.refuse(
                f"{where}.role", f"{where}.role={item.role!r}; allowed: {', '.join(_ROLES)}"
            )
        text = _text(f"{where}.content", item.content)
        if role != "assistant":
            self._end_answer()
            self.messages.append(Message(role, text))
        else:
            self._begin_text(text)

    def _begin_reasoning(self) -> None:
        if self._text is not None or self._calls:
            self._end_answer()

    def _begin_text(self, text: str) -> None:
        if self._text is not None or self._calls:
            self._end_answer()
        self._text = text

    def _end_answer(self) -> None:
        has_reference = self._turn_id is not None
        if self._text is not None or self._calls or self._reasoning or has_reference:
            self.messages.append(
                Message("assistant", self._text or "", self._reasoning, tuple(self._calls))
            )
        self._reasoning, self._text, self._calls, self._turn_id = "", None, [], None


def _text(where: str, content: str | list[_Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    pieces = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            fields.refuse(
                where,
                fields.no_text(where, "part", part.type),
                "unsupported_content",
            )
        pieces.append(text)
    return "".join(pieces)


@lru_cache(maxsize=256)
def _tools(raw: bytes) -> tuple[dict[str, Any], ...]:
    functions = []
    for index, tool in enumerate(fields.tool_objects(raw)):
        if tool.get("type") != "function":
            continue
        if not isinstance(tool.get("name"), str):
            fields.refuse(
                f"tools[{index}]",
                f"tools[{index}] has no name; a function tool is "
                '{"type": "function", "name": ..., "parameters": ...}',
            )
        functions.append(
            fields.function_tool(
                tool["name"], tool.get("description"), tool.get("parameters"), tool.get("strict")
            )
        )
    return tuple(functions)


def _tool_choice(choice: str | dict[str, Any] | None) -> str:
    if isinstance(choice, dict):
        if choice.get("type") == "function":
            return f"function:{choice.get('name')}"
        return fields.mode_of(choice) if choice.get("type") == "allowed_tools" else "auto"
    if choice == "any":
        return "required"
    if choice not in (None, "auto", "none", "required"):
        fields.refuse(
            "tool_choice",
            f"tool_choice={choice!r}; allowed: auto, none, required or a function",
        )
    return choice or "auto"
