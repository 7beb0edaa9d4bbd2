"""Records as bytes.

Owns: the binary form of every stored record and its schema number. Does not own: where bytes are
stored (keys) or what fields mean (records). Invariant: decode(encode(record)) == record; bytes of
another schema are refused by name; no bytes make decoding raise anything but SchemaMismatch and
RecordError.

A record is its schema number (uint16, little-endian), then MessagePack of a fixed list of fields;
token ids are int32 and logprobs float32, little-endian; versions and masks are spans.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

from outloop.buffer.errors import RecordError, SchemaMismatch
from outloop.buffer.records import (
    Episode,
    FailureKind,
    FinishReason,
    Float32,
    Int32,
    Opening,
    Outcome,
    Purpose,
    Reward,
    Sampling,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

SCHEMA = 1
MAX_RECORD_BYTES = 64 * 2**20
_HEADER = struct.Struct("<H")
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_Wire = TypeVar("_Wire", bound=msgspec.Struct)


class Closure(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How an episode ended, as it was said by close_episode."""

    outcome: Outcome
    failure_kind: FailureKind | None
    reward: RewardWire | None
    error: str
    output: str = ""


class RewardWire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Reward."""

    value: float
    components: dict[str, float]
    turns: dict[str, float] = {}
    branches: dict[str, float] = {}


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


class _TurnWire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    turn_id: str
    episode_id: str
    parent_turn_id: str | None
    choice_index: int
    prompt_ids: memoryview
    output_ids: memoryview
    behavior_logprobs: memoryview | None
    version_spans: tuple[tuple[int, int, int], ...]
    loss_spans: tuple[tuple[int, int], ...]
    mask_reason: str
    sampling: msgspec.Raw
    """A _SamplingWire; apart, because all turns of a run have few different ones."""
    finish_reason: FinishReason
    branch_cause: str
    retry_key: str | None
    started_at: float
    finished_at: float


class _EpisodeWire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    episode_id: str
    task_id: str
    group_id: str | None
    attempt: int
    purpose: Purpose
    outcome: Outcome
    failure_kind: FailureKind | None
    reward: RewardWire | None
    metadata: dict[str, str]
    opened_at: float
    closed_at: float


class _TrajectoryWire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    episode: _EpisodeWire
    turns: tuple[_TurnWire, ...]


class _OpeningWire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    episode_id: str
    task_id: str
    group_id: str | None
    attempt: int
    purpose: Purpose
    deadline_at: float
    sampling: dict[str, float] | None
    eval_name: str
    metadata: dict[str, str]
    opened_at: float


class _TaskWire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    task_id: str
    payload: dict[str, Any]


_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


@functools.lru_cache(maxsize=256)
def _sampling_to_wire(sampling: Sampling) -> msgspec.Raw:
    words = (getattr(sampling, name) for name in _SamplingWire.__struct_fields__)
    return msgspec.Raw(_ENCODER.encode(_SamplingWire(*words)))


@functools.lru_cache(maxsize=256)
def _sampling_from_wire(data: bytes) -> Sampling:
    wire = msgspec.msgpack.decode(data, type=_SamplingWire)
    return Sampling(**msgspec.structs.asdict(wire))


def encode_turn(turn: Turn) -> bytes:
    """Bytes of a turn."""
    return _encode(_turn_to_wire(turn), f"turn {turn.turn_id}")


def decode_turn(data: bytes) -> Turn:
    """The turn; its arrays are read-only.

    Raises:
        SchemaMismatch: written by a release with another schema.
        RecordError: not a turn, or one that breaks its invariants.
    """
    return _turn_from_wire(_decode(data, _TurnWire, "turn"))


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Bytes of a whole trajectory."""
    e = trajectory.episode
    wire = _TrajectoryWire(
        _EpisodeWire(
            e.episode_id,
            e.task_id,
            e.group_id,
            e.attempt,
            e.purpose,
            e.outcome,
            e.failure_kind,
            _reward_to_wire(e.reward),
            e.metadata,
            e.opened_at,
            e.closed_at,
        ),
        tuple(_turn_to_wire(turn) for turn in trajectory.turns),
    )
    return _encode(wire, f"trajectory {e.episode_id}")


def decode_trajectory(data: bytes) -> Trajectory:
    """The trajectory; raises as decode_turn."""
    wire = _decode(data, _TrajectoryWire, "trajectory")
    e = wire.episode
    episode = Episode(
        episode_id=e.episode_id,
        task_id=e.task_id,
        group_id=e.group_id,
        attempt=e.attempt,
        purpose=e.purpose,
        outcome=e.outcome,
        failure_kind=e.failure_kind,
        reward=reward_from_wire(e.reward),
        metadata=e.metadata,
        opened_at=e.opened_at,
        closed_at=e.closed_at,
    )
    return Trajectory(episode=episode, turns=tuple(_turn_from_wire(turn) for turn in wire.turns))


def encode_reward(reward: Reward) -> bytes:
    """Bytes of a reward."""
    return _encode(_reward_to_wire(reward), "reward")


def decode_reward(data: bytes) -> Reward:
    """The reward; raises as decode_turn."""
    reward = reward_from_wire(_decode(data, RewardWire, "reward"))
    assert reward is not None
    return reward


