"""A server's `/generate` on the wire.

Owns: field names of its request and of both answer forms. Does not own: what is done with an
answer. Invariant: every sampling parameter is sent; unknown fields of an answer are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

from outloop.buffer.errors import ServerUnavailable
from outloop.buffer.records import Sampling


class Span(msgspec.Struct):
    """Output tokens [start, end) were drawn by weights `version`."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct):
    """Why drawing ended: stop, length or abort."""

    type: str
    matched: int | str | None = None
    message: str | None = None


class Meta(msgspec.Struct):
    """What is known of the tokens; cumulative in a stream, like `output_ids`, or incremental."""

    finish_reason: Finish | None = None
    completion_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class Failure(msgspec.Struct):
    """An error in the middle of a stream."""

    message: str = "the server named no reason"


class Piece(msgspec.Struct):
    """A whole answer, or one event of a streamed one."""

    output_ids: list[int] = []
    meta_info: Meta = msgspec.field(default_factory=Meta)
    error: Failure | str | None = None


_decode = msgspec.json.Decoder(Piece).decode


def read_piece(data: bytes) -> Piece:
    """Decode an answer or an event.

    Raises:
        ServerUnavailable: it is neither.
    """
    try:
        return _decode(data)
    except msgspec.DecodeError as error:
        raise ServerUnavailable(f"/generate answered what is no result: {error}") from error


def request_body(
    input_ids: list[int],
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    *,
    rid: str,
    max_new_tokens: int,
    policy_version: int | None,
    stream: bool,
) -> bytes:
    """The body that draws at most `max_new_tokens` after `input_ids`."""
    parameters: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": 0,
        "stop": sampling.stop,
        "stop_token_ids": stop_ids,
        "ignore_eos": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "n": 1,
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    return msgspec.json.encode(
        {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": parameters,
            "return_logprob": True,
            "stream": stream,
            # Salts the prefix cache: KV of other weights is never reused.
            "extra_key": str(policy_version),
        }
    )
