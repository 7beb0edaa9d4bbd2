"""Gymnasium environments whose actions can be written: discrete numbers and texts.

    # tasks.py
    from outloop.envs.adapters import gymnasium_games

    def train_tasks():
        return gymnasium_games.tasks("Blackjack-v1", seeds=range(1000), actions=["stick", "hit"])

    # run.toml
    rollout_function_path = "outloop.envs.adapters.gymnasium_games:play"

Needs the package `gymnasium` (`outloop[games]`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Task
from outloop.envs.adapters.conversation import (
    InvalidAction,
    Observation,
    environment_failure,
    field,
    play_conversation,
    reward_of,
)
from outloop.envs.rollout.episode import Episode


def tasks(
    env_id: str,
    *,
    seeds: Iterable[int],
    instructions: str = "",
    actions: Sequence[str] = (),
    max_actions: int = 64,
    **options: Any,
) -> list[dict[str, Any]]:
    """One task for each seed of an environment.

    Args:
        env_id: a registered name of Gymnasium.
        instructions: the system message, which says what observations and actions mean.
        actions: names of the actions of a Discrete space in their order; left out: numbers.
        options: for `gymnasium.make`.
    """
    shared = {
        "env_id": env_id,
        "instructions": instructions,
        "actions": list(actions),
        "max_actions": max_actions,
        "options": options,
    }
    return [{**shared, "seed": seed} for seed in seeds]


async def play(task: Task, episode: Episode) -> float:
    """Play one seed of one environment; its rewards are summed.

    Raises:
        SettingsError: the environment does not exist, or its actions cannot be written.
        InvalidAction: the policy wrote three times what is no action.
    """
    game = _Game(
        field(task, "env_id", str),
        seed=field(task, "seed", int),
        actions=field(task, "actions", list, []),
        options=field(task, "options", dict, {}),
    )
    return await play_conversation(game, episode)


class _Game:
    """One episode of a Gymnasium environment, whose calls may block, in a thread."""

    def __init__(
        self, env_id: str, *, seed: int, actions: Sequence[str], options: dict[str, Any]
    ) -> None:
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise SettingsError(
                "outloop.envs.adapters.gymnasium_games needs the package gymnasium; install it, "
                "for example by: pip install 'outloop[games]'"
            ) from error
        try:
            self._env = gymnasium.make(env_id, **options)
        except (gymnasium.error.Error, TypeError, ModuleNotFoundError) as error:
            raise SettingsError(f"env_id={env_id!r}, options={options}: {error}") from error
        self._env_id, self._seed = env_id, seed
        space = self._env.action_space
        self._is_text = isinstance(space, gymnasium.spaces.Text)
        if self._is_text:
            return
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise SettingsError(
                f"env_id={env_id!r} has the action space {space}; Discrete and Text are allowed"
            )
        numbers = [int(space.start) + offset for offset in range(int(space.n))]
        if actions and len(actions) != len(numbers):
            raise SettingsError(
                f"actions={list(actions)} are {len(actions)} names, and env_id={env_id!r} has "
                f"{len(numbers)} actions; give one name for each"
            )
        names = actions or [str(number) for number in numbers]
        self._actions = dict(zip((name.lower() for name in names), numbers, strict=True))

    async def reset(self) -> Observation:
        try:
            observation, _ = await asyncio.to_thread(self._env.reset, seed=self._seed)
        except Exception as error:  # an environment may raise anything
            raise environment_failure(f"reset of env_id={self._env_id!r}", error) from error
        return Observation(text=str(observation))

    async def step(self, action: str) -> Observation:
        chosen = action if self._is_text else self._parse(action)
        try:
            observation, reward, terminated, truncated, _ = await asyncio.to_thread(
                self._env.step, chosen
            )
        except Exception as error:  # an environment may raise anything
            raise environment_failure(f"step of env_id={self._env_id!r}", error) from error
        return Observation(
            text=str(observation),
            reward=reward_of(reward, f"step of env_id={self._env_id!r}"),
            is_done=bool(terminated or truncated),
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._env.close)

    def _parse(self, text: str) -> int:
        """The last action that the text names: a policy may think aloud before it."""
        names = sorted(self._actions, key=len, reverse=True)
        pattern = r"(?<![\w-])(" + "|".join(map(re.escape, names)) + r")(?!\w)"
        found = re.findall(pattern, text.lower())
        if not found:
            raise InvalidAction(
                f"That is no action. Allowed: {', '.join(self._actions)}. Answer with one of them."
            )
        return self._actions[found[-1]]
