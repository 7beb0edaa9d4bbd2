"""Two roles that share the policy in one episode: who earned what, and two steps."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("described", "said", "rewards"),
    [
        ("a week", "7", [-0.0, 1.0]),
        ("it is 7", "7", [-1.0, 1.0]),
        ("a week", "8", [-0.0, 0.0]),
        ("", "", [-0.0, 0.0]),
    ],
)
async def test_each_role_is_scored_at_its_turn(
    load_example: Callable[..., ModuleType],
    open_episode: Callable[..., Any],
    router: Any,
    described: str,
    said: str,
    rewards: list[float],
) -> None:
    """A leak is the describer's; the guesser sees the description alone."""
    rollout, agent = load_example("two_roles", "rollout"), load_example("two_roles", "agent")

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        role, shown = (message["content"] for message in messages)
        assert shown == {agent.DESCRIBE: "7", agent.GUESS: described or "?"}[role]
        return {"role": "assistant", "content": described if role == agent.DESCRIBE else said}

    router.answer = answer
    task, episode = open_episode({"number": "7"}, takes_turns=True)
    returned = await rollout.play(task, episode)
    reward = episode.scores.reward(returned, "play")
    assert [*reward.turns.values()] == rewards
    assert reward.value == 0


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example: Callable[..., list[dict[str, Any]]]) -> None:
    """Two steps; both roles' turns are trained, as two branches of each episode."""
    rows = train_example("two_roles", buffer__drop_zero_signal=False)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/episodes"] for row in steps] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in steps)
    assert all(row["train/branches_per_episode"] == 2 for row in steps)
