"""Records as bytes: a schema number, then MessagePack.

Guarantees: decode(encode(record)) == record. Bytes of another schema are refused by its number.
Decoding raises SchemaMismatch or RecordError, whatever the bytes are.

A stored record is the schema number (uint16, little-endian) and a MessagePack map of the record's
fields. Arrays are binary fields of little-endian int32 (token ids) or float32 (logprobs).
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from outloop.buffer.errors import RecordError, SchemaMismatch
from outloop.buffer.records import (
    FLOAT32,
    INT32,
    NO_REFUSALS,
    Episode,
    FailureKind,
    Int32,
    Opening,
    Outcome,
    Refusals,
    Reward,
    Task,
    Trajectory,
    Turn,
)

SCHEMA = 4
MAX_RECORD_BYTES = 64 * 2**20
_HEAD = struct.Struct("<H")
_OWN_HEAD = _HEAD.pack(SCHEMA)
_Record = TypeVar("_Record")


class Closure(msgspec.Struct, frozen=True, gc=False):
    """How an episode ended; its fields are the arguments of close_episode."""

    outcome: Outcome
    failure_kind: FailureKind | None
    reward: Reward | None
    error: str
    output: str = ""


def _encode_array(value: Any) -> memoryview:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be stored")
    # Turn has made it contiguous and little-endian.
    return value.data


def _decode_array(kind: Any, value: Any) -> Any:
    if kind is object:
        # A value in a task's payload.
        return value
    if not isinstance(value, bytes):
        raise ValueError(f"{type(value).__name__} in the place of an array")
    if kind == Int32:
        return np.frombuffer(value, INT32)
    return np.frombuffer(value, FLOAT32)


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_array, order="deterministic").encode


class _Codec(Generic[_Record]):
    """Bytes of one kind of record."""

    def __init__(self, kind: type[_Record], name: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
        self._name = name

    def encode(self, record: _Record, record_id: str = "") -> bytes:
        """Bytes of `record`.

        Raises:
            RecordError: a field cannot be stored, or the record is too large.
        """
        what = f"{self._name} {record_id}".rstrip()
        try:
            data = _OWN_HEAD + _encode(record)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RecordError(f"{what} cannot be stored: {error}") from error
        if len(data) > MAX_RECORD_BYTES:
            raise RecordError(
                f"{what} takes {len(data)} bytes; at most {MAX_RECORD_BYTES} are allowed. Split "
                "it, or lower model.max_context_tokens"
            )
        return data

    def decode(self, data: bytes) -> _Record:
        """The record; its arrays are read-only.

        Raises:
            SchemaMismatch: written by a release with another schema.
            RecordError: the bytes are damaged, or the record breaks its own rules.
        """
        if data[: _HEAD.size] != _OWN_HEAD:
            if len(data) < _HEAD.size:
                raise RecordError(f"{self._name} has {len(data)} bytes; it is damaged")
            raise SchemaMismatch(
                f"{self._name} was written with schema={_HEAD.unpack_from(data)[0]}, this release "
                f"reads schema={SCHEMA}; read it with the release that wrote it"
            )
        try:
            return self._decoder.decode(memoryview(data)[_HEAD.size :])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordError(f"{self._name} is damaged: {error}") from error


_TURN = _Codec(Turn, "turn")
_TRAJECTORY = _Codec(Trajectory, "trajectory")
_OPENING = _Codec(Opening, "opening")
_CLOSURE = _Codec(Closure, "closure")
_REWARD = _Codec(Reward, "reward")
_TASK = _Codec(Task, "task")

decode_turn = _TURN.decode
decode_trajectory = _TRAJECTORY.decode
decode_opening = _OPENING.decode
decode_closure = _CLOSURE.decode
decode_reward = _REWARD.decode
decode_task = _TASK.decode
encode_reward = _REWARD.encode


def encode_turn(turn: Turn) -> bytes:
    """Bytes of a turn."""
    return _TURN.encode(turn, turn.turn_id)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Bytes of a whole trajectory."""
    return _TRAJECTORY.encode(trajectory, trajectory.episode.episode_id)


def encode_opening(opening: Opening) -> bytes:
    """Bytes of an opening."""
    return _OPENING.encode(opening, opening.episode_id)


def encode_closure(
    outcome: Outcome,
    failure_kind: FailureKind | None,
    reward: Reward | None,
    error: str,
    output: str = "",
) -> bytes:
    """Bytes of how an episode ended; equal for equal arguments."""
    return _CLOSURE.encode(Closure(outcome, failure_kind, reward, error, output))


def encode_task(task: Task) -> bytes:
    """Bytes of a task, without its priority, which only its registration knows.

    Raises:
        RecordError: its payload is not JSON-able.
    """
    return _TASK.encode(dataclasses.replace(task, priority=0), task.task_id)


def decode_refusals(data: bytes | None) -> Refusals:
    """The refusals that the script note_refusal packed; None: there were none.

    Raises:
        RecordError: the bytes are damaged.
    """
    if data is None:
        return NO_REFUSALS
    try:
        last, *counts = msgspec.msgpack.decode(data, type=list[str | int])
        pairs = dict(zip(counts[::2], counts[1::2], strict=True))
        return msgspec.convert({"counts": pairs, "last": last}, Refusals)
    except (ValueError, UnicodeDecodeError) as error:
        raise RecordError(f"refusals are damaged: {error}") from error


def decode_episode(
    episode_id: str,
    opening: bytes,
    closure: bytes,
    reward: bytes | None,
    refusals: bytes | None,
    closed_at: float,
) -> Episode:
    """The closed episode that was stored as these; raises as decode_turn."""
    began, ended = decode_opening(opening), decode_closure(closure)
    return Episode(
        episode_id=episode_id,
        task_id=began.task_id,
        group_id=began.group_id,
        attempt=began.attempt,
        purpose=began.purpose,
        outcome=ended.outcome,
        failure_kind=ended.failure_kind,
        reward=None if reward is None else decode_reward(reward),
        metadata=began.metadata,
        opened_at=began.opened_at,
        closed_at=closed_at,
        refusals=decode_refusals(refusals),
    )
