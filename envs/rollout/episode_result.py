"""How an episode ended, and what its reward is made of.

Owns: the record of an ending, and turning what a rollout function or a verifier gave back into a
reward. Does not own: whose failure it was (failures), closing the episode (runner).
Invariant: a reward is never made up; what is no finite number raises.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outloop.buffer.errors import RecordError
from outloop.buffer.records import FailureKind, Outcome, Reward

_MAX_ERROR_CHARS = 500
_MAX_TRACE_CHARS = 8000


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What the runner tells the router about the end of one episode, and the log about it."""

    outcome: Outcome
    failure_kind: FailureKind | None = None
    reward: Reward | None = None
    error: str = ""
    output: str = ""
    """The end of what an agent program wrote."""
    error_type: str = ""
    place: str = ""
    """file:line where the error came from."""
    trace: str = ""
    is_refused: bool = False
    """The settings do not allow what the function wants; the run stops with `error`."""
    is_bad_reward: bool = False
    """The agent played, but the verifier gave nothing that can be trained."""


def failed(
    error: BaseException,
    kind: FailureKind,
    *,
    reward: Reward | None = None,
    outcome: Outcome = "failed",
    output: str = "",
) -> Ending:
    """The ending of an episode that `error` ended; `reward` only for failures of the agent."""
    frames = traceback.extract_tb(error.__traceback__)
    trace = "".join(traceback.format_exception(error)) if frames else ""
    return Ending(
        outcome=outcome,
        failure_kind=kind,
        reward=reward,
        error=f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS],
        output=output,
        error_type=type(error).__name__,
        place=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
        trace=trace[-_MAX_TRACE_CHARS:],
    )


def without_reward(error: RecordError, *, output: str = "") -> Ending:
    """The ending of an episode whose score is none: a failure of the environment."""
    return Ending(
        outcome="failed",
        failure_kind="environment",
        error=str(error)[:_MAX_ERROR_CHARS],
        output=output,
        error_type=type(error).__name__,
        is_bad_reward=True,
    )


def as_reward(value: Any, weights: Mapping[str, float]) -> Reward:
    """What was returned, as a reward; scalars of array libraries count as numbers.

    Named components add up, each times its weight (1 where `weights` does not name it).

    Raises:
        RecordError: with the sentence for whoever wrote the verifier.
    """
    if isinstance(value, Reward):
        return value
    if isinstance(value, Mapping):
        components = {str(name): _number(number) for name, number in value.items()}
        if not components:
            raise RecordError(
                "the verifier returned no component; return a number or a mapping of names to "
                "numbers"
            )
        checked = Reward(value=0.0, components=components).components
        total = sum(weights.get(name, 1.0) * number for name, number in checked.items())
        return Reward(value=total, components=checked)
    return Reward(value=_number(value))


def _number(value: Any) -> Any:
    if not isinstance(value, int | float) and getattr(value, "shape", None) == ():
        return value.item()
    return value
