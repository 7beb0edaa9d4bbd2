"""Requests of OpenAI's completions, `/v1/completions`.

Pure functions; the prompt is passed on as it is, without a chat format.
"""

from __future__ import annotations

import msgspec

from outloop.router.dialects import fields
from outloop.router.dialects.base import TurnRequest


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CompletionsRequest(msgspec.Struct):
    """Body of `POST /v1/completions`."""

    model: str
    prompt: str | list[int | str | list[int]]
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


_decoder = msgspec.json.Decoder(CompletionsRequest)


def decode(body: bytes) -> TurnRequest:
    """The turn request in a body.

    Raises:
        Refusal: 400, not JSON, a value that cannot be, or more than one prompt.
    """
    asked = fields.read(_decoder, body)
    num_choices = fields.whole("n", asked.n, 1, fields.MAX_CHOICES) or 1
    if asked.echo:
        _unsupported("echo", "echo=true is not served; the prompt is the client's already")
    if asked.suffix:
        _unsupported("suffix", "suffix is not served; the policy only goes on from a prompt")
    if asked.best_of is not None and asked.best_of != num_choices:
        _unsupported(
            "best_of",
            f"best_of={asked.best_of} with n={num_choices}; every sampled choice is delivered. "
            "Ask for all with n and choose.",
        )
    return TurnRequest(
        model=asked.model,
        messages=(),
        prompt=_prompt(asked.prompt),
        num_choices=num_choices,
        max_new_tokens=fields.whole("max_tokens", asked.max_tokens, 1, None),
        asked=fields.asked(asked),
        has_logit_bias=bool(asked.logit_bias),
        stop=fields.stops("stop", asked.stop),
        seed=fields.seed(asked.seed),
        wants_logprobs=asked.logprobs is not None,
        num_top_logprobs=fields.whole("logprobs", asked.logprobs, 0, fields.MAX_TOP_LOGPROBS) or 0,
        stream=bool(asked.stream),
        wants_usage=bool(asked.stream_options and asked.stream_options.include_usage),
    )


def _prompt(prompt: str | list[int | str | list[int]]) -> str | tuple[int, ...]:
    """The one prompt, as text or ids.

    Raises:
        Refusal: 400, none, several, or ids that no vocabulary has.
    """
    if isinstance(prompt, str):
        found: str | tuple[int, ...] = prompt
    elif len(prompt) == 1 and isinstance(prompt[0], str):
        found = prompt[0]
    else:
        inner = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], list) else prompt
        found = tuple(i for i in inner if isinstance(i, int))
        if len(found) != len(inner):
            fields.refuse(
                "prompt",
                f"prompt holds {len(prompt)} prompts; one text or one list of ids is served. "
                "Send one request for each.",
                "unsupported_content",
            )
    if not found:
        fields.refuse("prompt", "prompt is empty; nothing to go on from")
    return found


def _unsupported(param: str, message: str) -> None:
    fields.refuse(param, message, "unsupported_parameter")
