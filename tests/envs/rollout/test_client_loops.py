"""The clients of an episode work wherever a rollout function uses them."""

from collections.abc import Callable
from typing import Any

import pytest

PlayWith = Callable[..., Any]

SOURCE = """
import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio

MESSAGES = [{"role": "user", "content": "1+1"}]


async def solve(client):
    for _ in range(3):
        await client.chat.completions.create(model="policy", messages=MESSAGES)
    return 1.0


async def solve_at_once(client):
    async with client.with_options(max_retries=1) as own:
        await asyncio.gather(*[solve(own) for _ in range(4)])
    return 1.0


def ask(client):
    client.chat.completions.create(model="policy", messages=MESSAGES)


def in_a_thread(client):
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(asyncio.run(solve(client))))
    thread.start()
    thread.join()
    return rewards[0]


def in_one_loop(client):
    # A loop that is used again, and never closed.
    with LOCK:
        LOOPS[:] = LOOPS or [asyncio.new_event_loop()]
        return LOOPS[0].run_until_complete(solve(client))


def close(client):
    with client as own:
        ask(own)
    client.close()
    return 1.0


LOCK = threading.Lock()
LOOPS = []


"""
PLAYS = {
    "asyncio.run": "return asyncio.run(solve(episode.client))",
    "asyncio.run, many": "return asyncio.run(solve_at_once(episode.client.copy()))",
    "anyio.run": "return anyio.run(solve, episode.client)",
    "thread": "return in_a_thread(episode.client)",
    "kept loop": "return in_one_loop(episode.client)",
    "blocking threads": "with ThreadPoolExecutor(8) as threads:\n"
    "        list(threads.map(ask, [episode.blocking_client] * 8))\n    return 1.0",
    "closed": "return close(episode.blocking_client)",
    "async": "return await solve(episode.client)",
    "async, closed": "return await solve_at_once(episode.client)",
    "async, thread": "return await asyncio.to_thread(in_a_thread, episode.client)",
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("how", PLAYS)
async def test_a_client_works_in_every_event_loop(
    how: str, num_workers: int, router: Any, play_with: PlayWith
) -> None:
    """Episodes one after the other and at once all complete, over loops that have ended."""
    router.num_episodes = 12
    if how == "kept loop" and not num_workers:
        return  # it would outlive the test
    style = "async def" if how.startswith("async") and "run" not in how else "def"
    source = SOURCE + f"{style} play(task, episode):\n    {PLAYS[how]}\n"
    await play_with(
        router, source, timeout_s=60, num_workers=num_workers, max_concurrent_episodes=3
    )
    assert router.closed("error") == [""] * 12
    assert router.closed("outcome") == ["completed"] * 12
