"""The admission of `outloop plan` beside the buffer's own scripts, call by call."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from outloop.buffer.errors import DeadlineExceeded
from outloop.buffer.records import Task
from outloop.buffer.tasks.durations import Candidate, next_mean, prompt_size
from outloop.buffer.tasks.order import task_index
from outloop.engine.launch.plan.admission import Admission, Group, Rules

GROUPS_PER_STEP, GROUP_SIZE, NUM_STEPS, UPDATE_S = 4, 3, 16, 0.5
NUM_TASKS, SEED = 11, 5


@dataclass(eq=False)
class Attempt:
    """One attempt in both."""

    group: Group[Any]
    claim: Any
    version: int
    started_at: float
    oldest_version: int | None = None
    is_scored: bool = False
    ms: int = 0
    """How long it took."""


class Pair:
    """The same calls to the buffer and to the plan's admission; every answer is compared."""

    def __init__(self, loop: Any, clock: Any, rules: Rules, seed: int) -> None:
        self.loop, self.clock = loop, clock
        self.admission: Admission[Attempt] = Admission(rules, self.candidate)
        self.random = random.Random(seed)
        self.events: list[tuple[float, int, Attempt]] = []
        self.number = 0
        self.version = 0
        self.num_replayed = 0
        self.durations: dict[str, tuple[int, int]] = {}
        """Of each task, as the scripts keep them."""

    @staticmethod
    def task_of(slot: int) -> int:
        """The task that a slot plays."""
        return task_index(slot, NUM_TASKS, SEED)

    def candidate(self, slot: int) -> Candidate:
        """What is known of a slot's task, or of all tasks where it was not played yet."""
        task = Task(task_id=f"t{self.task_of(slot)}", payload={"n": self.task_of(slot)})
        known = self.durations.get(task.task_id) or self.durations.get("")
        return Candidate(
            slot=slot, expected_ms=known[0] if known else None, prompt_size=prompt_size(task)
        )

    def note(self, group: Group[Attempt]) -> None:
        """A group is complete."""
        num = len(group.attempts)
        ms = sum(attempt.ms for attempt in group.attempts) / num
        for name, memory in ((group.attempts[0].claim.task.task_id, 16), ("", 256)):
            self.durations[name] = next_mean(self.durations.get(name, (0, 0)), ms, num, memory)

    async def claim(self) -> None:
        """Whatever may start now starts in both."""
        while claims := (await self.loop.claim(1000)).claims:
            for claim in claims:
                group = self.admission.claim()
                assert group is not None
                slot = int(claim.group_id.removeprefix("g").partition("-")[0])
                assert group.slot == slot
                attempt = Attempt(group, claim, self.version, self.clock.now)
                group.attempts.append(attempt)
                tail = self.random.random() < 0.15
                seconds = self.random.uniform(4.0, 12.0) if tail else self.random.random()
                seconds += 0.1 * (self.task_of(slot) % 7)
                self.number += 1
                heapq.heappush(
                    self.events, (self.clock.now + round(seconds, 3), self.number, attempt)
                )
        assert self.admission.claim() is None

    async def end_one(self) -> None:
        """The next attempt ends in both; it counts in both or in neither."""
        ends_at, _, attempt = heapq.heappop(self.events)
        self.clock.now = max(self.clock.now, ends_at)
        result = await self.loop.play(attempt.claim, version=attempt.version)
        attempt.oldest_version = attempt.version
        is_counted = self.admission.score(attempt, attempt.group)
        assert is_counted == result.counted
        self.num_replayed += not is_counted
        attempt.ms = int(self.clock.now * 1000) - int(attempt.started_at * 1000)
        if attempt.group.state == "ready":
            self.note(attempt.group)
        await self.claim()

    def take(self) -> tuple[Any, Any] | None:
        """A batch of both, or of neither."""
        taken = self.admission.take(GROUPS_PER_STEP, self.clock.now)
        try:
            leases = self.loop.take(GROUPS_PER_STEP, version=self.version)
        except DeadlineExceeded:
            assert taken is None
            return None
        assert taken is not None
        assert [group.slot for group in taken] == [lease.group.slot for lease in leases]
        return leases, taken

    def train(self, leases: Any, taken: Any) -> None:
        """Both publish the next version, and know how many steps are left."""
        self.version += 1
        self._tell_steps_left()
        self.loop.train(leases, self.version)
        self.admission.acknowledge(self.version)
        self.admission.mark_trained(taken)

    def _tell_steps_left(self) -> None:
        num_steps = NUM_STEPS - self.version
        self.admission.steps_left = num_steps
        self.loop.reader.set_steps_left(num_steps)

    async def run(self) -> None:
        """A run to its end, with episodes that end while the trainer works."""
        self._tell_steps_left()
        await self.claim()
        for _ in range(NUM_STEPS):
            while (batch := self.take()) is None:
                await self.end_one()
            await self.claim()
            trained_at = self.clock.now + UPDATE_S
            while self.events and self.events[0][0] <= trained_at:
                await self.end_one()
            self.clock.now = trained_at
            self.train(*batch)
            await self.claim()
        assert not self.events, "something was started for no step"


