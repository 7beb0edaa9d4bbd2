"""Groups that are not complete, and groups that are far ahead of others."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import DeadlineExceeded, RecordError, SettingsError
from outloop.buffer.records import Task
from outloop.buffer.settings import build_settings

OWN = {"env__episode_deadline_s": 600, "buffer__group_size": 3}
LIMITS = OWN | {"buffer__group_deadline_s": 60, "buffer__cuts_slow_episodes": True}


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
    (letter,) = loop.reader.dead_letters.list_all()
    assert (letter.group_id, letter.num_scored) == (group_id, 2)
    assert "at least 3 are needed" in letter.error
    assert (await loop.claim(99)).claims
    assert loop.reader.stats()["buffer/groups"] > before


async def test_an_incomplete_group_waits_for_its_attempts(
    start: Callable[..., Any], clock: Any
) -> None:
    """The default: a group has no deadline, that of its last attempt ends it."""
    loop = await start(env__max_replacements=0, **OWN)
    await _two_of_three(loop)
    await _after_the_deadline(loop, clock)
    with pytest.raises(DeadlineExceeded, match="1 open|2 open"):
        loop.take(1)
    clock.advance(600)
    (lease,) = loop.take(1)
    assert len(lease.group.trajectories) == 2


@pytest.mark.medium
@pytest.mark.parametrize(("max_staleness", "depth"), [(1, 1), (3, 1), (2, "auto")])
async def test_slow_groups_are_not_starved(
    start: Callable[..., Any], max_staleness: int, depth: Any
) -> None:
    """Every fourth group ends only when the trainer would rather wait for it than go on. All are
    trained, each within max_staleness, and nothing is played twice."""
    loop = await start(
        buffer__max_staleness=max_staleness,
        buffer__pipeline_depth=depth,
        trainer__groups_per_step=4,
        env__max_replaced_share=0,
    )
    trained: list[int] = []
    slow: list[tuple[int, Any]] = []
    num_held = 0
    for version in range(12):
        while claims := (await loop.claim(2)).claims:
            if int(claims[0].group_id[1:].partition("-")[0]) % 4 == 0:
                slow.append((version, claims))
                continue
            for claim in claims:
                await loop.play(claim, version=version)
        while True:
            with contextlib.suppress(DeadlineExceeded):
                leases = loop.take(4, version=version)
                break
            num_held += 1
            began, claims = slow.pop(0)
            for claim in claims:
                await loop.play(claim, version=began)
        trained += [lease.group.slot for lease in leases]
        spans = [s for x in leases for t in x.group.trajectories for s in t.turns[0].version_spans]
        assert min(span.policy_version for span in spans) >= version - max_staleness
        loop.reader.acknowledge(loop.train(leases, version + 1))
    assert len(trained) == len(set(trained)) == 48
    assert set(range(40)) <= set(trained)
    assert num_held > 5
    assert loop.reader.stats()["buffer/replaced_attempts"] == 0


async def test_a_take_waits_only_for_groups_that_need_their_turn(
    start: Callable[..., Any],
) -> None:
    """EDF: of seven groups that one version began, with two batches of three left to their age, one
    has to be taken now, whichever, and in the next step all that are left."""
    loop = await start(
        buffer__max_staleness=2, buffer__pipeline_depth=2, trainer__groups_per_step=3
    )
    claims = (await loop.claim(99)).claims
    groups = [claims[i : i + 2] for i in range(0, 18, 2)]
    for group in groups[4:7]:
        for claim in group:
            await loop.play(claim)
    first = loop.take(3)
    assert [lease.group.slot for lease in first] == [4, 5, 6]
    loop.train(first, 1)
    assert len((await loop.claim(99)).claims) == 6
    for group in (groups[7], groups[8], groups[0]):
        for claim in group:
            await loop.play(claim)
    second = loop.take(3, version=1)
    assert [lease.group.slot for lease in second] == [0, 7, 8]
    loop.train(second, 2)
    await loop.play_all(version=2)
    with pytest.raises(DeadlineExceeded, match="ready groups 3/3.*slow groups"):
        loop.take(3, version=2)
    for group in groups[1:4]:
        for claim in group:
            await loop.play(claim)
    assert [lease.group.slot for lease in loop.take(3, version=2)] == [1, 2, 3]


async def test_room_between_depth_and_staleness_lets_fast_groups_pass(
    start: Callable[..., Any],
) -> None:
    """One batch may pass a slow group for each step that it may still age."""
    loop = await start(
        buffer__max_staleness=3,
        buffer__pipeline_depth=1,
        trainer__groups_per_step=2,
        env__max_replaced_share=0,
    )
    slow = (await loop.claim(2)).claims
    for version in range(3):
        await loop.play_all(version=version)
        leases = loop.take(2, version=version)
        assert slow[0].group_id not in [lease.group.group_id for lease in leases]
        loop.train(leases, version + 1)
    await loop.play_all(version=3)
    with pytest.raises(DeadlineExceeded, match="slow groups would become too old"):
        loop.take(2, version=3)
    for claim in slow:
        await loop.play(claim, version=0)
    assert loop.take(2, version=3)[0].group.group_id == slow[0].group_id
    assert loop.reader.stats()["buffer/replaced/stale"] == 0


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"group_deadline_s": 30}, "episode_deadline_s=60 is longer than buffer.group_deadline_s"),
        ({"cuts_slow_episodes": True}, "cuts_slow_episodes=true without buffer.group_deadline_s"),
        ({"incomplete": "wait"}, "incomplete='wait'"),
    ],
)
def test_limits_that_lose_slow_episodes_are_refused(section: dict[str, Any], sentence: str) -> None:
    """Unless they are set on purpose."""
    tree = {"model": {"path": "."}, "env": {"episode_deadline_s": 60}, "buffer": section}
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        build_settings(tree, source="test")


def test_a_short_deadline_on_purpose_is_allowed() -> None:
    """And one that cuts nothing needs no purpose."""
    for section in (
        {"group_deadline_s": 30, "cuts_slow_episodes": True},
        {"group_deadline_s": 60},
        {},
    ):
        build_settings({"model": {"path": "."}, "buffer": section}, source="test")


async def test_a_task_that_takes_longer_than_its_group_is_refused(join: Callable[..., Any]) -> None:
    """A task's own deadline_s is its episodes'."""
    writer, _ = await join(buffer__group_deadline_s=60)
    try:
        with pytest.raises(RecordError, match=r"task_id='slow': deadline_s=90 is longer than"):
            await writer.register_tasks([Task(task_id="slow", payload={"deadline_s": 90})], [])
    finally:
        await writer.close()
