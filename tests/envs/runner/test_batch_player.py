"""Whole-rollout functions: `async def rollout(tasks, context)`."""

from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import SettingsError

PlayWith = Callable[..., Any]
BATCH = {"rollout_function_path": "user:rollout"}


@pytest.mark.medium
@pytest.mark.parametrize("num_workers", [0, 1])
async def test_a_batch_is_opened_played_and_closed_by_the_function(
    num_workers: int, router: Any, play_with: PlayWith
) -> None:
    """It gets whole groups, calls the model as each episode, and rewards each attempt."""
    router.num_episodes = 20
    source = """
import asyncio


async def rollout(tasks, context):
    groups = context.groups()
    assert [len(group) for group in groups] == [4] * len(groups)
    assert context.purpose == "train"
    for group in groups:
        episodes = [context.open(task) for task in group]
        answers = await asyncio.gather(*(
            episode.client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": task.payload["question"]}]
            )
            for task, episode in zip(group, episodes)
        ))
        for task, answer in zip(group, answers):
            context.close(task, task.attempt + 10.0 * context.num_calls)
"""
    await play_with(
        router, source, max_concurrent_episodes=8, num_workers=num_workers, timeout_s=40, **BATCH
    )
    values = [reward["value"] for reward in router.closed("reward")]
    assert values == [0, 1, 2, 3] * 2 + [10, 11, 12, 13] * 2 + [20, 21, 22, 23]
    assert router.num_chat_calls == 20


async def test_play_all_plays_each_attempt_like_a_play_function(
    router: Any, play_with: PlayWith
) -> None:
    """With the same deadlines and failures; what was closed before is left out."""
    source = """
import asyncio


async def play(task, episode):
    if task.payload["question"].endswith("2*2"):
        raise KeyError("lost")
    episode.score(form=0.25)
    return 1.0


async def rollout(tasks, context):
    context.close(tasks[0], -1.0)
    await context.play_all(play, max_concurrent=2)
"""
    await play_with(router, source, **BATCH)
    closes = [router.closes[f"ep-{number}"] for number in range(4)]
    assert closes[0]["reward"] == {"value": -1.0, "components": {}}
    assert closes[1]["reward"] == {"value": 1.0, "components": {"form": 0.25}}
    assert (closes[2]["failure_kind"], closes[2]["reward"]["value"]) == ("agent", 0.0)
    assert closes[3]["outcome"] == "completed"


async def test_what_a_batch_leaves_open_is_closed_for_it(router: Any, play_with: PlayWith) -> None:
    """After an exception as failed, at the last deadline as truncated."""
    source = """
async def rollout(tasks, context):
    context.close(tasks[0], 1.0)
    context.fail(tasks[1], ValueError("wrong move"))
    raise RuntimeError("half way")
"""
    await play_with(router, source, **BATCH)
    assert router.closed("outcome") == ["completed", "failed", "failed", "failed"]
    assert "wrong move" in router.closed("error")[1]
    assert "half way" in router.closed("error")[3]


@pytest.mark.medium
async def test_a_batch_that_hangs_is_truncated(router: Any, play_with: PlayWith) -> None:
    """It is cancelled when the last deadline of its episodes has passed."""
    router.deadline_s = 0.5
    source = """
import asyncio


async def rollout(tasks, context):
    await asyncio.sleep(600)
"""
    await play_with(router, source, **BATCH)
    assert router.closed("outcome") == ["truncated"] * 4


@pytest.mark.medium
async def test_a_batch_without_rewards_stops_the_run(router: Any, play_with: PlayWith) -> None:
    """Episodes that nobody closed are no zeros; the sentence says what to call."""
    router.num_episodes = 20
    with pytest.raises(SettingsError, match=r"context.close\(task, reward\) for every task"):
        await play_with(router, "async def rollout(tasks, context):\n    pass\n", **BATCH)
    assert set(map(str, router.closed("reward"))) == {"None"}
