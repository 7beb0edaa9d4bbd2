"""Every dialect by its path.

Owns: which dialects are served, and how each words errors. Does not own: their translations.
Invariant: a dialect is added here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outloop.router.dialects import (
    chat_answer,
    chat_request,
    completions_answer,
    completions_request,
    messages_answer,
    messages_request,
    responses_answer,
    responses_request,
)
from outloop.router.refusals import OPENAI_ERRORS, ErrorForm
from outloop.router.turns import Dialect


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A dialect's route; `body` describes its requests."""

    dialect: Dialect
    body: type
    summary: str
    errors: ErrorForm = OPENAI_ERRORS


DIALECTS: Mapping[str, Served] = MappingProxyType(
    {
        "/v1/chat/completions": Served(
            dialect=Dialect(
                decode=chat_request.decode,
                encode=chat_answer.encode,
                stream=chat_answer.ChatStream,
                decode_after=chat_request.decode,
            ),
            body=chat_request.ChatRequest,
            summary="One turn of an episode, as chat completion.",
        ),
        "/v1/completions": Served(
            dialect=Dialect(
                decode=completions_request.decode,
                encode=completions_answer.encode,
                stream=completions_answer.CompletionsStream,
            ),
            body=completions_request.CompletionsRequest,
            summary="One turn of an episode, going on from a text or from ids.",
        ),
        "/v1/responses": Served(
            dialect=Dialect(
                decode=responses_request.decode,
                encode=responses_answer.encode,
                stream=responses_answer.ResponsesStream,
            ),
            body=responses_request.ResponsesRequest,
            summary="One turn of an episode, as response.",
            errors=responses_answer.ERRORS,
        ),
        "/v1/messages": Served(
            dialect=Dialect(
                decode=messages_request.decode,
                encode=messages_answer.encode,
                stream=messages_answer.MessagesStream,
            ),
            body=messages_request.MessagesRequest,
            summary="One turn of an episode, as Anthropic message.",
            errors=messages_answer.ERRORS,
        ),
    }
)
