"""A run whose episodes have a heavy tail, through the buffer's own scripts, in simulated time.

Agents only wait, places are never short, and an update takes 0.3 s: what is left is what admission
and the order of taking cost.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from outloop.buffer.errors import DeadlineExceeded

GROUPS_PER_STEP, GROUP_SIZE, NUM_STEPS, UPDATE_S = 4, 4, 24, 0.3


def wait_s(claim: Any) -> float:
    """40 % of episodes are short, 50 % medium, 10 % up to 200 times the median; the same for the
    same place at every level."""
    choices = random.Random(f"{claim.group_id.partition('-')[0]} {claim.attempt}")
    kind = choices.random()
    if kind < 0.4:
        return choices.uniform(0.05, 0.3)
    if kind < 0.9:
        return choices.uniform(0.3, 3.0)
    return min(max(choices.lognormvariate(math.log(11), 0.7), 3.0), 30.0)


@dataclass
class Simulation:
    """A trainer and endless places for agents, on the test's clock."""

    loop: Any
    clock: Any
    version: int = 0
    events: list[tuple[float, int, Any, int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    num_claimed: int = 0

    async def claim(self) -> None:
        """Whatever is admitted begins now."""
        while claims := (await self.loop.claim(1000)).claims:
            for claim in claims:
                self.num_claimed += 1
                ends_at = self.clock.now + wait_s(claim)
                heapq.heappush(self.events, (ends_at, self.num_claimed, claim, self.version))

    async def end_one(self) -> None:
        """The next episode is over."""
        ends_at, _, claim, version = heapq.heappop(self.events)
        self.clock.now = max(self.clock.now, ends_at)
        result = await self.loop.play(claim, version=version)
        if not result.counted:
            await self.claim()

    async def run(self) -> float:
        """Train; mean seconds of a step."""
        reader, began = self.loop.reader, self.clock.now
        reader.set_steps_left(NUM_STEPS)
        await self.claim()
        for step in range(1, NUM_STEPS + 1):
            while True:
                try:
                    leases = self.loop.take(GROUPS_PER_STEP, version=self.version)
                    break
                except DeadlineExceeded:
                    await self.end_one()
                    await self.claim()
            for lease in leases:
                turns = [turn for t in lease.group.trajectories for turn in t.turns]
                assert len(turns) == GROUP_SIZE
                self.ages += [self.version - t.version_spans[0].policy_version for t in turns]
            is_published_at = self.clock.now + UPDATE_S
            while self.events and self.events[0][0] <= is_published_at:
                await self.end_one()
            self.clock.now = is_published_at
            self.version = step
            reader.set_steps_left(NUM_STEPS - step)
            reader.acknowledge(self.loop.train(leases, step))
            await self.claim()
        return (self.clock.now - began) / NUM_STEPS


@pytest.fixture
def simulate(start: Callable[..., Any], clock: Any) -> Callable[..., Any]:
    """Runs one level; seconds a step, the simulation, and the run's numbers."""

    async def run(name: str, **limits: Any) -> tuple[float, Simulation, dict[str, float]]:
        loop = await start(
            num_tasks=64,
            run__name=name.replace(" ", "-"),
            buffer__group_size=GROUP_SIZE,
            buffer__lease_s=1e6,
            trainer__groups_per_step=GROUPS_PER_STEP,
            trainer__num_steps=NUM_STEPS,
            env__episode_deadline_s=600,
            **{f"buffer__{name}": value for name, value in limits.items()},
        )
        simulation = Simulation(loop, clock)
        return await simulation.run(), simulation, loop.reader.stats()

    return run


@pytest.mark.medium
@pytest.mark.parametrize("where", ["redis"], indirect=True)
async def test_no_level_loses_slow_episodes_and_all_are_faster(
    simulate: Callable[..., Any],
) -> None:
    """At every level each attempt that starts is trained, in time, and nothing is left over at the
    end. One step of staleness is 1.5 times as fast as none, more is more."""
    levels: dict[str, dict[str, Any]] = {
        "synchronous": {"max_staleness": 0},
        "partial": {"max_staleness": 0, "over_provision": 1.5},
        "auto 1": {"max_staleness": 1},
        "auto 4": {"max_staleness": 4},
        "depth 1 at age 4": {"max_staleness": 4, "pipeline_depth": 1},
        "depth 4 at age 4": {"max_staleness": 4, "pipeline_depth": 4},
    }
    seconds: dict[str, float] = {}
    mean_age: dict[str, float] = {}
    for name, limits in levels.items():
        seconds[name], simulation, stats = await simulate(name, **limits)
        mean_age[name] = sum(simulation.ages) / len(simulation.ages)
        limit = max(limits["max_staleness"], int("over_provision" in limits))
        assert max(simulation.ages) <= limit
        num = NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
        assert simulation.num_claimed == len(simulation.ages) == num
        assert stats["buffer/ledger/trained"] == stats["buffer/ledger/started"] == num
        assert stats["buffer/discarded_time_share"] == 0
        assert stats["buffer/length/slow_share_ratio"] == 1
    speed = {name: seconds["synchronous"] / value for name, value in seconds.items()}
    assert speed["auto 1"] >= 1.5
    assert speed["partial"] >= 1.25
    assert mean_age["partial"] <= 0.5
    assert speed["depth 1 at age 4"] >= 2.5
    assert mean_age["depth 1 at age 4"] <= 1.1
    assert speed["auto 4"] >= max(2.8, 0.8 * speed["depth 4 at age 4"])
    assert mean_age["auto 4"] <= 0.75 * mean_age["depth 4 at age 4"]