@pytest.mark.parametrize("task_order", ["slot", "longest_first"])
@pytest.mark.parametrize(
    ("staleness", "depth", "over_provision"),
    [(0, 0.0, 1.0), (0, 0.0, 1.5), (2, 0.5, 1.0), (1, "auto", 1.0), (4, "auto", 1.0)],
)
async def test_the_plan_admits_and_takes_what_the_buffer_does(
    start: Callable[..., Any],
    clock: Any,
    staleness: int,
    depth: Any,
    over_provision: float,
    task_order: Any,
) -> None:
    """Each claim, each score and each batch, over steps of episodes with a tail."""
    loop = await start(
        num_tasks=NUM_TASKS,
        run__seed=SEED,
        buffer__group_size=GROUP_SIZE,
        buffer__max_staleness=staleness,
        buffer__pipeline_depth=depth,
        buffer__over_provision=over_provision,
        buffer__task_order=task_order,
        trainer__groups_per_step=GROUPS_PER_STEP,
        env__max_replaced_share=1,
        env__max_runner_silence_s=0,
    )
    rules = Rules(
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        max_staleness=staleness,
        pipeline_depth=depth,
        over_provision=over_provision,
        task_order=task_order,
    )
    await Pair(loop, clock, rules, seed=staleness).run()


async def test_the_plan_plays_again_what_the_buffer_plays_again(
    start: Callable[..., Any], clock: Any
) -> None:
    """Scored attempts become too old by two publishes that train nothing; so does one in flight."""
    loop = await start(
        num_tasks=NUM_TASKS,
        run__seed=SEED,
        buffer__group_size=GROUP_SIZE,
        buffer__max_staleness=1,
        buffer__pipeline_depth=1.0,
        trainer__groups_per_step=GROUPS_PER_STEP,
        env__max_replaced_share=1,
        env__max_runner_silence_s=0,
    )
    rules = Rules(
        group_size=GROUP_SIZE, groups_per_step=GROUPS_PER_STEP, max_staleness=1, pipeline_depth=1.0
    )
    pair = Pair(loop, clock, rules, seed=7)
    await pair.claim()
    late = len(pair.events) // 2
    while len(pair.events) > late:
        await pair.end_one()
    assert pair.num_replayed == 0
    for version in (1, 2):
        pair.version = version
        loop.publish(version, version - 1)
        pair.admission.acknowledge(version)
    lost = len(pair.admission.lost)
    assert lost == loop.reader.stats()["buffer/replaced/stale"] > 0
    await pair.claim()
    # What was in flight has recorded nothing yet, and is looked at when it is scored.
    while len(pair.events):
        await pair.end_one()
    assert pair.num_replayed > 0
    assert len(pair.admission.lost) == loop.reader.stats()["buffer/replaced/stale"]
    assert pair.take() is not None
