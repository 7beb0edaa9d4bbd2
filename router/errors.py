"""What the router answers when it will not serve a request.

Owns: the error envelope, status codes and retry headers. Does not own: when to refuse. Invariant:
a refusal that a retry cannot fix is 4xx, never 408, 409 or 429, and says `x-should-retry: false`;
one that a retry can fix is 503 with `Retry-After`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from outloop.buffer.errors import (
    BufferUnavailable,
    Conflict,
    DeadlineExceeded,
    Gone,
    NotFound,
    OutloopError,
    RecordError,
    SchemaMismatch,
    ServerUnavailable,
)

_NEVER_FINAL = frozenset({408, 409, 429})


class Refusal(OutloopError):
    """A request is refused; `status`, `code` and `param` go into the envelope."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        closes_connection: bool = False,
        details: dict[str, object] | None = None,
    ) -> None:
        """`details` go into Anthropic's envelope, whose clients branch on them."""
        super().__init__(message)
        assert status not in _NEVER_FINAL
        assert (status >= 500) == (retry_after_s is not None)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.closes_connection = closes_connection
        self.details = details

    @property
    def kind(self) -> str:
        """The envelope's `type`."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 404:
            return "not_found_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def envelope(self) -> bytes:
        """OpenAI's error object as JSON."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": str(self),
                    "type": self.kind,
                    "code": self.code,
                    "param": self.param,
                }
            }
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Tell SDKs whether to retry, in the headers that they read."""
        if self.retry_after_s is None:
            return [(b"x-should-retry", b"false")]
        whole = max(1, round(self.retry_after_s))
        return [
            (b"retry-after", str(whole).encode()),
            (b"retry-after-ms", str(round(self.retry_after_s * 1000)).encode()),
            (b"x-should-retry", b"true"),
            *([(b"connection", b"close")] if self.closes_connection else []),
        ]


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How a dialect words a refusal: as a body, and as an event in a stream."""

    envelope: Callable[[Refusal], bytes]
    event: Callable[[Refusal], bytes]


def _openai_event(refusal: Refusal) -> bytes:
    return b"data: " + refusal.envelope() + b"\n\n"


OPENAI_ERRORS = ErrorForm(Refusal.envelope, _openai_event)


_HALF_CHARS = 6
_HIGH, _LOW = rb"[89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SURROGATES = re.compile(
    # It begins with letters, not with an alternative: the search for them is ten times as fast.
    rb"\\u[dD](?:%b%b(?:\\u[dD]%b%b)*+|[89a-fA-F][0-9a-fA-F]{2})" % (_HIGH, _LOW, _HIGH, _LOW)
)
"""Whole pairs in a row, or half of one, if the first backslash is not itself escaped."""


def not_json(body: bytes, why: object) -> Refusal:
    """Make the refusal of a body that is no JSON; it names half a surrogate pair."""
    end = 0
    for match in _SURROGATES.finditer(body):
        before, end = body[end : match.start()], match.end()
        is_escaped = (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
        is_half = len(match[0]) == _HALF_CHARS
        if is_half != is_escaped:
            return _half_pair(body, match.start() + _HALF_CHARS * is_escaped)
    return Refusal(400, "invalid_json", f"the body is not JSON: {why}")


def _half_pair(body: bytes, at: int) -> Refusal:
    half = body[at : at + _HALF_CHARS].decode()
    return Refusal(
        400,
        "invalid_json",
        f"the body holds {half} at byte {at}, half a surrogate pair, which is no character; send "
        "the whole pair, or U+FFFD in its place",
    )


def body_too_large(max_bytes: int) -> Refusal:
    """The refusal of a body that is larger than any may be."""
    return Refusal(
        413, "body_too_large", f"the body has more than {max_bytes} bytes; send it in parts"
    )


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


def context_length_exceeded(num_tokens: int, max_tokens: int) -> Refusal:
    """The refusal of a conversation that leaves no room for an answer.

    LiteLLM and LangChain know it by OpenAI's and Anthropic's sentences alone.
    """
    return Refusal(
        400,
        CONTEXT_LENGTH_EXCEEDED,
        f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum. This model's maximum "
        f"context length is {max_tokens} tokens. However, your messages resulted in {num_tokens} "
        f"tokens. Shorten them, or raise model.max_context_tokens={max_tokens}. "
        "(context_length_exceeded)",
        param="messages",
    )


def episode_closed(sentence: str) -> Refusal:
    """The refusal of a turn of an episode that has ended.

    404, because LiteLLM's callers repeat what is answered with 403 or 410.
    """
    return Refusal(404, "episode_closed", sentence)


def stopping() -> Refusal:
    """The refusal of a router that is going: the next connection may reach another process."""
    return Refusal(
        503,
        "router_stopping",
        "this router is stopping; send the request again, on a new connection",
        retry_after_s=0.5,
        closes_connection=True,
    )


def as_refusal(error: OutloopError) -> Refusal:
    """The answer for an error of another layer; infrastructure errors stay retryable."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Gone):
        return Refusal(410, "gone", str(error))
    if isinstance(error, RecordError | SchemaMismatch):
        return Refusal(400, "invalid_value", str(error))
    if isinstance(error, NotFound):
        return Refusal(404, "not_found", str(error))
    if isinstance(error, Conflict):
        return Refusal(422, "conflict", str(error))
    if isinstance(error, DeadlineExceeded):
        return Refusal(503, "deadline_exceeded", str(error), retry_after_s=1.0)
    if isinstance(error, ServerUnavailable):
        return Refusal(503, "server_unavailable", str(error), retry_after_s=1.0)
    if isinstance(error, BufferUnavailable):
        return Refusal(503, "buffer_unavailable", str(error), retry_after_s=1.0)
    return Refusal(500, "internal_error", str(error), retry_after_s=1.0)
