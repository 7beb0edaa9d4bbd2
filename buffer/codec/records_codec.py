"""Records as bytes.

Owns: the binary form of every stored record and its schema number. Does not own: where bytes are
stored (keys), how they are framed (frames), what fields mean (records). Invariant:
decode(encode(record)) == record; bytes of another schema are refused by name; no bytes make
decoding raise anything but SchemaMismatch and RecordError.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from outloop.buffer.codec.frame import (
    MAX_RECORD_BYTES,
    SCHEMA,
    many_at_once,
    pack,
    recast,
    unpack,
)
from outloop.buffer.codec.turn_codec import Frame, TurnWire, turn_parts, turn_to_wire, turns_of
from outloop.buffer.records import (
    Episode,
    FailureKind,
    Opening,
    Outcome,
    Purpose,
    Reward,
    Task,
    Trajectory,
    Turn,
)

__all__ = ["MAX_RECORD_BYTES", "SCHEMA", "many_at_once"]


class Closure(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How an episode ended, as it was said by close_episode."""

    outcome: Outcome
    failure_kind: FailureKind | None
    reward: RewardWire | None
    error: str
    output: str = ""


class RewardWire(msgspec.Struct, array_like=True, gc=False):
    """Reward."""

    value: float
    components: dict[str, float]
    turns: dict[str, float] = {}
    branches: dict[str, float] = {}


class _EpisodeWire(msgspec.Struct, array_like=True, gc=False):
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


class _TrajectoryWire(msgspec.Struct, array_like=True, gc=False):
    episode: _EpisodeWire
    turns: tuple[TurnWire, ...]


class _OpeningWire(msgspec.Struct, array_like=True, gc=False):
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


_SHARED_BYTES = 256
"""Closures up to so many bytes are decoded once for all that are equal."""
_TURN = msgspec.msgpack.Decoder(TurnWire)
_TRAJECTORY = msgspec.msgpack.Decoder(_TrajectoryWire)
_OPENING = msgspec.msgpack.Decoder(_OpeningWire)
_CLOSURE = msgspec.msgpack.Decoder(Closure)
_REWARD = msgspec.msgpack.Decoder(RewardWire)
_TASK = msgspec.msgpack.Decoder(_TaskWire)


def encode_turn(turn: Turn) -> bytes:
    """Bytes of a turn."""
    return b"".join(turn_parts(turn_to_wire(turn), (turn,), f"turn {turn.turn_id}")[0])


def decode_turn(data: bytes) -> Turn:
    """The turn; its arrays are read-only.

    Raises:
        SchemaMismatch: written by a release with another schema.
        RecordError: not a turn, or one that breaks its invariants.
    """
    return decode_turns((data,))[0]


def decode_turns(records: Sequence[bytes]) -> list[Turn]:
    """Many at once, for a fraction of what one after the other costs; raises as decode_turn."""
    frames: list[Frame] = []
    for data in records:
        wire, num_words = unpack(data, _TURN, "turn")
        frames.append((data, (wire,), num_words))
    return turns_of(frames)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Bytes of a whole trajectory."""
    return b"".join(trajectory_parts(trajectory)[0])


def trajectory_parts(trajectory: Trajectory) -> tuple[list[Any], int]:
    """(what those bytes are made of, in order: bytes, and arrays that are not copied; how many)."""
    episode = recast(trajectory.episode, _EpisodeWire)
    episode.reward = _reward_to_wire(trajectory.episode.reward)
    wire = _TrajectoryWire(episode, tuple(map(turn_to_wire, trajectory.turns)))
    return turn_parts(wire, trajectory.turns, f"trajectory {episode.episode_id}")


def decode_trajectory(data: bytes) -> Trajectory:
    """The trajectory; raises as decode_turn."""
    return decode_trajectories((data,))[0]


def decode_trajectories(records: Sequence[bytes]) -> list[Trajectory]:
    """Many at once; raises as decode_turn."""
    frames: list[Frame] = []
    wires: list[_TrajectoryWire] = []
    for data in records:
        wire, num_words = unpack(data, _TRAJECTORY, "trajectory")
        wires.append(wire)
        frames.append((data, wire.turns, num_words))
    # Each wire becomes a turn where it is.
    turns_of(frames)
    return list(map(_trajectory_from_wire, wires))


def _trajectory_from_wire(wire: Any) -> Trajectory:
    wire.episode.reward = reward_from_wire(wire.episode.reward)
    wire.episode.__class__ = Episode
    wire.__class__ = Trajectory
    return wire


def decode_episode(
    episode_id: str, opening: bytes, closure: bytes, reward: bytes | None, closed_at: float
) -> Episode:
    """The closed episode that was stored as these; raises as decode_turn."""
    began, _ = unpack(opening, _OPENING, "opening")
    ended = _shared_closure(closure) if len(closure) <= _SHARED_BYTES else decode_closure(closure)
    episode: Any = _EpisodeWire(
        episode_id,
        began.task_id,
        began.group_id,
        began.attempt,
        began.purpose,
        ended.outcome,
        ended.failure_kind,
        None,
        began.metadata,
        began.opened_at,
        closed_at,
    )
    if reward is not None:
        episode.reward = decode_reward(reward)
    episode.__class__ = Episode
    return episode


@functools.lru_cache(maxsize=256)
def _shared_closure(data: bytes) -> Closure:
    """As decode_closure, for who changes nothing in it: most episodes of a run end alike."""
    return decode_closure(data)


def encode_reward(reward: Reward) -> bytes:
    """Bytes of a reward."""
    return pack(_reward_to_wire(reward), "reward")


def decode_reward(data: bytes) -> Reward:
    """The reward; raises as decode_turn."""
    reward = reward_from_wire(unpack(data, _REWARD, "reward")[0])
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
    return pack(closure, "closure")


def decode_closure(data: bytes) -> Closure:
    """How an episode ended; raises as decode_turn."""
    return unpack(data, _CLOSURE, "closure")[0]


def encode_opening(opening: Opening) -> bytes:
    """Bytes of an opening."""
    return pack(recast(opening, _OpeningWire), f"opening {opening.episode_id}")


def decode_opening(data: bytes) -> Opening:
    """The opening; raises as decode_turn."""
    wire: Any = unpack(data, _OPENING, "opening")[0]
    wire.__class__ = Opening
    return wire


def encode_task(task: Task) -> bytes:
    """Bytes of a task.

    Raises:
        RecordError: its payload is not JSON-able.
    """
    return pack(_TaskWire(task.task_id, task.payload), f"task {task.task_id}")


def decode_task(data: bytes) -> Task:
    """The task; raises as decode_turn."""
    wire, _ = unpack(data, _TASK, "task")
    return Task(task_id=wire.task_id, payload=wire.payload)


def reward_from_wire(wire: RewardWire | None) -> Reward | None:
    """The reward inside a closure."""
    if wire is None:
        return None
    reward: Any = wire
    reward.__class__ = Reward
    reward.check()
    return reward


def _reward_to_wire(reward: Reward | None) -> RewardWire | None:
    if reward is None:
        return None
    named = (reward.components, reward.turns, reward.branches)
    if not any(named):
        return RewardWire(float(reward.value), {}, {}, {})
    return RewardWire(
        float(reward.value),
        *({name: float(number) for name, number in numbers.items()} for numbers in named),
    )
