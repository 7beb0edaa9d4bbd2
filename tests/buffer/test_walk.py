"""Random interleavings of everything, with crashes: each slot is trained once in the lineage."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fakes.walk import Walk
from outloop.buffer.errors import FenceExpired
from outloop.buffer.records import Turn

NUM_STEPS = 300


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(8))
async def test_any_interleaving_trains_each_slot_once(
    start: Callable[..., Any], clock: Any, make_turn: Callable[..., Turn], seed: int
) -> None:
    """No order of calls, repeats, expiries and crashes trains a slot twice or loses one."""
    choices = random.Random(seed)
    max_staleness = seed % 3
    loop = await start(
        buffer__max_staleness=max_staleness,
        buffer__over_provision=1.5 if seed % 2 else 1.0,
        buffer__group_deadline_s=120,
        buffer__lease_s=60,
        env__episode_deadline_s=30,
        env__max_runner_silence_s=10,
        env__max_replacements=1,
    )
    max_age = max(max_staleness, seed % 2)
    walk = Walk(loop, clock, make_turn, choices, max_age=max_age)
    weights = {
        walk.claim: 3,
        walk.open_one: 10,
        walk.turn: 6,
        walk.close: 12,
        walk.close_again: 1,
        walk.score: 2,
        walk.take: 3,
        walk.train: 4,
        walk.checkpoint: 2,
        walk.crash: 0.2,
        walk.wait: 0.4,
        walk.silence: 0.3,
        walk.resolve: 1,
        walk.damage: 0.3,
        walk.change_limits: 0.3,
    }
    for _ in range(NUM_STEPS):
        (step,) = choices.choices(list(weights), list(weights.values()))
        await step()
        walk.check(2 * (max_age + 1))
    await _finish(walk)


class Machine(RuleBasedStateMachine):
    """The walk, its steps chosen by hypothesis, which makes a failure as short as it can."""

    begin: Callable[[], Any]
    """Starts a walk."""
    MAX_STALENESS = 1

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.walk: Walk = self.runner.run(type(self).begin())

    def teardown(self) -> None:
        """Close the connections."""
        self.walk.loop.reader.close()
        self.runner.run(self.walk.loop.writer.close())
        self.runner.close()

    @rule(
        name=st.sampled_from(
            [
                *["play", "play", "play", "take", "take", "train", "train", "checkpoint"],
                *["claim", "open_one", "turn", "close", "score", "close_again"],
                *["crash", "wait", "silence", "resolve", "damage", "change_limits"],
            ]
        ),
        seed=st.integers(0, 2**16),
    )
    def step(self, name: str, seed: int) -> None:
        """One call, its arguments drawn."""
        self.walk.choices = random.Random(seed)
        self.runner.run(getattr(self.walk, name)())

    @invariant()
    def holds(self) -> None:
        """What must hold after every step."""
        self.walk.check(2 * (self.MAX_STALENESS + 1))


@pytest.mark.medium
def test_no_sequence_of_calls_breaks_an_invariant(
    where: str,
    url: str,
    make_run: Callable[..., Any],
    clock: Any,
    make_turn: Callable[..., Turn],
    loop_of: Callable[..., Any],
    connect_faces: Callable[..., Any],
) -> None:
    """Open, turn, reward, close, take, acknowledge, expire in any order, each with its repeats."""
    names = iter(range(10**6))

    async def begin() -> Walk:
        run = make_run(
            url,
            run__name=f"m{next(names)}",
            run__dir="runs",
            buffer__max_staleness=Machine.MAX_STALENESS,
            buffer__group_deadline_s=120,
            buffer__lease_s=60,
            env__episode_deadline_s=30,
            env__max_runner_silence_s=10,
            env__max_replacements=1,
        )
        loop = loop_of(*await connect_faces(run))
        await loop.start()
        return Walk(loop, clock, make_turn, random.Random(0), max_age=Machine.MAX_STALENESS)

    here = type("Here", (Machine,), {"begin": staticmethod(begin)})
    many = settings(
        max_examples=16 if where == "twin" else 6, stateful_step_count=40, deadline=None
    )
    run_state_machine_as_test(here, settings=many)


async def _finish(walk: Walk) -> None:
    """From any state the loop gets going again: two more batches are trained."""
    target = len(walk.weights.slots) + 4
    for _ in range(60):
        if len(walk.weights.slots) >= target:
            return
        walk.clock.advance(31)
        walk.claims.clear()
        walk.open.clear()
        await walk.loop.play_all(version=walk.weights.version)
        await walk.take()
        if walk.leases:
            await walk.train()
        elif not walk.leases:
            try:
                walk.loop.reader.renew(walk.loop.fence)
            except FenceExpired:
                await walk.crash()
                target = len(walk.weights.slots) + 4
    raise AssertionError(f"stuck: {walk.loop.reader.stats()}")
