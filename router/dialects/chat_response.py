"""Answers of OpenAI's chat completions, plain and streamed.

Pure functions of results; the deltas of a stream concatenate to the plain answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from io import StringIO
from types import MappingProxyType
from typing import Any

import msgspec

from outloop.router.dialects import fields
from outloop.router.dialects.base import (
    AnswerHead,
    CallPlace,
    Delta,
    Message,
    TurnRequest,
    TurnResult,
)

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def encode(results: Sequence[TurnResult], request: TurnRequest) -> bytes:
    """The body of a plain answer."""
    first = results[0].turn
    return msgspec.json.encode(
        _prompt_ids(results[0])
        | {
            "id": f"chatcmpl-{first.turn_id}",
            "object": "chat.completion",
            "created": int(first.started_at),
            "model": request.model,
            "choices": [
                {
                    "index": index,
                    "message": _answer(result.message),
                    "logprobs": _logprobs(result),
                    "finish_reason": result.turn.finish_reason,
                    **_token_ids(result),
                }
                for index, result in enumerate(results)
            ],
            "usage": _usage(results),
            "system_fingerprint": _fingerprint(results),
        }
    )


class ChatStream:
    """Server-sent events of one streamed answer."""

    def __init__(self, head: AnswerHead, request: TurnRequest) -> None:
        self._head = {
            "id": f"chatcmpl-{head.turn_id}",
            "object": "chat.completion.chunk",
            "created": int(head.started_at),
            "model": request.model,
        }
        self._wants_usage = request.wants_usage
        self._num_choices = request.num_choices
        self._shown: dict[int, StringIO] = defaultdict(StringIO)
        self._reasoned: dict[int, StringIO] = defaultdict(StringIO)
        self._called: dict[tuple[int, int], list[str]] = {}
        """Pieces of arguments by choice and call."""

    def open(self) -> bytes:
        """The first event of each choice."""
        return b"".join(
            self._event(index, {"role": "assistant", "content": ""})
            for index in range(self._num_choices)
        )

    def delta(self, delta: Delta) -> bytes:
        """A piece of text, or of a call's arguments."""
        index = delta.choice_index
        if delta.call is not None:
            return self._call(index, delta.call, delta.text)
        if delta.is_reasoning:
            self._reasoned[index].write(delta.text)
            return self._event(index, {"reasoning_content": delta.text})
        self._shown[index].write(delta.text)
        return self._event(index, {"content": delta.text})

    def close(self, results: Sequence[TurnResult]) -> bytes:
        """What was held back, tool calls, finish reasons, usage when asked, and the end."""
        events = []
        for index, result in enumerate(results):
            message, shown = result.message, self._shown[index].getvalue()
            rest = fields.rest_of(message.reasoning, self._reasoned[index].getvalue())
            if rest:
                events.append(self._event(index, {"reasoning_content": rest}))
            rest = fields.rest_of(message.text, shown)
            if rest:
                events.append(self._event(index, {"content": rest}))
            for number, call in enumerate(message.tool_calls):
                shown = "".join(self._called.get((index, number), ()))
                rest = fields.rest_of(call.arguments, shown)
                if rest or (index, number) not in self._called:
                    place = CallPlace(number=number, id=call.id, name=call.name)
                    events.append(self._call(index, place, rest))
            events.append(self._end(index, result))
        if self._wants_usage:
            events.append(fields.event({**self._head, "choices": [], "usage": _usage(results)}))
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def _end(self, index: int, result: TurnResult) -> bytes:
        """The last event of a choice."""
        choice = {
            "index": index,
            "delta": {},
            "logprobs": _logprobs(result),
            "finish_reason": result.turn.finish_reason,
            **_token_ids(result),
        }
        return self._chunk(choice, _prompt_ids(result))

    def _call(self, index: int, call: CallPlace, arguments: str) -> bytes:
        piece: dict[str, Any] = {"index": call.number, "function": {"arguments": arguments}}
        pieces = self._called.get((index, call.number))
        if pieces is None:
            pieces = self._called[index, call.number] = []
            piece |= {"id": call.id, "type": "function"}
            piece["function"]["name"] = call.name
        pieces.append(arguments)
        return self._event(index, {"tool_calls": [piece]})

    def _event(self, index: int, delta: dict[str, Any]) -> bytes:
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        )

    def _chunk(self, choice: dict[str, Any], more: Mapping[str, Any] = _NOTHING) -> bytes:
        body: dict[str, Any] = {**self._head, **more, "choices": [choice]}
        if self._wants_usage:
            body["usage"] = None
        return fields.event(body)


def _prompt_ids(result: TurnResult) -> dict[str, Any]:
    """The ids that the server was given, under vLLM's name, if they were asked for."""
    return {} if result.prompt_ids is None else {"prompt_token_ids": result.prompt_ids}


def _token_ids(result: TurnResult) -> dict[str, Any]:
    """The ids that were sampled."""
    is_asked = result.prompt_ids is not None
    return {"token_ids": result.turn.output_ids.tolist()} if is_asked else {}


def _answer(message: Message) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": message.text if message.text or not message.tool_calls else None,
        "refusal": None,
    }
    if message.reasoning:
        answer["reasoning_content"] = message.reasoning
    if message.tool_calls:
        answer["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return answer


def _usage(results: Sequence[TurnResult]) -> dict[str, Any]:
    num_prompt = results[0].num_prompt_tokens
    num_output = sum(len(result.turn.output_ids) for result in results)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    num_reasoning = sum(result.num_reasoning_tokens for result in results)
    if num_reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return usage


def _fingerprint(results: Sequence[TurnResult]) -> str:
    spans = results[0].turn.version_spans
    return f"policy_version={spans[-1].policy_version}" if spans else "policy_version=unknown"


def _logprobs(result: TurnResult) -> dict[str, Any] | None:
    if result.logprobs is None:
        return None
    return {
        "content": [fields.sampled_token(token) for token in result.logprobs],
        "refusal": None,
    }
