"""A server's `/generate` on the wire.

Owns: field names of its request and of both answer forms. Does not own: what is done with an
answer. Invariant: every sampling parameter is sent; unknown fields of an answer are ignored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

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
    output_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None


class Failure(msgspec.Struct):
    """An error in the middle of a stream."""

    message: str = "the server named no reason"


class Piece(msgspec.Struct):
    """A whole answer, or one event of a streamed one."""

    output_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]] = []
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerUnavailable(f"/generate answered what is no result: {error}") from error


class Prompt(msgspec.Struct, frozen=True):
    """Ids as they stand in a request, so that a conversation is not written anew at each turn.

    The text is kept in pieces of which each is at least twice as long as the one after it: adding
    to a long one copies little, and there are never many.

    Example: `Prompt().followed_by([5, 6])` has `text` b"5,6".
    """

    num_ids: int = 0
    pieces: tuple[bytes, ...] = ()

    @property
    def text(self) -> bytes:
        """All pieces."""
        return b"".join(self.pieces)

    def followed_by(self, ids: list[int]) -> Prompt:
        """These ids and then `ids`."""
        if not ids:
            return self
        more = msgspec.json.encode(ids)[1:-1]
        num_ids, first = self.num_ids + len(ids), len(self.pieces)
        if not first:
            return Prompt(num_ids, (more,))
        size = len(b",") + len(more)
        while first and len(self.pieces[first - 1]) < 2 * size:
            first -= 1
            size += len(self.pieces[first])
        last = b"".join((*self.pieces[first:], b",", more))
        return Prompt(num_ids, (*self.pieces[:first], last))


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What few turns ask of a server beyond their sampling."""

    json_schema: str | None = None
    num_top_logprobs: int = 0
    trace: tuple[tuple[str, str], ...] = ()
    """Headers of the client's OpenTelemetry context, handed on as they came."""


NO_WISH = Wish()


def request_body(
    prompt: Prompt,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    *,
    rid: str,
    max_new_tokens: int,
    policy_version: int | None,
    stream: bool,
    wish: Wish,
) -> tuple[bytes, ...]:
    """The body, in pieces, that draws at most `max_new_tokens` after `prompt`."""
    parameters = _parameters(sampling, stop_ids, max_new_tokens, wish.json_schema)
    more = {"top_logprobs_num": wish.num_top_logprobs} if wish.num_top_logprobs else {}
    rest = msgspec.json.encode(
        {
            **more,
            "rid": rid,
            "sampling_params": parameters,
            "return_logprob": True,
            "stream": stream,
            # Salts the prefix cache: KV of other weights is never reused.
            "extra_key": str(policy_version),
        }
    )
    # The ids are most of it, and are not copied.
    return b'{"input_ids":[', *prompt.pieces, b"]," + rest[1:]


@lru_cache(maxsize=256)
def _parameters(
    sampling: Sampling, stop_ids: tuple[int, ...], max_new_tokens: int, json_schema: str | None
) -> msgspec.Raw:
    """`sampling_params`; turns of a run have few different ones."""
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
    if json_schema is not None:
        parameters["json_schema"] = json_schema
    return msgspec.Raw(msgspec.json.encode(parameters))
