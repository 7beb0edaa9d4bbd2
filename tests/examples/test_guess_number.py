"""Guess the number: its host, its players, its agent, and two steps of training."""

import random
from typing import Any

import pytest


@pytest.fixture
def game(load_example):
    """The host's module."""
    return load_example("guess_number", "verifier")


@pytest.fixture
def tasks(load_example):
    """Games and players."""
    return load_example("guess_number", "tasks")


def test_the_host_says_what_is_left(game) -> None:
    """Higher and lower narrow the range; what is no number or out of range does not widen it."""
    host = game.Game(10, 16, 13)
    assert host.opening == "10 to 16"
    assert host.answer("99") == "lower. 10 to 16"
    assert host.answer(" 12 ") == "higher. 13 to 16"
    assert host.answer("13") is None
    assert host.reward == 1.0
    other = game.Game(10, 16, 13)
    assert other.answer("I guess 13") == "a number. 10 to 16"
    assert other.answer("15") == "lower. 10 to 14"


@pytest.mark.parametrize("guess", ["", "12 13", "013x", "-13", "1" * 9, "13.0", "\u0661\u0663"])
def test_only_a_plain_number_is_a_guess(game, guess: str) -> None:
    """A policy cannot win by saying several numbers at once, nor crash the host."""
    host = game.Game(10, 16, 13)
    answer = host.answer(guess)
    assert answer is not None
    assert host.reward == 0.0


def test_the_last_guess_ends_the_game(game) -> None:
    """After three guesses there is no answer and no reward."""
    host = game.Game(10, 16, 13)
    assert [host.answer("16") is None for _ in range(3)] == [False, False, True]
    assert host.reward == 0.0


def test_held_out_games_are_seen_by_nobody_else(tasks) -> None:
    """Warm start and RL share no game with the evaluation; 140 games in all."""
    trained, held_out = (
        {(game["low"], game["secret"]) for game in some}
        for some in (tasks.train_tasks(), tasks.eval_tasks())
    )
    assert not trained & held_out
    assert sum(len(tasks.games(split)) for split in tasks.SHARES) == 140


def test_players_differ_as_the_readme_says(tasks) -> None:
    """The oracle always wins, the scripted player seldom, one who heeds the range in between."""
    assert tasks.reward_of(tasks.oracle_player, 500) == 1.0
    assert 0.27 < tasks.reward_of(tasks.scripted_player, 2000) < 0.40
    assert 0.63 < tasks.reward_of(tasks.random_player, 2000) < 0.76


async def test_the_agent_plays_a_game_in_one_conversation(
    load_example, open_episode, router: Any, tasks
) -> None:
    """Each guess goes to the host, each answer back to the model, and the game's end is the end."""
    rollout = load_example("guess_number", "rollout")
    seen: list[list[dict[str, Any]]] = []

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(messages)
        low, _, high = messages[-1]["content"].rpartition(". ")[2].partition(" to ")
        return {"role": "assistant", "content": str((int(low) + int(high)) // 2)}

    router.answer = answer
    task, episode = open_episode({"low": 10, "high": 16, "secret": 12})
    assert await rollout.play(task, episode) == 1.0
    assert len(seen) == 3
    assert all(seen[k + 1][: len(seen[k])] == seen[k] for k in range(2))
    assert seen[-1][-1]["content"] == "higher. 12 to 12"


def test_conversations_are_whole_games(tasks) -> None:
    """The warm start sees guesses in and out of range, won games and lost ones."""
    rows = tasks.conversations()
    lengths = {len(row["messages"]) for row in rows}
    assert lengths == {3, 5, 7}
    first = [int(row["messages"][2]["content"]) for row in rows]
    low = [int(row["messages"][1]["content"].partition(" ")[0]) for row in rows]
    inside = sum(a <= guess < a + 7 for guess, a in zip(first, low, strict=True)) / len(rows)
    assert 0.45 < inside < 0.70


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example) -> None:
    """From nothing: two steps of whole games, several turns each."""
    rows = [row for row in train_example("guess_number") if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [12, 12]
    assert all(row["train/turns_per_episode"] > 2 for row in rows)


def test_games_do_not_depend_on_the_processs_random_state(tasks) -> None:
    """The same conversations and splits in every process."""
    assert tasks.conversations()[:50] == tasks.conversations()[:50]
    state = random.getstate()
    tasks.games("train")
    assert random.getstate() == state
