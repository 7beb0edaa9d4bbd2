"""Too many attempts without a result stop the run, with a sentence."""

from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import DeadlineExceeded, TooManyReplaced


async def fail(loop: Any, count: int) -> None:
    """Claim `count` attempts and fail their environments."""
    for claim in (await loop.claim(count)).claims:
        episode_id = await loop.open(claim)
        await loop.close(episode_id, None, failure_kind="environment", outcome="failed")


async def succeed(loop: Any, count: int) -> None:
    """Claim and play `count` attempts without turns."""
    claims = (await loop.claim(count)).claims
    assert len(claims) == count
    for claim in claims:
        await loop.close(await loop.open(claim))


SETTINGS = {
    "buffer__group_size": 52,
    "trainer__groups_per_step": 4,
    "env__max_replacements": 60,
    "env__max_replaced_share": 0.02,
}


async def test_the_run_stops_above_the_replaced_share(start: Callable[..., Any]) -> None:
    """4 of 200 is allowed, 5 of 201 is not, and a waiting take says so; nothing is leased."""
    loop = await start(**SETTINGS)
    await succeed(loop, 196)
    await fail(loop, 4)
    assert len(loop.take(1)) == 1
    await fail(loop, 1)
    with pytest.raises(
        TooManyReplaced,
        match=r"5 of 201 attempts .*env.max_replaced_share=0.02 .* of task_id=t\d \([45]\): look",
    ):
        loop.take(1)
    stats = loop.reader.stats()
    assert stats["buffer/leased_groups"] == 1
    assert (stats["buffer/train_attempts"], stats["buffer/resultless_attempts"]) == (201, 5)


@pytest.mark.medium
async def test_few_attempts_stop_nothing(start: Callable[..., Any]) -> None:
    """Before 200 attempts the share says little."""
    loop = await start(**SETTINGS)
    await fail(loop, 50)
    await succeed(loop, 149)
    with pytest.raises(DeadlineExceeded):
        loop.take(4)
    await succeed(loop, 1)
    with pytest.raises(TooManyReplaced, match="50 of 200 "):
        loop.take(4)


@pytest.mark.medium
async def test_a_resumed_run_is_judged_anew(start: Callable[..., Any], clock: Any) -> None:
    """What failed before the restart, or was interrupted by it, does not stop the next trainer."""
    loop = await start(**SETTINGS)
    await succeed(loop, 52)
    await fail(loop, 50)
    mark = loop.train(loop.take(1), 1)
    loop.reader.acknowledge(mark)
    await succeed(loop, 100)
    interrupted = (await loop.claim(10)).claims
    assert len(interrupted) == 10
    loop.fence = loop.reader.acquire_fence()
    loop.reader.recover(mark, fence=loop.fence)
    loop.publish(2, 1)
    clock.advance(100)
    await succeed(loop, 108)
    loop.train(loop.take(4, version=2), 3)
    await succeed(loop, 102)
    assert len(loop.take(1, version=3)) == 1
    assert loop.reader.stats()["buffer/resultless_attempts"] == 60
    await fail(loop, 5)
    with pytest.raises(TooManyReplaced, match="5 of 215 "):
        loop.take(1, version=3)


@pytest.mark.medium
async def test_attempts_given_up_count_too(start: Callable[..., Any]) -> None:
    """With no replacement allowed nothing is replaced, yet the same episodes are missing."""
    loop = await start(**SETTINGS | {"env__max_replacements": 0})
    await fail(loop, 5)
    await succeed(loop, 203)
    with pytest.raises(TooManyReplaced, match="5 of 208 "):
        loop.take(1)
