"""TextArena games: one player, or two with another model in the other seat.

    from outloop.envs.adapters import textarena_games

    def train_tasks():
        return textarena_games.tasks("GuessTheNumber-v0", seeds=range(1000))

    def duels():    # both seats of each game, against the model of [router.upstreams.opponent]
        return textarena_games.tasks("TicTacToe-v0", seeds=range(500), opponent="opponent")

A game that uses Python's shared random numbers after its start is repeatable in its start alone.
Needs the package `textarena` (`outloop[games]`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Task
from outloop.envs.adapters.conversation import (
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
    opponent: str | None = None,
    instructions: str = "",
    max_actions: int = 64,
    **options: Any,
) -> list[dict[str, Any]]:
    """One task for each seed; with an opponent one for each seed and seat.

    Args:
        env_id: a registered name of TextArena.
        opponent: the model in the other seat: an upstream's name, `policy@frozen` or
            `policy@VERSION` (server.num_frozen). The policy itself is refused: its tokens would be
            trained with the reward of the other seat.
        options: for `textarena.make`.

    Raises:
        SettingsError: the opponent is the policy that is trained.
    """
    if opponent == "policy":
        raise SettingsError(
            f"opponent={opponent!r} would be trained with the reward of the seat it plays against; "
            "give a version that is not trained, for example opponent='policy@frozen'"
        )
    shared = {
        "env_id": env_id,
        "instructions": instructions,
        "max_actions": max_actions,
        "options": options,
    }
    if opponent is None:
        return [{**shared, "seed": seed} for seed in seeds]
    duel = {**shared, "opponent": opponent}
    return [{**duel, "seed": seed, "seat": seat} for seed in seeds for seat in (0, 1)]


async def play(task: Task, episode: Episode) -> float:
    """Play one game; the reward is the seat's own, as the game gives it.

    Raises:
        SettingsError: there is no such game, or it does not fit the number of players.
    """
    game = _Game(
        field(task, "env_id", str),
        seed=field(task, "seed", int),
        seat=field(task, "seat", int, 0),
        opponent=field(task, "opponent", str, ""),
        options=field(task, "options", dict, {}),
        episode=episode,
    )
    return await play_conversation(game, episode)


class _Game:
    """One seat of one game; the other seat is played by another model between two actions."""

    def __init__(
        self,
        env_id: str,
        *,
        seed: int,
        seat: int,
        opponent: str,
        options: dict[str, Any],
        episode: Episode,
    ) -> None:
        try:
            import textarena
        except ModuleNotFoundError as error:
            raise SettingsError(
                "outloop.envs.adapters.textarena_games needs the package textarena; install it, "
                "for example by: pip install 'outloop[games]'"
            ) from error
        try:
            self._env = textarena.make(env_id, **options)
        except (ValueError, TypeError, ImportError) as error:
            raise SettingsError(f"env_id={env_id!r}, options={options}: {error}") from error
        self._env_id, self._seed = env_id, seed
        self._seat, self._opponent, self._episode = seat, opponent, episode
        self._shown = ""

    async def reset(self) -> Observation:
        num_players = 2 if self._opponent else 1
        try:
            # Not in a thread: a game seeds the random numbers that all games share.
            self._env.reset(num_players=num_players, seed=self._seed)
        except AssertionError as error:
            raise SettingsError(
                f"env_id={self._env_id!r} cannot be played by num_players={num_players}: {error}; "
                "give an opponent to a game of two, and none to a game of one"
            ) from error
        except Exception as error:  # a game may raise anything
            raise environment_failure(f"reset of env_id={self._env_id!r}", error) from error
        return await self._until_own_turn(is_done=False)

    async def step(self, action: str) -> Observation:
        return await self._until_own_turn(is_done=self._act(action))

    async def close(self) -> None:
        """Nothing: a game of TextArena holds no resources, and its own close gives the rewards."""

    async def _until_own_turn(self, *, is_done: bool) -> Observation:
        """Let the other seat act until it is this one's turn, or the game is over."""
        while not is_done:
            player, text = self._env.get_observation()
            if player == self._seat or not self._opponent:
                # A game repeats what it has shown before; the conversation holds that already.
                new, self._shown = text.removeprefix(self._shown), text
                return Observation(text=new)
            answer = await self._episode.client.chat.completions.create(
                model=self._opponent, messages=[{"role": "user", "content": text}]
            )
            is_done = self._act(answer.choices[0].message.content or "")
        try:
            rewards, _ = self._env.close()
            reward = rewards[self._seat]
        except Exception as error:  # a game may raise anything
            raise environment_failure(f"close of env_id={self._env_id!r}", error) from error
        checked = reward_of(reward, f"close of env_id={self._env_id!r}")
        return Observation(text="", reward=checked, is_done=True)

    def _act(self, action: str) -> bool:
        try:
            is_done, _ = self._env.step(action)
        except Exception as error:  # a game may raise anything
            raise environment_failure(f"step of env_id={self._env_id!r}", error) from error
        return bool(is_done)
