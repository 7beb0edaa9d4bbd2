"""The turns inside a frame.

Owns: the fields of a turn as they are stored, and building many turns at once. Does not own: which
records have turns (codec) or how bytes are framed (frames). Invariant: turns that come out keep
every invariant of records.Turn; bytes that break one raise RecordError.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from outloop.buffer.errors import RecordError
from outloop.buffer.frames import arrays, pack_parts, recast
from outloop.buffer.records import (
    FinishReason,
    Float32,
    Int32,
    Sampling,
    Turn,
    VersionSpan,
)

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _SamplingWire(msgspec.Struct, array_like=True, gc=False):
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


class TurnWire(msgspec.Struct, array_like=True, gc=False):
    """Turn with lengths in the place of its arrays; what is decoded as one becomes the Turn."""

    turn_id: str
    episode_id: str
    parent_turn_id: str | None
    choice_index: int
    prompt_ids: _Count
    output_ids: _Count
    behavior_logprobs: bool
    """True if there are any."""
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


@functools.lru_cache(maxsize=256)
def _sampling_from_wire(data: bytes) -> Sampling:
    wire = msgspec.msgpack.decode(data, type=_SamplingWire)
    return recast(wire, Sampling)


def turn_to_wire(turn: Turn) -> TurnWire:
    """The fields of a turn, without its arrays."""
    wire: Any = recast(turn, TurnWire)
    wire.prompt_ids = len(turn.prompt_ids)
    wire.output_ids = len(turn.output_ids)
    wire.behavior_logprobs = turn.behavior_logprobs is not None
    wire.sampling = recast(turn.sampling, _SamplingWire)
    return wire


def turn_parts(wire: msgspec.Struct, turns: Sequence[Turn], what: str) -> tuple[list[Any], int]:
    """The frame of a record with these turns, as frames.pack_parts gives it."""
    arrays: list[Int32 | Float32] = []
    logprobs: list[Float32] = []
    num_words = 0
    for turn in turns:
        prompt_ids, output_ids, drawn = turn.prompt_ids, turn.output_ids, turn.behavior_logprobs
        arrays += (prompt_ids, output_ids)
        num_words += len(prompt_ids) + len(output_ids)
        if drawn is not None:
            logprobs.append(drawn)
            num_words += len(drawn)
    return pack_parts(wire, what, [*arrays, *logprobs], num_words)


def turns_of(frames: Sequence[Frame]) -> Iterator[Turn]:
    """The turns of all frames, in order; the wires that are given become them.

    Raises:
        RecordError: one breaks its invariants.
    """
    counted = [(data, *_count(wires, num_words)) for data, wires, num_words in frames]
    located = arrays(counted)
    sampling_wire: msgspec.Raw | None = None
    turn: Any
    for (ids, at, logprobs, logprobs_at), (_, wires, _) in zip(located, frames, strict=True):
        for turn in wires:
            num_output = turn.output_ids
            middle = at + turn.prompt_ids
            end = middle + num_output
            turn.prompt_ids = ids[at:middle]
            turn.output_ids = ids[middle:end]
            at = end
            if turn.behavior_logprobs:
                turn.behavior_logprobs = logprobs[logprobs_at : logprobs_at + num_output]
                logprobs_at += num_output
            else:
                turn.behavior_logprobs = None
            if turn.sampling != sampling_wire:
                # Mostly all turns of a batch have one.
                sampling_wire = turn.sampling
                sampling = _sampling_of(turn)
            turn.sampling = sampling
            turn.__class__ = Turn
            whole, spans = (0, num_output), turn.version_spans
            is_whole = len(spans) == 1 and (spans[0].start, spans[0].end) == whole
            if not is_whole or turn.loss_spans != (whole,):
                turn.check_spans()
            yield turn


def _count(wires: Sequence[TurnWire], num_words: int) -> tuple[int, int]:
    """(number of token ids, number of logprobs) of a frame."""
    num_ids = num_logprobs = 0
    for wire in wires:
        num_output = wire.output_ids
        num_ids += wire.prompt_ids + num_output
        if wire.behavior_logprobs:
            num_logprobs += num_output
    if num_ids + num_logprobs != num_words:
        what = f"turn {wires[0].turn_id}" if wires else "a trajectory without turns"
        raise RecordError(
            f"{what}: prompt_ids, output_ids and behavior_logprobs hold {num_words} numbers, "
            f"{num_ids + num_logprobs} are announced"
        )
    return num_ids, num_logprobs


def _sampling_of(wire: TurnWire) -> Sampling:
    try:
        return _sampling_from_wire(bytes(wire.sampling))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"turn {wire.turn_id}: sampling is damaged: {error}") from error
