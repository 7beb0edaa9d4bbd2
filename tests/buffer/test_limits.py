"""How many groups are started: depth, age, over-provision, the last step, and the controller."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.settings import build_settings
from outloop.buffer.settings.buffer import beyond_age

ONES = {
    "buffer__group_size": 2,
    "buffer__lease_s": 1e6,
    "env__max_replaced_share": 1.0,
    "env__episode_deadline_s": 1e6,
}


def groups_of(claims: Any) -> list[list[Any]]:
    """The claims, two by two."""
    return [list(claims[i : i + 2]) for i in range(0, len(claims), 2)]


class Trainer:
    """Takes and trains, in seconds of the test's clock; groups are ready when it says so."""

    def __init__(self, loop: Any, clock: Any, *, update_s: float = 1.0) -> None:
        self.loop = loop
        self.clock = clock
        self.update_s = update_s
        self.version = 0
        self.open: list[tuple[int, list[Any]]] = []
        self.ages: list[int] = []

    async def claim(self) -> None:
        """Whatever is admitted."""
        found = groups_of((await self.loop.claim(1000)).claims)
        self.open += [(self.version, group) for group in found]

    async def finish(self, index: int = 0) -> None:
        """One open group is complete."""
        began, group = self.open.pop(index)
        for claim in group:
            await self.loop.play(claim, version=began)

    async def step(self, *, seconds_a_group: float, slow_first: bool = False) -> None:
        """Groups end one by one; the trainer takes a batch as soon as it may, then updates."""
        size = self.loop.reader.limits.read().num_for_step
        while True:
            try:
                leases = self.loop.take(size, version=self.version)
                break
            except DeadlineExceeded:
                pass
            self.clock.advance(seconds_a_group)
            await self.finish(-1 if slow_first else 0)
            await self.claim()
        self.ages += [
            self.version - turn.version_spans[0].policy_version
            for lease in leases
            for trajectory in lease.group.trajectories
            for turn in trajectory.turns
        ]
        self.clock.advance(self.update_s)
        done = int(self.update_s / seconds_a_group)
        for _ in range(min(done, len(self.open))):
            await self.finish(-1 if slow_first else 0)
            await self.claim()
        self.version += 1
        self.loop.train(leases, self.version)
        await self.claim()


@pytest.mark.medium
async def test_the_depth_grows_while_the_trainer_lacks_groups(
    start: Callable[..., Any], clock: Any
) -> None:
    """Up to what max_staleness leaves room for, by an eighth of a batch a step."""
    loop = await start(buffer__max_staleness=3, trainer__groups_per_step=8, **ONES)
    trainer = Trainer(loop, clock)
    await trainer.claim()
    assert loop.reader.limits.read().num_beyond == 8
    depths = []
    for _ in range(24):
        await trainer.step(seconds_a_group=1.0)
        depths.append(loop.reader.limits.read().num_beyond)
    assert depths == sorted(depths)
    assert {b - a for a, b in itertools.pairwise(depths)} <= {0, 1}
    assert depths[-1] == 24
    assert loop.reader.limits.read().cause == "limited_by_age"
    stats = loop.reader.stats()
    assert stats["buffer/depth/raised"] == 16
    assert stats["buffer/pipeline_depth"] == 3
    assert stats["buffer/wait/short_s"] > 100 > stats["buffer/wait/slow_groups_s"] == 0


@pytest.mark.medium
async def test_the_depth_falls_while_groups_are_left_over(
    start: Callable[..., Any], clock: Any
) -> None:
    """A trainer slower than its runners: tokens get no older than they have to."""
    loop = await start(buffer__max_staleness=4, trainer__groups_per_step=8, **ONES)
    trainer = Trainer(loop, clock, update_s=100.0)
    await trainer.claim()
    for _ in range(24):
        await trainer.step(seconds_a_group=5.0)
    before = len(trainer.ages)
    for _ in range(8):
        await trainer.step(seconds_a_group=5.0)
    ages = trainer.ages[before:]
    assert max(ages) <= 1
    assert loop.reader.limits.read().num_beyond <= 8
    assert loop.reader.stats()["buffer/depth/raised"] == 0


