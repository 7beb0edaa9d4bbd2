"""Records as bytes.

Owns: the binary form of every stored record and its schema number. Does not own: where bytes are
stored (keys), how they are framed (frames), what fields mean (records). Invariant:
decode(encode(record)) == record; bytes of another schema are refused by name; no bytes make
decoding raise anything but SchemaMismatch and RecordError.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

from outloop.buffer.frames import (
    MAX_RECORD_BYTES,
    SCHEMA,
    many_at_once,
    pack,
    unpack,
)
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
    unchecked_twin,
)
from outloop.buffer.turns import Frame, TurnWire, turn_parts, turn_to_wire, turns_of

__all__ = ["MAX_RECORD_BYTES", "SCHEMA", "many_at_once"]


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
    turns: tuple[TurnWire, ...]


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


_SHARED_BYTES = 256
"""Closures and rewards up to so many bytes are decoded once for all that are equal."""
_UncheckedEpisode, _UncheckedReward = unchecked_twin(Episode), unchecked_twin(Reward)
_UncheckedTrajectory = unchecked_twin(Trajectory)
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
    return list(turns_of(frames))


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Bytes of a whole trajectory."""
    return b"".join(trajectory_parts(trajectory)[0])


def trajectory_parts(trajectory: Trajectory) -> tuple[list[Any], int]:
    """(what those bytes are made of, in order: bytes, and arrays that are not copied; how many)."""
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
        tuple(map(turn_to_wire, trajectory.turns)),
    )
    return turn_parts(wire, trajectory.turns, f"trajectory {e.episode_id}")


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
    turns = turns_of(frames)
    return [
        trajectory_from(_episode_from_wire(wire.episode), itertools.islice(turns, len(wire.turns)))
        for wire in wires
    ]


def trajectory_from(episode: Episode, turns: Iterable[Turn]) -> Trajectory:
    """The two as one, for a third of what the class takes to build itself."""
    trajectory = _UncheckedTrajectory()
    trajectory.episode = episode
    trajectory.turns = tuple(turns)
    trajectory.__class__ = Trajectory
    return cast(Trajectory, trajectory)


def _episode_from_wire(e: _EpisodeWire) -> Episode:
    return _episode(e, e, reward_from_wire(e.reward), e.episode_id, e.closed_at)


def _episode(
    began: _OpeningWire | _EpisodeWire,
    ended: Closure | _EpisodeWire,
    reward: Reward | None,
    episode_id: str,
    closed_at: float,
) -> Episode:
    episode = _UncheckedEpisode()
    episode.episode_id = episode_id
    episode.task_id = began.task_id
    episode.group_id = began.group_id
    episode.attempt = began.attempt
    episode.purpose = began.purpose
    episode.outcome = ended.outcome
    episode.failure_kind = ended.failure_kind
    episode.reward = reward
    episode.metadata = began.metadata
    episode.opened_at = began.opened_at
    episode.closed_at = closed_at
    episode.__class__ = Episode
    return cast(Episode, episode)


def decode_episode(
    episode_id: str, opening: bytes, closure: bytes, reward: bytes | None, closed_at: float
) -> Episode:
    """The closed episode that was stored as these; raises as decode_turn."""
    began, _ = unpack(opening, _OPENING, "opening")
    ended = _shared_closure(closure) if len(closure) <= _SHARED_BYTES else decode_closure(closure)
    return _episode(
        began, ended, None if reward is None else decode_reward(reward), episode_id, closed_at
    )


@functools.lru_cache(maxsize=256)
def _shared_closure(data: bytes) -> Closure:
    """As decode_closure, for who changes nothing in it: most episodes of a run end alike."""
    return decode_closure(data)


def _reward_wire(data: bytes) -> RewardWire:
    return unpack(data, _REWARD, "reward")[0]


_shared_reward_wire = functools.lru_cache(maxsize=256)(_reward_wire)
"""The same, for who changes nothing in it."""


def encode_reward(reward: Reward) -> bytes:
    """Bytes of a reward."""
    return pack(_reward_to_wire(reward), "reward")


def decode_reward(data: bytes) -> Reward:
    """The reward; raises as decode_turn."""
    decode = _shared_reward_wire if len(data) <= _SHARED_BYTES else _reward_wire
    reward = reward_from_wire(decode(data))
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
    wire = _OpeningWire(*(getattr(opening, name) for name in _OpeningWire.__struct_fields__))
    return pack(wire, f"opening {opening.episode_id}")


def decode_opening(data: bytes) -> Opening:
    """The opening; raises as decode_turn."""
    return Opening(**msgspec.structs.asdict(unpack(data, _OPENING, "opening")[0]))


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
    reward = _UncheckedReward()
    reward.value, reward.components = wire.value, {**wire.components}
    reward.turns, reward.branches = {**wire.turns}, {**wire.branches}
    reward.__class__ = Reward
    reward.check()
    return cast(Reward, reward)


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
