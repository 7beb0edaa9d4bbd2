"""Answers of OpenAI's completions, plain and streamed.

Pure functions of results; the deltas of a stream concatenate to the plain answer.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Sequence
from io import StringIO
from typing import Any

import msgspec

from outloop.router.dialects import fields
from outloop.router.dialects.base import AnswerHead, Delta, TokenLogprob, TurnRequest, TurnResult


def encode(results: Sequence[TurnResult], request: TurnRequest) -> bytes:
    """The body of a plain answer."""
    first = results[0].turn
    choices = [_choice(index, result.message.text, result) for index, result in enumerate(results)]
    body = _head(first.turn_id, first.started_at, request.model)
    return msgspec.json.encode({**body, "choices": choices, "usage": _usage(results)})


class CompletionsStream:
    """Server-sent events of one streamed answer."""

    def __init__(self, head: AnswerHead, request: TurnRequest) -> None:
        self._head = _head(head.turn_id, head.started_at, request.model)
        self._wants_usage = request.wants_usage
        self._shown: dict[int, StringIO] = defaultdict(StringIO)

    def open(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """A piece of text."""
        index = delta.choice_index
        self._shown[index].write(delta.text)
        return self._event([_choice(index, delta.text, None)])

    def close(self, results: Sequence[TurnResult]) -> bytes:
        """What was held back, finish reasons, usage when asked, and the end."""
        events = []
        for index, result in enumerate(results):
            text, shown = result.message.text, self._shown[index].getvalue()
            rest = fields.rest_of(text, shown)
            events.append(self._event([_choice(index, rest, result)]))
        if self._wants_usage:
            events.append(self._event([], usage=_usage(results)))
        return b"".join(events) + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **values: Any) -> bytes:
        if self._wants_usage:
            values.setdefault("usage", None)
        body = {**self._head, "choices": choices, **values}
        return fields.event(body)


def _head(turn_id: str, started_at: float, model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{turn_id}",
        "object": "text_completion",
        "created": int(started_at),
        "model": model,
    }


def _choice(index: int, text: str, result: TurnResult | None) -> dict[str, Any]:
    """A choice, or a piece of one as long as there is no result."""
    return {
        "index": index,
        "text": text,
        "logprobs": _logprobs(result) if result is not None else None,
        "finish_reason": result.turn.finish_reason if result is not None else None,
    }


def _logprobs(result: TurnResult) -> dict[str, Any] | None:
    if result.logprobs is None:
        return None
    # A character of several tokens begins with its first one and is counted with its last.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, position = [], 0
    for token in result.logprobs:
        offsets.append(position)
        position += len(decoder.decode(token.data))
    return {
        "tokens": [_written(token) for token in result.logprobs],
        "token_logprobs": [token.logprob for token in result.logprobs],
        "top_logprobs": [
            {_written(other): other.logprob for other in token.top} for token in result.logprobs
        ]
        if any(token.top for token in result.logprobs)
        else None,
        "text_offset": offsets,
    }


def _written(token: TokenLogprob) -> str:
    """A token's text; where that is a part of a character, its bytes, as OpenAI names them."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def _usage(results: Sequence[TurnResult]) -> dict[str, int]:
    num_prompt = results[0].num_prompt_tokens
    num_output = sum(len(result.turn.output_ids) for result in results)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