@pytest.mark.medium
async def test_no_more_is_started_where_slow_groups_are_what_is_waited_for(
    start: Callable[..., Any], clock: Any
) -> None:
    """More groups would only make the trainer wait for more of them."""
    loop = await start(buffer__max_staleness=2, trainer__groups_per_step=8, **ONES)
    trainer = Trainer(loop, clock, update_s=1.0)
    await trainer.claim()
    for _ in range(16):
        await trainer.step(seconds_a_group=0.2, slow_first=True)
    stats = loop.reader.stats()
    assert stats["buffer/wait/slow_groups_s"] > stats["buffer/wait/short_s"]
    assert stats["buffer/depth/raised"] <= 1
    assert max(trainer.ages) <= 2


async def test_the_depth_stays_where_runners_have_no_place(
    start: Callable[..., Any], clock: Any
) -> None:
    """Nothing was refused for admission, so admitting more changes nothing."""
    loop = await start(buffer__max_staleness=2, trainer__groups_per_step=4, **ONES)
    for version in range(6):
        with pytest.raises(DeadlineExceeded):
            loop.take(4, version=version)
        clock.advance(10)
        for claim in (await loop.claim(8)).claims:
            await loop.play(claim, version=version)
        loop.train(loop.take(4, version=version), version + 1)
    limits = loop.reader.limits.read()
    assert (limits.num_beyond, limits.cause) == (4, "limited_by_places")


async def test_the_depth_stays_where_servers_are_busy(
    start: Callable[..., Any], clock: Any
) -> None:
    """More episodes would wait for them longer, and their tokens would be older."""
    loop = await start(buffer__max_staleness=2, trainer__groups_per_step=4, **ONES)
    claims: list[tuple[int, Any]] = []
    for is_busy, cause in ((True, "limited_by_servers"), (False, "raised")):
        for version in range(4) if is_busy else range(4, 8):
            for key in (f"{version}", f"{version} again"):
                found = await loop.writer.claim(key=key, count=99, servers_are_busy=is_busy)
                claims += [(version, claim) for claim in found.claims]
            with pytest.raises(DeadlineExceeded):
                loop.take(4, version=version)
            clock.advance(10)
            for began, claim in claims[:8]:
                await loop.play(claim, version=began)
            del claims[:8]
            loop.train(loop.take(4, version=version), version + 1)
        assert loop.reader.limits.read().cause == cause
        assert (loop.reader.limits.read().num_beyond == 4) == is_busy


async def test_a_fixed_depth_is_left_alone(start: Callable[..., Any], clock: Any) -> None:
    """Half a batch beyond the step's own, whatever the trainer waits for."""
    loop = await start(
        buffer__max_staleness=4,
        buffer__pipeline_depth=0.5,
        trainer__groups_per_step=4,
        **ONES,
    )
    trainer = Trainer(loop, clock)
    await trainer.claim()
    for _ in range(8):
        assert len(trainer.open) <= 6
        await trainer.step(seconds_a_group=1.0)
    limits = loop.reader.limits.read()
    assert (limits.num_for_step, limits.num_beyond, limits.cause) == (4, 2, "")


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_over_provision_carries_what_is_not_complete(
    start: Callable[..., Any], max_staleness: int
) -> None:
    """Six groups are started for a step of four; the other two belong to the next step, where they
    are one publish old at max_staleness 0, and then the trainer waits for them."""
    loop = await start(
        buffer__max_staleness=max_staleness,
        buffer__pipeline_depth=0,
        buffer__over_provision=1.5,
        trainer__groups_per_step=4,
    )
    groups = groups_of((await loop.claim(99)).claims)
    assert len(groups) == 6
    for group in groups[2:]:
        for claim in group:
            await loop.play(claim)
    first = loop.take(4)
    assert [lease.group.slot for lease in first] == [2, 3, 4, 5]
    assert (await loop.claim()).reason == "admission"
    loop.train(first, 1)
    later = groups_of((await loop.claim(99)).claims)
    assert len(later) == 4
    for group in later:
        for claim in group:
            await loop.play(claim, version=1)
    if max_staleness == 0:
        with pytest.raises(DeadlineExceeded, match="slow groups"):
            loop.take(4, version=1)
        for group in groups[:2]:
            for claim in group:
                await loop.play(claim, version=0)
    second = loop.take(4, version=1)
    expected = [0, 1, 6, 7] if max_staleness == 0 else [6, 7, 8, 9]
    assert [lease.group.slot for lease in second] == expected
    assert {lease.max_age for lease in second} == {max(max_staleness, 1)}
    assert loop.reader.stats()["buffer/replaced_attempts"] == 0


