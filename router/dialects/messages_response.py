"""Answers and errors of Anthropic's messages, plain and streamed.

Pure functions of a result; the blocks of a stream are those of the plain answer, apart from
thinking that came after text.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

import msgspec

from outloop.router.dialects import fields
from outloop.router.dialects.base import AnswerHead, CallPlace, Delta, TurnRequest, TurnResult
from outloop.router.errors import ErrorForm, Refusal

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def encode(results: Sequence[TurnResult], request: TurnRequest) -> bytes:
    """The body of a plain answer."""
    result = results[0]
    body = _message(result.turn.turn_id, request.model, result.num_prompt_tokens)
    body["content"] = _blocks(result, request)
    body |= _end(result)
    body["usage"]["output_tokens"] = len(result.turn.output_ids)
    return msgspec.json.encode(body)


def encode_count(num_tokens: int) -> bytes:
    """The answer of `/v1/messages/count_tokens`."""
    return msgspec.json.encode({"input_tokens": num_tokens})


class MessagesStream:
    """Server-sent events of one streamed answer."""

    def __init__(self, head: AnswerHead, request: TurnRequest) -> None:
        self._head = head
        self._request = request
        self._shown = StringIO()
        self._reasoned = StringIO()
        self._block: str | None = None
        """The type of the block that is open."""
        self._has_text = False
        self._num_blocks = 0
        self._called: list[tuple[str, list[str]]] = []
        """The id and the pieces of the input of each call so far; the last is the open block."""

    def open(self) -> bytes:
        """The message, still empty."""
        head = self._head
        message = _message(head.turn_id, self._request.model, head.num_prompt_tokens)
        return _event("message_start", message=message)

    def delta(self, delta: Delta) -> bytes:
        """A piece of text, or of a call's input."""
        if delta.call is not None:
            return self._call(delta.call, delta.text)
        if not delta.is_reasoning:
            self._shown.write(delta.text)
            return self._begin("text") + self._delta({"type": "text_delta", "text": delta.text})
        if not self._request.wants_reasoning or self._has_text:
            return b""
        self._reasoned.write(delta.text)
        return self._begin("thinking") + self._think(delta.text)

    def close(self, results: Sequence[TurnResult]) -> bytes:
        """What was held back, tool calls, why it ended, and the end."""
        result = results[0]
        events = b""
        for block in _blocks(result, self._request):
            if block["type"] == "text" and not self._called:
                rest = fields.rest_of(block["text"], self._shown.getvalue())
                events += self._begin("text")
                events += self._delta({"type": "text_delta", "text": rest}) if rest else b""
            elif block["type"] == "tool_use":
                events += self._rest_of_call(block)
            elif block["type"] == "thinking" and not self._has_text and not self._called:
                # Thinking that came after text is left out: the text is block 0 already.
                rest = fields.rest_of(block["thinking"], self._reasoned.getvalue())
                events += self._begin("thinking") + (self._think(rest) if rest else b"")
        events += self._end()
        usage = {
            "input_tokens": result.num_prompt_tokens,
            "output_tokens": len(result.turn.output_ids),
        }
        events += _event("message_delta", delta=_end(result), usage=usage)
        return events + _event("message_stop")

    def _call(self, call: CallPlace, piece: str) -> bytes:
        """More of a call's input; the first piece begins its block."""
        events = b""
        if call.number == len(self._called):
            self._called.append((call.id, []))
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events = self._end() + self._start(block)
        if not piece:
            return events
        self._called[call.number][1].append(piece)
        return events + self._delta({"type": "input_json_delta", "partial_json": piece})

    def _rest_of_call(self, block: dict[str, Any]) -> bytes:
        """The part of a call that was not shown."""
        whole = bytes(block["input"]).decode()
        number = next(
            (n for n, (call_id, _) in enumerate(self._called) if call_id == block["id"]),
            len(self._called),
        )
        shown = "".join(self._called[number][1]) if number < len(self._called) else ""
        rest = fields.rest_of(whole, shown)
        if number < len(self._called) and not rest:
            return b""
        return self._call(CallPlace(number=number, id=block["id"], name=block["name"]), rest)

    def _begin(self, kind: str) -> bytes:
        """Open a block of text or thinking, unless it is open."""
        if self._block == kind:
            return b""
        self._has_text = self._has_text or kind == "text"
        empty = {"signature": ""} if kind == "thinking" else {}
        return self._end() + self._start({"type": kind, kind: "", **empty})

    def _end(self) -> bytes:
        if self._block is None:
            return b""
        self._block = None
        event = _event("content_block_stop", index=self._num_blocks)
        self._num_blocks += 1
        return event

    def _start(self, block: dict[str, Any]) -> bytes:
        self._block = block["type"]
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _think(self, text: str) -> bytes:
        return self._delta({"type": "thinking_delta", "thinking": text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)


def _error(refusal: Refusal) -> dict[str, Any]:
    default = "invalid_request_error" if refusal.status < 500 else "api_error"
    error: dict[str, Any] = {
        "type": _ERROR_TYPES.get(refusal.status, default),
        "message": str(refusal),
        "code": refusal.code,
        "param": refusal.param,
    }
    if refusal.details is not None:
        error["details"] = refusal.details
    return {"type": "error", "error": error}


def _error_event(refusal: Refusal) -> bytes:
    return fields.event(_error(refusal), "error")


ERRORS = ErrorForm(lambda refusal: msgspec.json.encode(_error(refusal)), _error_event)


def _event(name: str, /, **values: Any) -> bytes:
    return fields.event({"type": name, **values}, name)


def _message(turn_id: str, model: str, num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": num_prompt_tokens, "output_tokens": 0},
    }


def _blocks(result: TurnResult, request: TurnRequest) -> list[dict[str, Any]]:
    message = result.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning and request.wants_reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.text or not message.tool_calls:
        blocks.append({"type": "text", "text": message.text})
    blocks += (
        {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": msgspec.Raw(call.arguments.encode()),
        }
        for call in message.tool_calls
    )
    return blocks


def _end(result: TurnResult) -> dict[str, Any]:
    finish = result.turn.finish_reason
    if finish == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if result.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": result.stop_text}
    return {"stop_reason": "end_turn", "stop_sequence": None}
