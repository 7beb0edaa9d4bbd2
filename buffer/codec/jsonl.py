"""Trajectories as lines of JSON.

parse_line(format_line(x)) equals x: every id, logprob and span, bit by bit. A line that is not a
trajectory raises RecordError or SchemaMismatch, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outloop.buffer.errors import OutloopError, RecordError, SchemaMismatch, SettingsError
from outloop.buffer.records import Float32, Int32, Trajectory, check_turns

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    outloop_trajectory: int
    """The schema; the name identifies the kind of line."""
    trajectory: Trajectory


class _Head(msgspec.Struct):
    outloop_trajectory: int


def format_line(trajectory: Trajectory) -> bytes:
    """One line, the line break included.

    Raises:
        RecordError: it holds a time or a sampling parameter that is not finite, which JSON lacks.
    """
    _refuse_infinities(trajectory)
    line = _Line(outloop_trajectory=SCHEMA, trajectory=trajectory)
    try:
        return msgspec.json.encode(line, enc_hook=_array_to_list) + b"\n"
    except (TypeError, ValueError, OverflowError) as error:
        what = f"trajectory {trajectory.episode.episode_id}"
        raise RecordError(f"{what} cannot be written as JSON: {error}") from error


def parse_line(line: bytes) -> Trajectory:
    """The trajectory of a line.

    Raises:
        RecordError: not a trajectory; the message names the field.
        SchemaMismatch: written by a release with another schema.
    """
    try:
        schema = msgspec.json.decode(line, type=_Head).outloop_trajectory
        if schema != SCHEMA:
            raise SchemaMismatch(
                f"written with outloop_trajectory={schema}; this release reads {SCHEMA}. "
                "Read it with the release that wrote it"
            )
        parsed = msgspec.json.decode(line, type=_Line, dec_hook=_array_from)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"not a trajectory: {error}") from error
    trajectory = parsed.trajectory
    check_turns(trajectory.episode.episode_id, trajectory.turns)
    return trajectory


def read_lines(path: Path) -> Generator[tuple[int, Trajectory | OutloopError]]:
    """(line number from 1, its trajectory or what is wrong with it); empty lines are left out.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield number, parse_line(line)
                except (RecordError, SchemaMismatch) as error:
                    yield number, error
    except OSError as error:
        raise SettingsError(f"path={str(path)!r} cannot be read: {error}") from error


def _refuse_infinities(trajectory: Trajectory) -> None:
    episode = trajectory.episode
    numbers = [("opened_at", episode.opened_at), ("closed_at", episode.closed_at)]
    for turn in trajectory.turns:
        numbers += [("started_at", turn.started_at), ("finished_at", turn.finished_at)]
        for name in turn.sampling.__struct_fields__:
            value = getattr(turn.sampling, name)
            if isinstance(value, float):
                numbers.append((f"sampling.{name}", value))
    for name, value in numbers:
        if not math.isfinite(value):
            raise RecordError(
                f"trajectory {episode.episode_id}: {name}={value}; a finite number is allowed"
            )


def _array_to_list(value: Any) -> list[int] | list[float]:
    # float32 -> float -> float32 is exact.
    assert isinstance(value, np.ndarray)
    return list(value.tolist())


def _array_from(kind: Any, value: Any) -> Int32 | Float32:
    if kind == Int32:
        ids = _checked(value, list[int])
        if ids and not 0 <= min(ids) <= max(ids) < 2**31:
            raise ValueError("token ids from 0 to 2**31 - 1 are allowed")
        return np.array(ids, dtype=np.int32)
    with np.errstate(over="ignore"):
        return np.array(_checked(value, list[float]), dtype=np.float32)


def _checked(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        # msgspec adds the path of the array to a ValueError.
        raise ValueError(str(error)) from error
