"""How an episode ended, and how a returned value becomes a reward.

A reward is never made up: a value that is not a finite number raises. `runner.failures` decides the
kind of a failure.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outloop.buffer.errors import RecordError
from outloop.buffer.foreign_text import storable
from outloop.buffer.records import FailureKind, Outcome, Reward
from outloop.buffer.user_code import text_of
from outloop.envs.user_code import cause_of

_MAX_ERROR_CHARS = 500
_MAX_TRACE_CHARS = 8000
_MAX_CAUSES = 8
_PYTHON_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_NODE_FRAME = re.compile(r"^\s+at .*?(?:file://)?(/[^\s():]+):(\d+):\d+\)?$", re.MULTILINE)
_INSTALLED = ("site-packages/", "dist-packages/", "node_modules/", "/lib/python3")
_NOT_THE_USERS = tuple(
    str(folder)
    for folder in {
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
        *(Path(__file__).parents[2], Path(__file__).resolve().parents[1]),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeResult:
    """How one episode ended, for the router and the log."""

    outcome: Outcome
    failure_kind: FailureKind | None = None
    reward: Reward | None = None
    error: str = ""
    output: str = ""
    """The end of what an agent program wrote."""
    error_type: str = ""
    place: str = ""
    """file:line in the user's code at which the error was raised; empty if it is not known."""
    trace: str = ""
    is_refused: bool = False
    """True: the settings do not allow what the function did; the run stops with `error`."""
    is_bad_reward: bool = False
    """True: the agent played, but the verifier returned no usable reward."""
    is_before_calls: bool = False
    """True: the agent failed before its first model call, so the policy had no part in it."""

    def __post_init__(self) -> None:
        for name in ("error", "output", "error_type", "place", "trace"):
            object.__setattr__(self, name, storable(getattr(self, name)))


def failed(
    error: BaseException,
    kind: FailureKind,
    *,
    reward: Reward | None = None,
    outcome: Outcome = "failed",
    output: str = "",
) -> EpisodeResult:
    """The result of an episode that `error` ended; `reward` only for failures of the agent."""
    was_raised = error.__traceback__ is not None
    place = _user_place(error) if was_raised else _place_in(output)
    error = cause_of(error)
    trace = "".join(traceback.format_exception(error)) if was_raised else ""
    return EpisodeResult(
        outcome=outcome,
        failure_kind=kind,
        reward=reward,
        error=f"{type(error).__name__}: {text_of(error)}"[:_MAX_ERROR_CHARS]
        + (f" at {place}" * bool(place)),
        output=output,
        error_type=type(error).__name__,
        place=place,
        trace=trace[-_MAX_TRACE_CHARS:],
    )


def _user_place(error: BaseException) -> str:
    """file:line of the innermost frame outside Python, installed packages and outloop; of the
    error's cause if the error has none."""
    link: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if link is None:
            break
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if not frame.filename.startswith(("<", *_NOT_THE_USERS)):
                return f"{frame.filename}:{frame.lineno}"
        link = link.__cause__
    return ""


def _place_in(output: str) -> str:
    """The same from a program's output: a traceback of Python or a stack of Node.js."""
    inner_last = list(reversed(_PYTHON_FRAME.findall(output)))
    for file, line in inner_last or _NODE_FRAME.findall(output):
        if not file.startswith("<") and not any(part in file for part in _INSTALLED):
            return f"{file}:{line}"
    return ""


def without_reward(error: RecordError, *, output: str = "") -> EpisodeResult:
    """The result of an episode without a usable reward: a failure of the environment."""
    return EpisodeResult(
        outcome="failed",
        failure_kind="environment",
        error=text_of(error)[:_MAX_ERROR_CHARS],
        output=output,
        error_type=type(error).__name__,
        is_bad_reward=True,
    )


def as_reward(value: Any, weights: Mapping[str, float]) -> Reward:
    """Turn a returned value into a reward; scalars of array libraries count as numbers.

    The value of named components is their sum, each times its weight (1 if `weights` has none).

    Raises:
        RecordError: the value is no number or holds none; written for the verifier's author.
    """
    if isinstance(value, Reward):
        return value
    if isinstance(value, Mapping):
        components = {str(name): number for name, number in value.items()}
        if not components:
            raise RecordError(
                "the verifier returned no component; return a number or a mapping of names to "
                "numbers"
            )
        checked = Reward(value=0.0, components=components).components
        total = sum(weights.get(name, 1.0) * number for name, number in checked.items())
        return Reward(value=total, components=checked)
    return Reward(value=value)
