"""The turns inside a frame.

Owns: the fields of a turn as they are stored, and building many turns at once. Does not own: which
records have turns (codec) or how bytes are framed (frames). Invariant: turns that come out keep
every invariant of records.Turn; bytes that break one raise RecordError.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from outloop.buffer.codec.frame import (
    HEAD_BYTES,
    SHARED_BYTES,
    WORD_BYTES,
    arrays_of,
    pack_parts,
    recast,
    shared_arrays,
)
from outloop.buffer.errors import RecordError
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


def turn_of_known(**values: Any) -> Turn:
    """A Turn whose arrays need no check, for who made them of numbers that were checked.

    Args:
        values: all fields of Turn; arrays without gaps, ids not negative, logprobs finite and as
            many as `output_ids`.

    Raises:
        RecordError: its spans do not fit.
    """
    turn: Any = TurnWire(**values)
    turn.__class__ = Turn
    turn.check_spans()
    return turn


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


def turns_of(frames: Iterable[Frame]) -> list[Turn]:
    """The turns of all frames, in order; the wires that are given become them.

    Raises:
        RecordError: one breaks its invariants.
    """
    placed, shared = _placed(frames)
    turns: list[Turn] = []
    sampling_wire: msgspec.Raw | None = None
    turn: Any
    for wires, own, at, logprobs_at in placed:
        ids, logprobs = own or shared
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
            turns.append(turn)
    return turns


_Place = tuple[Sequence[TurnWire], tuple[Int32, Float32] | None, int, int]
"""Turns of a frame, its arrays or None for those that small frames share, and where in them the
frame's ids and logprobs begin."""


@np.errstate(over="ignore", invalid="ignore")
def _placed(frames: Iterable[Frame]) -> tuple[list[_Place], tuple[Int32, Float32]]:
    """(where the arrays of each frame are, the arrays that small frames share).

    Each frame's numbers are counted here, in one loop: for a short turn, calls and tuples of our
    own would cost as much as the rest.
    """
    placed: list[_Place] = []
    small_ids: list[memoryview] = []
    small_logprobs: list[memoryview] = []
    at = logprobs_at = 0
    for data, wires, num_words in frames:
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
        if len(data) < SHARED_BYTES:
            view, middle = memoryview(data), HEAD_BYTES + WORD_BYTES * num_ids
            small_ids.append(view[HEAD_BYTES:middle])
            small_logprobs.append(view[middle : HEAD_BYTES + WORD_BYTES * num_words])
            placed.append((wires, None, at, logprobs_at))
            at += num_ids
            logprobs_at += num_logprobs
        else:
            placed.append((wires, arrays_of(data, num_ids, num_words), 0, 0))
    return placed, shared_arrays(small_ids, small_logprobs)


def _sampling_of(wire: TurnWire) -> Sampling:
    try:
        return _sampling_from_wire(bytes(wire.sampling))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"turn {wire.turn_id}: sampling is damaged: {error}") from error
