"""What docs/your-own-agent.md and docs/coming-from-slime.md show is what runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```\w+ title=(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLE = ROOT / "examples/your_agent"


def blocks(page: str) -> dict[str, str]:
    """The files that a page shows."""
    return dict(BLOCK.findall((ROOT / "docs" / page).read_text()))


@pytest.mark.parametrize("name", ["agent.py", "verifier.py", "run.toml", "rollout.py"])
def test_the_page_shows_the_examples_files(name: str) -> None:
    """Word for word: what a test runs is what a reader copies."""
    assert blocks("your-own-agent.md")[name] == (EXAMPLE / name).read_text()


def test_the_page_shows_the_examples_tasks() -> None:
    """The first lines of ten."""
    shown = blocks("your-own-agent.md")["tasks.jsonl"].splitlines()
    there = (EXAMPLE / "tasks.jsonl").read_text().splitlines()
    assert len(there) == 10
    assert shown[:2] == there[:2]


@pytest.mark.medium
async def test_slimes_function_translated_plays_a_run(
    router: Any, play_with: Callable[..., Any]
) -> None:
    """The page's worked example, with a reward that compares the attempts of a group."""
    router.num_episodes = 8
    replies = iter(["12", "123", "1x", "abc"] * 2)
    router.answer = lambda messages: {"role": "assistant", "content": next(replies)}
    await play_with(
        router,
        blocks("coming-from-slime.md")["after.py"],
        rollout_function_path="user:rollout",
        max_concurrent_episodes=8,
    )
    components = [
        (reward["components"]["digits"], reward["components"]["brief"])
        for reward in router.closed("reward")
    ]
    # The attempts of a group speak at the same time, so only the group's scores are known.
    expected = [(0.0, 0.0), (0.5, 0.1), (1.0, 0.0), (1.0, 0.1)]
    assert sorted(components[:4]) == expected
    assert sorted(components[4:]) == expected


async def test_a_batch_played_by_outloop_as_the_page_shows(
    router: Any, play_with: Callable[..., Any]
) -> None:
    """The page's second example, after the first one's `ask`."""
    shown = blocks("coming-from-slime.md")
    router.answer = lambda messages: {"role": "assistant", "content": "four"}
    await play_with(
        router,
        shown["after.py"] + "\n\n" + shown["play_all.py"],
        rollout_function_path="user:rollout",
    )
    assert [reward["value"] for reward in router.closed("reward")] == [4.0] * 4
