"""The frame of a stored record: its head, its arrays, its fields.

Owns: the schema number, the layout of a frame, and its checks. Does not own: which fields a record
has (codec). Invariant: bytes of another schema are refused by name; no bytes make unpacking raise
anything but SchemaMismatch and RecordError; ids that come out are not negative, logprobs finite.

A frame is a head of eight bytes (schema number, uint16; zero, uint16; number of ids and logprobs
together, uint32), then the token ids (int32) and the logprobs (float32) of all its turns, then
MessagePack of a fixed list of fields; everything is little-endian. Arrays lie on multiples of four
bytes, so what comes out of a frame are aligned views of it, not copies.
"""

from __future__ import annotations

import gc
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from outloop.buffer.errors import RecordError, SchemaMismatch
from outloop.buffer.records import FLOAT32, INT32, Float32, Int32

SCHEMA = 2
MAX_RECORD_BYTES = 64 * 2**20
_HEAD = struct.Struct("<HHI")
HEAD_BYTES = _HEAD.size
WORD_BYTES = 4
SHARED_BYTES = 16384
"""Below, copying a frame's arrays costs less than numpy's calls for views and checks of its own."""
_Wire = TypeVar("_Wire")
_Twin = TypeVar("_Twin", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def recast(record: msgspec.Struct, twin: type[_Twin]) -> _Twin:
    """A shallow copy of `record` as a `twin`, which has fields of the same names. For the codec: to
    build one from its fields one by one costs more than all the rest of encoding it."""
    copy: Any = record.__copy__()  # type: ignore[attr-defined]
    force_setattr(copy, "__class__", twin)
    return copy


def pack(wire: Any, what: str) -> bytes:
    """The frame of `what`, without arrays; raises as pack_parts."""
    return b"".join(pack_parts(wire, what)[0])


def pack_parts(
    wire: Any, what: str, arrays: Sequence[Int32 | Float32] = (), num_words: int = 0
) -> tuple[list[Any], int]:
    """(what the frame of `what` is made of, in order and not copied; its number of bytes).

    Args:
        arrays: of all ids, then of all logprobs, as records.Turn has them.
        num_words: how many numbers they hold.

    Raises:
        RecordError: a field cannot be stored, or the frame is too large.
    """
    try:
        body = _encode(wire)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{what} cannot be stored: {error}") from error
    num_bytes = HEAD_BYTES + WORD_BYTES * num_words + len(body)
    if num_bytes > MAX_RECORD_BYTES:
        raise RecordError(
            f"{what} takes {num_bytes} bytes; at most {MAX_RECORD_BYTES} are allowed. Split it, "
            "or lower model.max_context_tokens"
        )
    return [_HEAD.pack(SCHEMA, 0, num_words), *arrays, body], num_bytes


def unpack(data: bytes, decoder: msgspec.msgpack.Decoder[_Wire], what: str) -> tuple[_Wire, int]:
    """(fields, number of ids and logprobs together).

    Raises:
        SchemaMismatch: written by a release with another schema.
        RecordError: the bytes are damaged.
    """
    try:
        schema, _, num_words = _HEAD.unpack_from(data)
    except struct.error:
        raise RecordError(
            f"{what} has {len(data)} bytes and no schema number; it is damaged"
        ) from None
    if schema != SCHEMA:
        raise SchemaMismatch(
            f"{what} was written with schema={schema}, this release reads schema={SCHEMA}; read it "
            "with the release that wrote it"
        )
    start = HEAD_BYTES + WORD_BYTES * num_words
    if start > len(data):
        raise RecordError(f"{what} has {len(data)} bytes, its arrays alone need {start}")
    try:
        # Copying the fields costs less than a view of them.
        return decoder.decode(data[start:]), num_words
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{what} is damaged: {error}") from error


def arrays_of(data: bytes, num_ids: int, num_words: int) -> tuple[Int32, Float32]:
    """Token ids and logprobs of a frame, read-only views of it.

    Raises:
        RecordError: an id is negative or a logprob not finite.
    """
    words = np.frombuffer(data, INT32, num_words, HEAD_BYTES)
    ids, logprobs = words[:num_ids], words[num_ids:].view(FLOAT32)
    _check(ids, logprobs)
    return ids, logprobs


def shared_arrays(
    ids: Sequence[memoryview], logprobs: Sequence[memoryview]
) -> tuple[Int32, Float32]:
    """The same of many frames' bytes, each kind copied into one array; raises as arrays_of."""
    shared_ids = np.frombuffer(b"".join(ids), INT32)
    shared_logprobs = np.frombuffer(b"".join(logprobs), FLOAT32)
    _check(shared_ids, shared_logprobs)
    return shared_ids, shared_logprobs


def _check(ids: Int32, logprobs: Float32) -> None:
    if len(ids) and np.minimum.reduce(ids) < 0:
        raise RecordError("prompt_ids and output_ids must be non-negative")
    # The sum of squares is NaN or infinite if one of them is; else it may overflow still, so look
    # closely.
    if not math.isfinite(logprobs.dot(logprobs)) and not np.isfinite(logprobs).all():
        raise RecordError("behavior_logprobs holds NaN or infinity")


@contextmanager
def many_at_once() -> Iterator[None]:
    """Inside, the garbage collector rests: it would walk again and again through the thousands of
    records that a batch has, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
