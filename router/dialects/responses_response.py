"""Answers of OpenAI's responses, plain and streamed.

Pure functions of a result; the items of a stream are those of its last event and, apart from
reasoning that came after text, those of the plain answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from types import MappingProxyType
from typing import Any

import msgspec

from outloop.buffer.records import Sampling
from outloop.router.dialects import fields
from outloop.router.dialects.base import AnswerHead, CallPlace, Delta, TurnRequest, TurnResult
from outloop.router.errors import ErrorForm, Refusal

_LEFT_OUT = MappingProxyType(
    {"type": "function", "description": None, "parameters": None, "strict": None}
)
"""How an answer repeats the fields that a tool left out."""


def encode(results: Sequence[TurnResult], request: TurnRequest) -> bytes:
    """The body of a plain answer."""
    result = results[0]
    items = _items(result)
    return msgspec.json.encode(_response(_head_of(result), request, items, result))


class ResponsesStream:
    """Server-sent events of one streamed answer."""

    def __init__(self, head: AnswerHead, request: TurnRequest) -> None:
        self._head = head
        self._request = request
        self._shown = StringIO()
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._has_text = False
        self._is_saying = False
        self._reasoned = StringIO()
        self._is_reasoning = False
        self._called: list[tuple[CallPlace, list[str]]] = []
        """Calls so far and the pieces of their arguments; the last one may be open."""
        self._is_calling = False

    def open(self) -> bytes:
        """The empty response, created and in progress."""
        response = _response(self._head, self._request, [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        """A piece of text, or of a call's arguments."""
        if delta.call is not None:
            return self._call(delta.call, delta.text)
        if not delta.is_reasoning:
            self._shown.write(delta.text)
            events = self._end_reasoning() + self._begin_text()
            return events + self._text_event("output_text.delta", delta=delta.text)
        if self._has_text:
            return b""
        self._reasoned.write(delta.text)
        return self._begin_reasoning() + self._reasoning_event("delta", delta=delta.text)

    def close(self, results: Sequence[TurnResult]) -> bytes:
        """The rest of the text, every item's end, and the whole response."""
        result = results[0]
        events = b""
        for item in _items(result, with_text=self._has_text):
            if item["type"] == "message" and not self._called:
                events += self._end_text(item)
            elif item["type"] == "function_call":
                events += self._rest_of_call(item)
            elif item["type"] == "reasoning" and not self._has_text and not self._called:
                # Reasoning that came after text is left out: the text is item 0 already.
                text = item["content"][0]["text"]
                rest = fields.rest_of(text, self._reasoned.getvalue())
                events += self._begin_reasoning()
                events += self._reasoning_event("delta", delta=rest) if rest else b""
                events += self._end_reasoning(text)
        events += self._end_call()
        response = _response(self._head, self._request, self._items, result)
        return events + self._event(f"response.{response['status']}", response=response)

    def _begin_text(self) -> bytes:
        if self._has_text:
            return b""
        self._has_text = self._is_saying = True
        item = _message_item(self._head.turn_id, None, "in_progress")
        return self._event(
            "response.output_item.added", output_index=len(self._items), item=item
        ) + self._text_event("content_part.added", part=_part("", None))

    def _end_text(self, item: dict[str, Any]) -> bytes:
        text = item["content"][0]["text"]
        events = self._begin_text()
        self._is_saying = False
        rest = fields.rest_of(text, self._shown.getvalue())
        if rest:
            events += self._text_event("output_text.delta", delta=rest)
        part = item["content"][0]
        events += self._text_event("output_text.done", text=text, logprobs=part["logprobs"])
        events += self._text_event("content_part.done", part=part)
        return events + self._item_done(item)

    def _text_event(self, name: str, /, **values: Any) -> bytes:
        if name == "output_text.delta":
            values["logprobs"] = []
        return self._event(
            f"response.{name}",
            item_id=f"msg_{self._head.turn_id}",
            output_index=len(self._items),
            content_index=0,
            **values,
        )

    def _call(self, call: CallPlace, piece: str) -> bytes:
        """More of a call's arguments; the first piece ends what came before."""
        events = b""
        if call.number == len(self._called):
            events += self._end_reasoning() + self._end_call()
            if self._is_saying:
                item = _message_item(self._head.turn_id, None, "completed")
                events += self._end_text({**item, "content": [_part(self._shown.getvalue(), None)]})
            self._called.append((call, []))
            self._is_calling = True
            started = {**self._call_item(call, ""), "status": "in_progress"}
            where = len(self._items)
            events += self._event("response.output_item.added", output_index=where, item=started)
        if not piece:
            return events
        self._called[call.number][1].append(piece)
        return events + self._call_event("delta", call, delta=piece)

    def _rest_of_call(self, item: dict[str, Any]) -> bytes:
        """The part of a call that was not shown."""
        call_ids = [call.id for call, _ in self._called]
        is_new = item["call_id"] not in call_ids
        number = len(call_ids) if is_new else call_ids.index(item["call_id"])
        shown = "" if is_new else "".join(self._called[number][1])
        rest = fields.rest_of(item["arguments"], shown)
        place = CallPlace(number=number, id=item["call_id"], name=item["name"])
        return self._call(place, rest) if is_new or rest else b""

    def _end_call(self) -> bytes:
        if not self._is_calling:
            return b""
        self._is_calling = False
        call, pieces = self._called[-1]
        item = self._call_item(call, "".join(pieces))
        done = self._call_event("done", call, arguments=item["arguments"], name=call.name)
        return done + self._item_done(item)

    def _call_event(self, name: str, call: CallPlace, /, **values: Any) -> bytes:
        return self._event(
            f"response.function_call_arguments.{name}",
            item_id=f"fc_{self._head.turn_id}_{call.number}",
            output_index=len(self._items),
            **values,
        )

    def _call_item(self, call: CallPlace, arguments: str) -> dict[str, Any]:
        return _call_item(self._head.turn_id, call.number, call.id, call.name, arguments)

    def _begin_reasoning(self) -> bytes:
        if self._is_reasoning:
            return b""
        self._is_reasoning = True
        item = _reasoning_item(self._head.turn_id, None)
        added = self._event("response.output_item.added", output_index=len(self._items), item=item)
        return added + self._reasoning_part("added", "")

    def _end_reasoning(self, text: str | None = None) -> bytes:
        """The end of an open reasoning item; without `text`, with what was shown of it."""
        if not self._is_reasoning:
            return b""
        text = self._reasoned.getvalue() if text is None else text
        self._is_reasoning = False
        events = self._reasoning_event("done", text=text) + self._reasoning_part("done", text)
        return events + self._item_done(_reasoning_item(self._head.turn_id, text))

    def _reasoning_event(self, name: str, /, **values: Any) -> bytes:
        return self._event(f"response.reasoning_text.{name}", **self._reasoning_place(), **values)

    def _reasoning_part(self, name: str, text: str) -> bytes:
        part = {"type": "reasoning_text", "text": text}
        return self._event(f"response.content_part.{name}", **self._reasoning_place(), part=part)

    def _reasoning_place(self) -> dict[str, Any]:
        item_id = f"rs_{self._head.turn_id}"
        return {"item_id": item_id, "output_index": len(self._items), "content_index": 0}

    def _item_done(self, item: dict[str, Any]) -> bytes:
        event = self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        return event

    def _event(self, name: str, /, **values: Any) -> bytes:
        body = {"type": name, "sequence_number": self._num_events, **values}
        self._num_events += 1
        return fields.event(body, name)


