"""Groups that are not complete, and groups that are far ahead of others."""

from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.settings import build_settings

LIMITS = {"buffer__group_deadline_s": 60, "env__episode_deadline_s": 600, "buffer__group_size": 3}


async def _two_of_three(loop: Any) -> str:
    """A group with two scored attempts and one in flight; its id."""
    claims = (await loop.claim(3)).claims
    for claim in claims[:2]:
        await loop.play(claim)
    await loop.open(claims[2])
    return str(claims[0].group_id)


async def _after_the_deadline(loop: Any, clock: Any) -> None:
    clock.advance(61)
    await loop.claim(1)


async def test_an_incomplete_group_trains_with_what_it_has(
    start: Callable[..., Any], clock: Any
) -> None:
    """incomplete = "train", the default: sealed at its deadline with two of three."""
    loop = await start(**LIMITS)
    group_id = await _two_of_three(loop)
    await _after_the_deadline(loop, clock)
    (lease,) = loop.take(1)
    assert lease.group.group_id == group_id
    assert len(lease.group.trajectories) == 2


async def test_an_incomplete_group_is_dropped_with_a_letter(
    start: Callable[..., Any], clock: Any
) -> None:
    """incomplete = "drop": the credit returns at once, and the letter counts what there was."""
    loop = await start(buffer__incomplete="drop", **LIMITS)
    group_id = await _two_of_three(loop)
    before = loop.reader.stats()["buffer/groups"]
    await _after_the_deadline(loop, clock)
    with pytest.raises(DeadlineExceeded):
        loop.take(1)
    (letter,) = loop.reader.dead_letters.list_letters()
    assert (letter.group_id, letter.num_scored) == (group_id, 2)
    assert "at least 3 are needed" in letter.error
    assert (await loop.claim(99)).claims
    assert loop.reader.stats()["buffer/groups"] > before


async def test_an_incomplete_group_waits_for_its_attempts(
    start: Callable[..., Any], clock: Any
) -> None:
    """incomplete = "wait": the group's deadline ends nothing, that of its last attempt does."""
    loop = await start(buffer__incomplete="wait", env__max_replacements=0, **LIMITS)
    await _two_of_three(loop)
    await _after_the_deadline(loop, clock)
    with pytest.raises(DeadlineExceeded, match="1 open|2 open"):
        loop.take(1)
    clock.advance(600)
    (lease,) = loop.take(1)
    assert len(lease.group.trajectories) == 2


async def test_groups_far_ahead_wait_for_the_oldest_open_one(
    start: Callable[..., Any], clock: Any
) -> None:
    """take_window = 2: slots 2 and 3 are ready, slot 0 is open; a straggler holds them until its
    deadline, and not the one slot beside it."""
    loop = await start(
        buffer__take_window=2,
        buffer__max_staleness=1,
        buffer__group_deadline_s=60,
        trainer__groups_per_step=2,
    )
    claims = (await loop.claim(99)).claims
    for claim in claims[2:]:
        await loop.play(claim)
    assert loop.reader.stats()["buffer/ready_groups"] == 3
    with pytest.raises(DeadlineExceeded, match="ready groups 1/2"):
        loop.take(2)
    (lease,) = loop.take(1)
    assert lease.group.slot == 1
    for claim in claims[:2]:
        await loop.play(claim)
    assert [lease.group.slot for lease in loop.take(2)] == [0, 2]


def test_a_window_without_room_for_a_batch_is_refused() -> None:
    """No take could ever be served."""
    tree = {
        "model": {"path": "."},
        "buffer": {"take_window": 3},
        "trainer": {"groups_per_step": 4},
    }
    with pytest.raises(SettingsError, match="take_window=3 is smaller than"):
        build_settings(tree, source="test")