async def test_nothing_is_started_that_no_step_trains(start: Callable[..., Any]) -> None:
    """With two steps left two batches are started; with none, none."""
    loop = await start(buffer__max_staleness=4, buffer__pipeline_depth=4)
    loop.reader.set_steps_left(2)
    assert len({claim.group_id for claim in await loop.play_all()}) == 4
    assert (await loop.claim()).reason == "admission"
    for left in (1, 0):
        leases = loop.take(version=1 - left)
        loop.reader.set_steps_left(left)
        loop.train(leases, 2 - left)
        assert (await loop.claim()).reason == "admission"
    stats = loop.reader.stats()
    assert (stats["buffer/trained_groups"], stats["buffer/groups"]) == (4, 4)
    loop.reader.set_steps_left(1)
    assert len((await loop.claim()).claims) == 4


async def test_both_limits_change_while_the_run_goes_on(start: Callable[..., Any]) -> None:
    """A deeper pipeline starts more at once; a lower age has what is too old played again, and is
    nobody's failure."""
    loop = await start(buffer__max_staleness=2, buffer__pipeline_depth=0, env__max_replaced_share=0)
    await loop.play_all()
    limits = loop.reader.limits.change(pipeline_depth=2)
    assert (limits.num_for_step, limits.num_beyond, limits.num_live) == (2, 4, 2)
    await loop.play_all()
    loop.train(loop.take(), 1)
    await loop.play_all(version=1)
    assert loop.reader.stats()["buffer/ready_groups"] == 6
    limits = loop.reader.limits.change(max_staleness=0)
    assert (limits.max_staleness, limits.num_beyond) == (0, 0)
    stats = loop.reader.stats()
    assert (stats["buffer/ready_groups"], stats["buffer/replaced/stale"]) == (2, 8)
    leases = loop.take(version=1)
    assert {lease.max_age for lease in leases} == {0}
    assert [lease.group.slot for lease in leases] == [6, 7]
    played = await loop.play_all(version=1)
    assert {claim.group_id for claim in played} == {f"g{i}-{i + 1}" for i in range(2, 6)}
    assert loop.reader.limits.change(pipeline_depth="auto").pipeline_depth == "auto"
    loop.reader.ledger().check()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"pipeline_depth": -1}, "buffer.pipeline_depth=-1: a number of steps from 0 on"),
        ({"max_staleness": -1}, "max_staleness=-1; 0 or more is allowed"),
        ({"max_staleness": 1}, "over_provision=3 with buffer.max_staleness=1: .*raise .* to 2"),
    ],
)
async def test_limits_that_cannot_be_met_are_refused(
    start: Callable[..., Any], change: dict[str, Any], sentence: str
) -> None:
    """Nothing is changed then."""
    loop = await start(buffer__max_staleness=2, buffer__over_provision=3)
    before = loop.reader.limits.read()
    with pytest.raises(SettingsError, match=sentence):
        loop.reader.limits.change(**change)
    assert loop.reader.limits.read() == before


def test_a_depth_beyond_the_age_is_reported() -> None:
    """Both hold and may change, so it is no error; the sentence says which number and what would
    do."""
    assert beyond_age("auto", 0) == beyond_age(2, 2) == beyond_age(0.5, 1) == ""
    said = beyond_age(2.5, 1)
    assert "pipeline_depth=2.5 exceeds buffer.max_staleness=1: groups are started 1 steps" in said
    assert "raise max_staleness to 3" in said


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"pipeline_depth": "deep"}, "buffer.pipeline_depth='deep': a number of steps from 0 on"),
        ({"pipeline_depth": -0.5}, "buffer.pipeline_depth=-0.5: a number of steps from 0 on"),
        ({"over_provision": 0.5}, "buffer.over_provision=0.5 starts fewer groups than a step"),
        (
            {"over_provision": 2.5, "max_staleness": 1},
            "buffer.over_provision=2.5 with buffer.max_staleness=1: of 2.5 batches started "
            "together one is trained a step, and the last would be older than 1; 1 to 2 is "
            "allowed, or raise max_staleness to 2",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_refused(section: dict[str, Any], sentence: str) -> None:
    """One sentence: which number, and what would do."""
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        build_settings({"model": {"path": "."}, "buffer": section}, source="test")
