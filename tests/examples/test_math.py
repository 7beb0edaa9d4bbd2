"""reasoning-gym with math-verify: tasks, players, verdicts, and two steps of training."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def tasks(load_example):
    """Problems and players."""
    return load_example("math", "tasks")


def test_held_out_problems_are_seen_by_nobody_else(tasks) -> None:
    """Splits share no question, and conversations come from training problems only."""
    splits = {name: {row["question"] for row in tasks.problems(name)} for name in tasks.SHARES}
    assert not splits["train"] & splits["test"]
    assert not splits["train"] & splits["validation"]
    assert sum(map(len, splits.values())) == 200
    asked = {row["messages"][1]["content"] for row in tasks.conversations()}
    assert asked == splits["train"]


def test_answers_are_right(tasks) -> None:
    """What reasoning-gym calls the answer is what the sum comes to."""
    for row in tasks.problems("test")[:100]:
        expression = row["question"].rpartition(": ")[2].removesuffix(" =")
        signs, total, sign = expression.split(), 0, 1
        for word in signs:
            if word in "+-":
                sign = 1 if word == "+" else -1
            else:
                total += sign * int(word)
        assert str(total) == row["answer"]


def test_players_differ_as_the_readme_says(tasks) -> None:
    """The oracle is always right, the scripted player in three cases of ten."""
    assert tasks.reward_of(tasks.oracle_player, 500) == 1.0
    assert 0.25 < tasks.reward_of(tasks.scripted_player, 3000) < 0.35


async def test_an_answer_is_judged_as_mathematics(
    load_example, open_episode: Callable[..., Any], router: Any
) -> None:
    """The agent's words reach math-verify; close is not right, and nothing is not right."""
    rollout = load_example("math", "rollout")
    task, episode = open_episode({"question": "4 - 1 - 7 =", "answer": "-4"})
    rewards = []
    for words in ("\\boxed{-4}", "so it is \\boxed{-8/2}", "\\boxed{-3}", "\\boxed{", ""):
        router.answer = lambda messages, words=words: {"role": "assistant", "content": words}
        rewards.append(await rollout.play(task, episode))
    await rollout.tear_down()
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example) -> None:
    """From nothing, over the generator and the verifier's processes: two steps."""
    rows = [row for row in train_example("math") if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in rows)
