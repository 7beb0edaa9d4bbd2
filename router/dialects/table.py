"""Every dialect by its path. A dialect is added here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outloop.router.dialects import (
    chat_request,
    chat_response,
    completions_request,
    completions_response,
    messages_request,
    messages_response,
    responses_request,
    responses_response,
)
from outloop.router.dialects.base import Dialect
from outloop.router.errors import OPENAI_ERRORS, ErrorForm


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
                encode=chat_response.encode,
                stream=chat_response.ChatStream,
            ),
            body=chat_request.ChatRequest,
            summary="One turn of an episode, as chat completion.",
        ),
        "/v1/completions": Served(
            dialect=Dialect(
                decode=completions_request.decode,
                encode=completions_response.encode,
                stream=completions_response.CompletionsStream,
            ),
            body=completions_request.CompletionsRequest,
            summary="One turn of an episode, going on from a text or from ids.",
        ),
        "/v1/responses": Served(
            dialect=Dialect(
                decode=responses_request.decode,
                encode=responses_response.encode,
                stream=responses_response.ResponsesStream,
            ),
            body=responses_request.ResponsesRequest,
            summary="One turn of an episode, as response.",
            errors=responses_response.ERRORS,
        ),
        "/v1/messages": Served(
            dialect=Dialect(
                decode=messages_request.decode,
                encode=messages_response.encode,
                stream=messages_response.MessagesStream,
            ),
            body=messages_request.MessagesRequest,
            summary="One turn of an episode, as Anthropic message.",
            errors=messages_response.ERRORS,
        ),
    }
)