def encode_closure(
    outcome: Outcome,
    failure_kind: FailureKind | None,
    reward: Reward | None,
    error: str,
    output: str = "",
) -> bytes:
    """Bytes of how an episode ended; equal for equal arguments."""
    closure = Closure(outcome, failure_kind, _reward_to_wire(reward), error, output)
    return _encode(closure, "closure")


def decode_closure(data: bytes) -> Closure:
    """How an episode ended; raises as decode_turn."""
    return _decode(data, Closure, "closure")


def encode_opening(opening: Opening) -> bytes:
    """Bytes of an opening."""
    wire = _OpeningWire(*(getattr(opening, name) for name in _OpeningWire.__struct_fields__))
    return _encode(wire, f"opening {opening.episode_id}")


def decode_opening(data: bytes) -> Opening:
    """The opening; raises as decode_turn."""
    return Opening(**msgspec.structs.asdict(_decode(data, _OpeningWire, "opening")))


def encode_task(task: Task) -> bytes:
    """Bytes of a task.

    Raises:
        RecordError: its payload is not JSON-able.
    """
    return _encode(_TaskWire(task.task_id, task.payload), f"task {task.task_id}")


def decode_task(data: bytes) -> Task:
    """The task; raises as decode_turn."""
    wire = _decode(data, _TaskWire, "task")
    return Task(task_id=wire.task_id, payload=wire.payload)


def reward_from_wire(wire: RewardWire | None) -> Reward | None:
    """The reward inside a closure."""
    return None if wire is None else Reward(**msgspec.structs.asdict(wire))


def _reward_to_wire(reward: Reward | None) -> RewardWire | None:
    if reward is None:
        return None
    scores = (
        {name: float(number) for name, number in numbers.items()}
        for numbers in (reward.components, reward.turns, reward.branches)
    )
    return RewardWire(float(reward.value), *scores)


def _turn_to_wire(turn: Turn) -> _TurnWire:
    logprobs = turn.behavior_logprobs
    return _TurnWire(
        turn.turn_id,
        turn.episode_id,
        turn.parent_turn_id,
        turn.choice_index,
        _array_to_wire(turn.prompt_ids, "<i4"),
        _array_to_wire(turn.output_ids, "<i4"),
        None if logprobs is None else _array_to_wire(logprobs, "<f4"),
        tuple((span.policy_version, span.start, span.end) for span in turn.version_spans),
        turn.loss_spans,
        turn.mask_reason,
        _sampling_to_wire(turn.sampling),
        turn.finish_reason,
        turn.branch_cause,
        turn.retry_key,
        turn.started_at,
        turn.finished_at,
    )


def _turn_from_wire(wire: _TurnWire) -> Turn:
    logprobs = wire.behavior_logprobs
    try:
        sampling = _sampling_from_wire(bytes(wire.sampling))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"turn {wire.turn_id}: sampling is damaged: {error}") from error
    return Turn(
        turn_id=wire.turn_id,
        episode_id=wire.episode_id,
        parent_turn_id=wire.parent_turn_id,
        choice_index=wire.choice_index,
        prompt_ids=_array_from_wire(wire.prompt_ids, _INT32, wire, "prompt_ids"),
        output_ids=_array_from_wire(wire.output_ids, _INT32, wire, "output_ids"),
        behavior_logprobs=None
        if logprobs is None
        else _array_from_wire(logprobs, _FLOAT32, wire, "behavior_logprobs"),
        version_spans=tuple(
            VersionSpan(policy_version=version, start=start, end=end)
            for version, start, end in wire.version_spans
        ),
        loss_spans=wire.loss_spans,
        mask_reason=wire.mask_reason,
        sampling=sampling,
        finish_reason=wire.finish_reason,
        branch_cause=wire.branch_cause,
        retry_key=wire.retry_key,
        started_at=wire.started_at,
        finished_at=wire.finished_at,
    )


def _array_to_wire(array: Int32 | Float32, dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype=dtype).view(np.uint8).data


def _array_from_wire(data: memoryview, dtype: np.dtype[Any], wire: _TurnWire, name: str) -> Any:
    if len(data) % 4:
        raise RecordError(
            f"turn {wire.turn_id}: {name} has {len(data)} bytes; a multiple of 4 is allowed"
        )
    # A copy is aligned, and whatever reads the array is faster for it than the copy takes.
    return np.frombuffer(bytes(data), dtype=dtype)


def _encode(wire: msgspec.Struct | None, what: str) -> bytes:
    record = bytearray(_HEADER.pack(SCHEMA))
    try:
        _ENCODER.encode_into(wire, record, _HEADER.size)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{what} cannot be stored: {error}") from error
    if len(record) > MAX_RECORD_BYTES:
        raise RecordError(
            f"{what} takes {len(record)} bytes; at most {MAX_RECORD_BYTES} are allowed. Split it, "
            "or lower model.max_context_tokens"
        )
    return bytes(record)


def _decode(data: bytes, kind: type[_Wire], what: str) -> _Wire:
    if len(data) < _HEADER.size:
        raise RecordError(f"{what} has {len(data)} bytes and no schema number; it is damaged")
    (schema,) = _HEADER.unpack_from(data)
    if schema != SCHEMA:
        raise SchemaMismatch(
            f"{what} was written with schema={schema}, this release reads schema={SCHEMA}; read it "
            "with the release that wrote it, or start a new run"
        )
    try:
        return msgspec.msgpack.decode(memoryview(data)[_HEADER.size :], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{what} is damaged: {error}") from error
