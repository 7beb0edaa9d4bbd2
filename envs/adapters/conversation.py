"""A text environment played in one conversation: an observation in, an action out, until it ends.

What the policy does wrong is its own failure and scores env.failure_reward; what the environment
does wrong is an EnvironmentFailure, and the attempt is played again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from outloop.buffer.errors import EnvironmentFailure, RecordError, SettingsError
from outloop.buffer.records import Reward, Task
from outloop.envs.rollout.episode import Episode

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an environment shows after its start or an action."""

    text: str
    reward: float | None = 0.0
    """Of the action that led here; an episode's reward is the sum. None: the environment gave none,
    which it may do until it is done."""
    is_done: bool = False


class InvalidAction(Exception):
    """The policy's text is no action of the environment; the message says what is allowed."""


class TextEnvironment(Protocol):
    """One episode of an environment whose observations and actions are texts."""

    async def reset(self) -> Observation:
        """Start; raises EnvironmentFailure."""
        ...

    async def step(self, action: str) -> Observation:
        """Act; raises EnvironmentFailure, or InvalidAction, after which the episode goes on."""
        ...

    async def close(self) -> None:
        """Release what the episode holds, in any state."""
        ...


async def play_conversation(
    environment: TextEnvironment,
    episode: Episode,
    *,
    max_invalid_actions: int = 2,
) -> float:
    """Play `environment` with the episode's policy and return the sum of its rewards.

    The episode ends when the environment does, or after as many actions as its task's field
    `max_actions` says (64 where it is left out), with the reward so far. The task's field
    `instructions` is the system message.

    Args:
        max_invalid_actions: so many are answered with what is allowed; the next one fails the
            episode, because a reward of what was played so far could be better than to go on.

    Raises:
        SettingsError: one of these fields is of another type.
        InvalidAction: more than `max_invalid_actions` in this episode: the agent's failure.
        EnvironmentFailure: the environment failed.
    """
    instructions = field(episode.task, "instructions", str, "")
    max_actions = field(episode.task, "max_actions", int, 64)
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    try:
        observation = await environment.reset()
        total, num_actions, num_invalid = observation.reward or 0.0, 0, 0
        shown = observation.text
        while not observation.is_done and num_actions < max_actions:
            messages.append({"role": "user", "content": shown})
            answer = await episode.client.chat.completions.create(
                model="policy",
                messages=messages,  # type: ignore[arg-type]  # plain dictionaries are allowed
            )
            action = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": action})
            try:
                observation = await environment.step(action)
            except InvalidAction as error:
                num_invalid += 1
                if num_invalid > max_invalid_actions:
                    raise
                shown = str(error)
                continue
            num_actions += 1
            total += observation.reward or 0.0
            shown = observation.text
        if observation.is_done and observation.reward is None:
            raise EnvironmentFailure(
                f"task_id={episode.task.task_id!r}: the environment is done and gave no reward"
            )
        return total
    finally:
        await environment.close()


def field(task: Task, name: str, kind: type[Value], default: Value | None = None) -> Value:
    """The field `name` of a task's payload.

    Raises:
        SettingsError: it is missing and has no default, or is of another type.
    """
    value = task.payload.get(name, default)
    if value is None or not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise SettingsError(
            f"task_id={task.task_id!r}: {name}={value!r}; a task of this adapter needs the field "
            f"{name!r} of type {kind.__name__}"
        )
    return value


def reward_of(value: object, source: str) -> float:
    """A reward that an environment gave, as a number.

    Raises:
        EnvironmentFailure: it is none, not finite, or beyond what a reward may be.
    """
    try:
        return Reward(value=value).value  # type: ignore[arg-type]  # what it refuses is asked
    except RecordError as error:
        raise EnvironmentFailure(f"{source}: {error}") from error


def environment_failure(what: str, error: BaseException) -> EnvironmentFailure:
    """The failure of an environment whose own code raised `error`."""
    return EnvironmentFailure(f"{what} failed: {type(error).__name__}: {error}")