def _error_event(refusal: Refusal) -> bytes:
    error = {"message": str(refusal), "code": refusal.code, "param": refusal.param}
    return fields.event({"type": "error", "sequence_number": 0, **error}, "error")


ERRORS = ErrorForm(Refusal.envelope, _error_event)


def _head_of(result: TurnResult) -> AnswerHead:
    return AnswerHead(
        turn_id=result.turn.turn_id,
        started_at=result.turn.started_at,
        num_prompt_tokens=result.num_prompt_tokens,
        sampling=result.turn.sampling,
    )


def _items(result: TurnResult, *, with_text: bool = False) -> list[dict[str, Any]]:
    message, turn_id = result.message, result.turn.turn_id
    status = "incomplete" if result.turn.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(_reasoning_item(turn_id, message.reasoning))
    if message.text or with_text or not message.tool_calls:
        items.append(_message_item(turn_id, result, status))
    items += (
        _call_item(turn_id, index, call.id, call.name, call.arguments)
        for index, call in enumerate(message.tool_calls)
    )
    return items


def _call_item(
    turn_id: str, number: int, call_id: str, name: str, arguments: str
) -> dict[str, Any]:
    return {
        "id": f"fc_{turn_id}_{number}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }


def _reasoning_item(turn_id: str, text: str | None) -> dict[str, Any]:
    return {
        "id": f"rs_{turn_id}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}] if text is not None else [],
        "status": "completed" if text is not None else "in_progress",
    }


def _message_item(turn_id: str, result: TurnResult | None, status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(result.message.text, result)] if result is not None else [],
    }


def _part(text: str, result: TurnResult | None) -> dict[str, Any]:
    logprobs = [
        fields.sampled_token(token)
        for token in (result.logprobs if result is not None else None) or ()
    ]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _response(
    head: AnswerHead,
    request: TurnRequest,
    items: Sequence[dict[str, Any]],
    result: TurnResult | None,
) -> dict[str, Any]:
    is_cut = result is not None and result.turn.finish_reason == "length"
    ended = "incomplete" if is_cut else "completed"
    return {
        "id": f"resp_{head.turn_id}",
        "object": "response",
        "created_at": int(head.started_at),
        "completed_at": int(result.turn.finished_at) if result is not None and not is_cut else None,
        "status": ended if result is not None else "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": request.model,
        "output": list(items),
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": f"resp_{request.after}" if request.after is not None else None,
        "service_tier": "default",
        "tool_choice": _tool_choice(request.tool_choice),
        "tools": [{**_LEFT_OUT, **tool["function"]} for tool in request.tools],
        "top_logprobs": request.num_top_logprobs,
        "truncation": "disabled",
        "usage": _usage(result) if result is not None else None,
        **request.echoed,
        **_in_force(head.sampling, request),
    }


def _in_force(sampling: Sampling | None, request: TurnRequest) -> dict[str, Any]:
    """Parameters in force, which may differ from those that were asked for."""
    if sampling is None:
        return {"temperature": None, "top_p": None, "max_output_tokens": request.max_new_tokens}
    is_limited = request.max_new_tokens is not None
    found: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_output_tokens": sampling.max_new_tokens if is_limited else None,
    }
    if request.json_schema is not None and not sampling.constraint:
        found["text"] = {**request.echoed["text"], "format": {"type": "text"}}
    return found


def _tool_choice(choice: str) -> str | dict[str, str]:
    kind, is_named, name = choice.partition(":")
    return {"type": kind, "name": name} if is_named else choice


def _usage(result: TurnResult) -> dict[str, Any]:
    num_output = len(result.turn.output_ids)
    return {
        "input_tokens": result.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": result.num_reasoning_tokens},
        "total_tokens": result.num_prompt_tokens + num_output,
    }
