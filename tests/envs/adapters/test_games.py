"""Gymnasium and TextArena games, played by the real packages against a scripted policy."""

from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.envs.adapters import gymnasium_games, textarena_games

PlayWith = Callable[..., Any]

BLACKJACK = """
from outloop.envs.adapters import gymnasium_games
from outloop.envs.adapters.gymnasium_games import play

def games():
    return gymnasium_games.tasks(
        "Blackjack-v1", seeds=range(5), actions=["stick", "hit"], instructions="Play blackjack."
    )
"""
GUESSING = """
from outloop.envs.adapters import textarena_games
from outloop.envs.adapters.textarena_games import play

def games():
    return textarena_games.tasks("GuessTheNumber-v0", seeds=[3])
"""
DUEL = """
from outloop.envs.adapters import textarena_games
from outloop.envs.adapters.textarena_games import play

def games():
    return textarena_games.tasks("TicTacToe-v0", seeds=[3], opponent="policy@0")
"""


def says(*words: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """A policy that says one word after another, by the number of its answers so far."""

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        number = sum(message["role"] == "assistant" for message in messages)
        return {"role": "assistant", "content": words[min(number, len(words) - 1)]}

    return answer


@pytest.mark.medium
async def test_blackjack_is_played_by_the_names_of_its_actions(
    router: Any, play_with: PlayWith
) -> None:
    """The last action that is named counts; the game's own reward is the episode's."""
    router.num_episodes = 5
    router.answer = says("I could hit, but I stick.")
    await play_with(router, BLACKJACK, tasks="user:games")
    assert router.closed("outcome") == ["completed"] * 5
    rewards = [reward["value"] for reward in router.closed("reward")]
    assert set(rewards) <= {-1.0, 0.0, 1.0, 1.5}
    # The seeds deal different hands: the game was played, not made up.
    assert len(set(rewards)) > 1
    assert [claim["payload"]["seed"] for claim in router.tasks] == list(range(5))


async def test_a_policy_that_names_no_action_fails_and_cannot_end_the_game(
    router: Any, play_with: PlayWith
) -> None:
    """It is shown what is allowed twice; then the episode scores env.failure_reward."""
    router.num_episodes = 1
    router.answer = says("I fold.")
    await play_with(router, BLACKJACK, tasks="user:games", failure_reward=-1.0)
    (close,) = router.closes.values()
    assert (close["outcome"], close["failure_kind"]) == ("failed", "agent")
    assert close["reward"]["value"] == -1.0
    assert "Allowed: stick, hit" in close["error"]


async def test_a_policy_may_correct_itself(router: Any, play_with: PlayWith) -> None:
    """An action after two texts that are none is played."""
    router.num_episodes = 1
    router.answer = says("Hm.", "Well.", "Stick!")
    await play_with(router, BLACKJACK, tasks="user:games")
    assert router.closed("outcome") == ["completed"]


@pytest.mark.medium
async def test_a_game_of_one_rewards_what_it_says(router: Any, play_with: PlayWith) -> None:
    """Bisection finds the number; the conversation holds each hint once."""
    seen: list[list[str]] = []

    def bisect(messages: list[dict[str, Any]]) -> dict[str, Any]:
        low, high = 1, 20
        guess = 10
        for reply, shown in zip(messages[1::2], messages[2::2], strict=False):
            guess = int(reply["content"].strip("[]"))
            hint = shown["content"].rpartition("number is ")[2]
            low, high = (guess + 1, high) if hint.startswith("higher") else (low, guess - 1)
            guess = (low + high) // 2
        seen.append([message["content"] for message in messages if message["role"] == "user"])
        return {"role": "assistant", "content": f"[{guess}]"}

    router.num_episodes = 1
    router.answer = bisect
    await play_with(router, GUESSING, tasks="user:games")
    assert [reward["value"] for reward in router.closed("reward")] == [1.0]
    assert max(seen, key=len)[1].count("The target number is") == 1


@pytest.mark.medium
async def test_both_seats_of_a_duel_are_played(router: Any, play_with: PlayWith) -> None:
    """The seat that completes a row first gets 1, the other -1; the opponent is another model."""

    def first_free(messages: list[dict[str, Any]]) -> dict[str, Any]:
        text = "".join(message["content"] for message in messages if message["role"] == "user")
        moves = text.rpartition("Available Moves: ")[2].splitlines()[0]
        return {"role": "assistant", "content": moves.split("'")[1]}

    router.num_episodes = 2
    router.answer = first_free
    await play_with(router, DUEL, tasks="user:games")
    assert sorted(reward["value"] for reward in router.closed("reward")) == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (BLACKJACK.replace("Blackjack-v1", "Blackjak-v1"), "env_id='Blackjak-v1'"),
        (BLACKJACK.replace('"stick", "hit"', '"hit"'), "has 2 actions; give one name for each"),
        (BLACKJACK.replace("Blackjack-v1", "Pendulum-v1"), "Discrete and Text are allowed"),
        (
            GUESSING.replace("GuessTheNumber-v0", "TicTacToe-v0"),
            "give an opponent to a game of two",
        ),
        (GUESSING.replace("GuessTheNumber", "Tic"), "env_id='Tic-v0'"),
    ],
)
async def test_tasks_that_cannot_be_played_stop_the_run(
    router: Any, play_with: PlayWith, source: str, sentence: str
) -> None:
    """With a sentence that names the field, and not as failures of the policy."""
    with pytest.raises(SettingsError, match=sentence.replace("(", r"\(")):
        await play_with(router, source, tasks="user:games")


def test_the_policy_is_no_opponent_of_its_own() -> None:
    """Its tokens in the other seat would be trained with this seat's reward."""
    with pytest.raises(SettingsError, match="opponent='policy@frozen'"):
        textarena_games.tasks("TicTacToe-v0", seeds=[1], opponent="policy")
    assert len(gymnasium_games.tasks("Blackjack-v1", seeds=range(3))) == 3
