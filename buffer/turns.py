"""The turns inside a frame.

Owns: the fields of a turn as they are stored, and building many turns at once. Does not own: which
records have turns (codec) or how bytes are framed (frames). Invariant: turns that come out keep
every invariant of records.Turn; bytes that break one raise RecordError.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from outloop.buffer.errors import RecordError
from outloop.buffer.frames import arrays, encode_fields, pack_parts
from outloop.buffer.records import (
    FinishReason,
    Float32,
    Int32,
    Sampling,
    Turn,
    VersionSpan,
    unchecked_twin,
)

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _SamplingWire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_new_tokens: int
    stop: tuple[str, ...]
    seed: int | None
    constraint: str = ""


class TurnWire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Turn, without its arrays."""

    turn_id: str
    episode_id: str
    parent_turn_id: str | None
    choice_index: int
    num_prompt: _Count
    num_output: _Count
    has_logprobs: bool
    version_spans: tuple[VersionSpan, ...]
    loss_spans: tuple[tuple[int, int], ...]
    mask_reason: str
    sampling: msgspec.Raw
    """A _SamplingWire; apart, because all turns of a run have few different ones."""
    finish_reason: FinishReason
    branch_cause: str
    retry_key: str | None
    started_at: float
    finished_at: float


Frame = tuple[bytes, Sequence[TurnWire], int]
"""Bytes, the turns in them, number of token ids and logprobs together."""


_SAMPLING_FIELDS = _SamplingWire.__struct_fields__
_fields_of = operator.attrgetter(*_SAMPLING_FIELDS)
_UncheckedTurn = unchecked_twin(Turn)


@functools.lru_cache(maxsize=256)
def _sampling_to_wire(fields: tuple[Any, ...]) -> msgspec.Raw:
    return msgspec.Raw(encode_fields(_SamplingWire(*fields)))


@functools.lru_cache(maxsize=256)
def _sampling_from_wire(data: bytes) -> Sampling:
    wire = msgspec.msgpack.decode(data, type=_SamplingWire)
    return Sampling(**msgspec.structs.asdict(wire))


def turn_to_wire(turn: Turn) -> TurnWire:
    """The fields of a turn, without its arrays."""
    return TurnWire(
        turn.turn_id,
        turn.episode_id,
        turn.parent_turn_id,
        turn.choice_index,
        len(turn.prompt_ids),
        len(turn.output_ids),
        turn.behavior_logprobs is not None,
        turn.version_spans,
        turn.loss_spans,
        turn.mask_reason,
        _sampling_to_wire(_fields_of(turn.sampling)),
        turn.finish_reason,
        turn.branch_cause,
        turn.retry_key,
        turn.started_at,
        turn.finished_at,
    )


def turn_parts(wire: msgspec.Struct, turns: Sequence[Turn], what: str) -> tuple[list[Any], int]:
    """The frame of a record with these turns, as frames.pack_parts gives it."""
    ids: list[Int32] = []
    logprobs: list[Float32] = []
    for turn in turns:
        ids.append(turn.prompt_ids)
        ids.append(turn.output_ids)
        if turn.behavior_logprobs is not None:
            logprobs.append(turn.behavior_logprobs)
    return pack_parts(wire, what, ids, logprobs)


def turns_of(frames: Sequence[Frame]) -> Iterator[Turn]:
    """The turns of all frames, in order.

    Raises:
        RecordError: one breaks its invariants.
    """
    counted = [(data, *_count(wires, num_words)) for data, wires, num_words in frames]
    located = arrays(counted)
    sampling_wire: msgspec.Raw | None = None
    for (ids, at, logprobs, logprobs_at), (_, wires, _) in zip(located, frames, strict=True):
        for wire in wires:
            num_output = wire.num_output
            middle = at + wire.num_prompt
            end = middle + num_output
            turn = _UncheckedTurn()
            turn.turn_id = wire.turn_id
            turn.episode_id = wire.episode_id
            turn.parent_turn_id = wire.parent_turn_id
            turn.choice_index = wire.choice_index
            turn.prompt_ids = ids[at:middle]
            turn.output_ids = ids[middle:end]
            turn.behavior_logprobs = None
            if wire.has_logprobs:
                turn.behavior_logprobs = logprobs[logprobs_at : logprobs_at + num_output]
                logprobs_at += num_output
            turn.version_spans = spans = wire.version_spans
            turn.loss_spans = loss_spans = wire.loss_spans
            turn.mask_reason = wire.mask_reason
            if wire.sampling != sampling_wire:
                # Mostly all turns of a batch have one.
                sampling = _sampling_of(wire.sampling, wire.turn_id)
                sampling_wire = wire.sampling
            turn.sampling = sampling
            turn.finish_reason = wire.finish_reason
            turn.branch_cause = wire.branch_cause
            turn.retry_key = wire.retry_key
            turn.started_at = wire.started_at
            turn.finished_at = wire.finished_at
            turn.__class__ = Turn
            whole = (0, num_output)
            if len(spans) != 1 or (spans[0].start, spans[0].end) != whole or loss_spans != (whole,):
                turn.check_spans()
            yield turn
            at = end


def _count(wires: Sequence[TurnWire], num_words: int) -> tuple[int, int]:
    """(number of token ids, number of logprobs) of a frame."""
    num_ids = num_logprobs = 0
    for wire in wires:
        num_output = wire.num_output
        num_ids += wire.num_prompt + num_output
        if wire.has_logprobs:
            num_logprobs += num_output
    if num_ids + num_logprobs != num_words:
        what = f"turn {wires[0].turn_id}" if wires else "a trajectory without turns"
        raise RecordError(
            f"{what}: prompt_ids, output_ids and behavior_logprobs hold {num_words} numbers, "
            f"{num_ids + num_logprobs} are announced"
        )
    return num_ids, num_logprobs


def _sampling_of(data: msgspec.Raw, turn_id: str) -> Sampling:
    try:
        return _sampling_from_wire(bytes(data))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"turn {turn_id}: sampling is damaged: {error}") from error
