"""Tasks that take long are started first: within a step's groups, by what earlier attempts took."""

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import SOURCE, Claim, Task
from outloop.buffer.settings import build_settings
from outloop.buffer.tasks.durations import (
    Candidate,
    longest_first,
    next_mean,
    rank_correlation,
)
from outloop.buffer.tasks.mixture import TaskSource
from outloop.buffer.tasks.order import task_index

LONGEST_FIRST = {"buffer__task_order": "longest_first"}
Start = Callable[..., Any]


def slot_of(claim: Claim) -> int:
    """The slot of a training claim."""
    return int((claim.group_id or "").removeprefix("g").partition("-")[0])


def tasks_of(claims: list[Claim]) -> list[str]:
    """Their tasks in the order in which groups were started."""
    return list(dict.fromkeys(claim.task.task_id for claim in claims))


class Steps:
    """A synchronous run whose attempts take as long as their task says."""

    def __init__(self, loop: Any, clock: Any, seconds: Mapping[str, float]) -> None:
        self.loop, self.clock = loop, clock
        self.seconds = dict(seconds)
        self.version = 0
        self.slots: list[int] = []
        """Of the groups that were trained."""

    async def play(self, num_steps: int = 1, *, places: int = 1000) -> list[str]:
        """Steps, an attempt on each place; returns the tasks of the last in the order started."""
        started: list[Claim] = []
        for _ in range(num_steps):
            started, playing = [], []
            while True:
                free = places - len(playing)
                while free and (claims := (await self.loop.claim(free)).claims):
                    for claim in claims:
                        ends_at = self.clock.now + self.seconds[claim.task.task_id]
                        heapq.heappush(playing, (ends_at, len(started), claim))
                        started.append(claim)
                    free = places - len(playing)
                if not playing:
                    break
                self.clock.now, _, claim = heapq.heappop(playing)
                await self.loop.play(claim, version=self.version)
            leases = self.loop.take(
                len({claim.group_id for claim in started}), version=self.version
            )
            self.version += 1
            self.loop.reader.acknowledge(self.loop.train(leases, self.version))
            self.slots += [lease.group.slot for lease in leases]
        return tasks_of(started)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 9), st.integers(0, 3), st.integers(-1, 1)), max_size=12
    )
)
def test_a_window_keeps_its_slots(given_rows: list[tuple[int | None, int, int]]) -> None:
    """Each slot is there once. Priority goes before duration, duration before the prompt, and all
    before the slot; what is not known lies between."""
    rows = [
        Candidate(slot=7 + place, expected_ms=ms, prompt_size=size, priority=priority)
        for place, (ms, size, priority) in enumerate(given_rows)
    ]
    order = longest_first(rows)
    assert sorted(order) == [row.slot for row in rows]
    known = [row.expected_ms for row in rows if row.expected_ms is not None]
    mean = sum(known) / len(known) if known else 0.0
    by_slot = {row.slot: row for row in rows}

    def rank(slot: int) -> tuple[float, ...]:
        row = by_slot[slot]
        expected = mean if row.expected_ms is None else row.expected_ms
        return (-row.priority, -expected, -row.prompt_size, slot)

    assert [rank(slot) for slot in order] == sorted(map(rank, order))


def test_a_mean_forgets() -> None:
    """The first sixteen attempts count alike; afterwards the newest sixteenth part, or as many as
    a group has."""
    mean = next_mean((0, 0), 100.0, 8)
    assert mean == (100, 8)
    assert (mean := next_mean(mean, 200.0, 8)) == (150, 16)
    assert next_mean(mean, 350.0, 8) == (250, 16)
    assert next_mean(mean, 310.0, 1) == (160, 16)
    assert next_mean(mean, 70.0, 32) == (70, 32), "a large group is all that counts"
    assert next_mean((3, 16), 0.0, 1) == (3, 16), "what is rounded away is half a millisecond"


def test_a_correlation_of_ranks() -> None:
    """By hand, with equal values; nothing is said of few groups or of equal ones."""
    up = [(float(x), float(x * x)) for x in range(8)]
    assert rank_correlation(up) == pytest.approx(1.0)
    assert rank_correlation([(-a, b) for a, b in up]) == pytest.approx(-1.0)
    # Ranks 1.5 1.5 3.5 3.5 5.5 5.5 7.5 7.5 beside 1 to 8: 40 / sqrt(40 * 42).
    pairs = [(float(x // 2), float(x)) for x in range(8)]
    assert rank_correlation(pairs) == pytest.approx((40 / 42) ** 0.5)
    assert rank_correlation(up[:7]) == 0.0
    assert rank_correlation([(1.0, b) for _, b in up]) == 0.0


@pytest.mark.parametrize("seed", range(3))
async def test_every_epoch_plays_every_task_once(start: Start, clock: Any, seed: int) -> None:
    """Windows of four over epochs of six, whatever was learned and however often the trainer dies:
    no slot is trained twice, none is left out, and each plays the task that it always plays."""
    loop = await start(num_tasks=6, trainer__groups_per_step=4, run__seed=seed, **LONGEST_FIRST)
    choices = random.Random(seed)
    steps = Steps(loop, clock, {f"t{i}": 1.0 for i in range(6)})
    played: dict[int, str] = {}
    for step in range(9):
        steps.seconds = {task: choices.uniform(1, 50) for task in steps.seconds}
        if step % 3 == 1:
            # Some of the next window are started when the trainer dies.
            for claim in (await loop.claim(choices.randint(1, 7))).claims:
                played[slot_of(claim)] = claim.task.task_id
            mark = loop.mark([], steps.version)
            loop.fence = loop.reader.acquire_fence()
            version = loop.reader.recover(mark, fence=loop.fence) + 1
            loop.publish(version, steps.version)
            steps.version = version
            clock.advance(10_000)
        await steps.play()
    assert sorted(steps.slots) == list(range(36))
    assert all(task == f"t{task_index(slot, 6, seed)}" for slot, task in played.items())
    for step in range(9):
        own = steps.slots[4 * step : 4 * step + 4]
        assert sorted(own) == list(range(4 * step, 4 * step + 4)), "no task waits for a window"
    by_epoch = Counter(task_index(slot, 6, seed) for slot in steps.slots)
    assert set(by_epoch.values()) == {6}


async def test_a_task_s_place_follows_its_durations(start: Start, clock: Any) -> None:
    """The slowest is first once it was played; one that becomes slow overtakes it. The metric says
    how well the order was known."""
    loop = await start(
        num_tasks=4, trainer__groups_per_step=4, buffer__group_size=8, **LONGEST_FIRST
    )
    steps = Steps(loop, clock, {"t0": 5.0, "t1": 40.0, "t2": 20.0, "t3": 10.0})
    await steps.play()
    assert loop.reader.stats()["buffer/length/rank_correlation"] == 0.0
    assert await steps.play() == ["t1", "t2", "t3", "t0"]
    await steps.play()
    assert loop.reader.stats()["buffer/length/rank_correlation"] == pytest.approx(1.0)
    steps.seconds["t0"] = 55.0
    assert await steps.play() == ["t1", "t2", "t3", "t0"]
    assert await steps.play() == ["t1", "t0", "t2", "t3"]
    assert await steps.play() == ["t0", "t1", "t2", "t3"]
    assert 0.5 < loop.reader.stats()["buffer/length/rank_correlation"] < 1.0


async def test_what_was_never_played_goes_by_its_prompt(join: Callable[..., Any]) -> None:
    """The longest first; the text beside the prompt does not count where there is a prompt."""
    writer, reader = await join(trainer__groups_per_step=4, buffer__group_size=2, **LONGEST_FIRST)
    lengths = {"a": 10, "b": 1000, "c": 100, "d": 300}
    given_tasks = [
        Task(task_id=name, payload={"prompt": "x" * length, "answer": "y" * (2000 - length)})
        for name, length in lengths.items()
    ]
    await writer.register_tasks(given_tasks, [])
    begin(reader)
    claims = (await writer.claim(key="a", count=99)).claims
    assert tasks_of(list(claims)) == ["b", "d", "c", "a"]
    assert (await writer.claim(key="a", count=99)).claims == claims, "the same key, the same claims"
    await writer.close()


def begin(reader: Any) -> int:
    """Become the trainer and publish version 0."""
    fence: int = reader.acquire_fence()
    reader.recover(None, fence=fence)
    reader.announce_version(0, None)
    reader.acknowledge_version(0)
    return fence


async def test_a_new_task_is_taken_to_be_like_its_source(
    join: Callable[..., Any], loop_of: Callable[..., Any], clock: Any
) -> None:
    """After one task of each source was played, the others of the slow source go first; a task's
    own durations count before its source's, and a priority before both."""
    writer, reader = await join(
        trainer__groups_per_step=8,
        buffer__group_size=2,
        buffer__max_staleness=4,
        buffer__pipeline_depth=4,
        **LONGEST_FIRST,
    )
    loop = loop_of(writer, reader)
    names = [f"fast{i}" for i in range(8)] + [f"slow{i}" for i in range(8)]
    sources = (TaskSource("fast", 8), TaskSource("slow", 8))
    given_tasks = [Task(task_id=n, payload={"n": i}) for i, n in enumerate(names)]
    await writer.register_tasks(given_tasks, [], sources)
    loop.fence = begin(reader)
    first = (await loop.claim(16)).claims
    assert len({claim.group_id for claim in first}) == 8
    for claim in first:
        opening = structs.replace(loop.opening(claim), metadata={SOURCE: claim.source})
        await writer.open_episode(opening)
    for source, seconds in (("fast", 1.0), ("slow", 50.0)):
        clock.advance(seconds)
        for claim in first:
            if claim.source == source:
                await loop.close(f"{claim.group_id}-{claim.attempt}")
    played = {claim.task.task_id for claim in first}
    second = tasks_of(list((await loop.claim(16)).claims))
    assert not set(second) <= played, "some are new"
    kinds = [name[:4] for name in second]
    assert kinds == sorted(kinds, reverse=True)
    assert len(set(kinds)) == 2
    await writer.close()


async def test_a_priority_goes_before_a_duration(join: Callable[..., Any], clock: Any) -> None:
    """Urgent tasks first, and among equals the longest."""
    writer, reader = await join(
        trainer__groups_per_step=4, buffer__priority_window=4, **LONGEST_FIRST
    )
    given_tasks = [
        Task(task_id=f"p{priority}-{size}", payload={"prompt": "x" * size}, priority=priority)
        for priority, size in ((0, 9), (1, 1), (0, 90), (1, 20))
    ]
    await writer.register_tasks(given_tasks, [])
    begin(reader)
    claims = (await writer.claim(key="a", count=99)).claims
    assert tasks_of(list(claims)) == ["p1-20", "p1-1", "p0-90", "p0-9"]
    await writer.close()


async def test_half_the_places_finish_sooner(start: Start, clock: Any) -> None:
    """Eight tasks of which one takes long, on half the places: the same steps take less time."""
    seconds = {f"t{i}": 15.0 for i in range(8)} | {"t5": 50.0, "t2": 35.0}

    async def time_of(**changes: Any) -> float:
        loop = await start(
            num_tasks=8, trainer__groups_per_step=8, run__name=changes["buffer__task_order"],
            run__dir="runs", **changes
        )  # fmt: skip
        steps = Steps(loop, clock, seconds)
        await steps.play()
        began = clock.now
        await steps.play(4, places=8)
        return float(clock.now - began)

    by_slot = await time_of(buffer__task_order="slot")
    long_first = await time_of(**LONGEST_FIRST)
    # The longest attempt alone, four times: nothing can be faster.
    assert long_first == 4 * 50.0
    # In one of the steps, at least, it starts last.
    assert by_slot >= long_first + 15.0


async def test_a_window_outlives_a_restart(start: Start, clock: Any) -> None:
    """What is left of it goes on in its order. A Redis that lost its last second may not know that
    a slot was started: one that the checkpoint contains is not played again."""
    loop = await start(num_tasks=4, trainer__groups_per_step=4, **LONGEST_FIRST)
    steps = Steps(loop, clock, {f"t{i}": 10.0 * i for i in range(4)})
    await steps.play()
    started = (await loop.claim(2)).claims
    assert tasks_of(list(started)) == ["t3"]
    client, window = loop.reader.client, loop.reader.key("window")
    left = [int(slot) for slot in client.zrange(window, 0, -1)]
    assert len(left) == 3
    mark = loop.mark([], steps.version)
    trained = type(mark)(
        fence=mark.fence,
        group_ids=(f"g{left[0]}-99",),
        next_slot=left[0] + 1,
        policy_version=steps.version,
    )
    loop.fence = loop.reader.acquire_fence()
    version = loop.reader.recover(trained, fence=loop.fence) + 1
    loop.publish(version, steps.version)
    again = await loop.play_all(version=version)
    assert [s for s in dict.fromkeys(map(slot_of, again)) if s in left] == left[1:]


async def test_durations_outlive_a_start_from_nothing(start: Start, clock: Any) -> None:
    """A run that resumes without a checkpoint plays its first slots again, the longest first."""
    loop = await start(num_tasks=4, trainer__groups_per_step=4, **LONGEST_FIRST)
    steps = Steps(loop, clock, {"t0": 30.0, "t1": 10.0, "t2": 40.0, "t3": 20.0})
    await steps.play()
    assert (await loop.claim(2)).claims
    loop.fence = loop.reader.acquire_fence()
    loop.publish(loop.reader.recover(None, fence=loop.fence) + 1, None)
    claims = list((await loop.claim(99)).claims)
    assert tasks_of(claims) == ["t2", "t0", "t3", "t1"]
    assert sorted(set(map(slot_of, claims))) == [0, 1, 2, 3]


async def test_the_order_may_change_between_starts(
    make_run: Callable[..., Any], url: str, connect_faces: Callable[..., Any], loop_of: Any
) -> None:
    """A window that is open is played to its end; durations are learned under either order."""
    loop = loop_of(*await connect_faces(make_run(url, trainer__groups_per_step=4, **LONGEST_FIRST)))
    await loop.start(num_tasks=8)
    slots = {slot_of(claim) for claim in (await loop.claim(2)).claims}
    await loop.writer.close()
    loop = loop_of(*await connect_faces(make_run(url, trainer__groups_per_step=4)))
    loop.fence, loop.num_claims = loop.reader.acquire_fence(), 1
    loop.publish(0, None)
    claims = (await loop.claim(99)).claims
    slots |= set(map(slot_of, claims))
    assert slots == {0, 1, 2, 3}
    await loop.writer.close()


async def test_the_first_of_several_routers_decides(
    start: Start, connect_faces: Callable[..., Any], make_run: Callable[..., Any], url: str
) -> None:
    """A window that is open stays as it is; opening one that is not next changes nothing."""
    loop = await start(num_tasks=8, trainer__groups_per_step=4, **LONGEST_FIRST)
    other, _ = await connect_faces(loop.reader.run)
    mine = (await loop.claim(3)).claims
    theirs = (await other.claim(key="other", count=99)).claims
    groups = Counter(claim.group_id for claim in (*mine, *theirs))
    assert sorted(groups.values()) == [2, 2, 2, 2]
    assert loop.reader.client.zcard(loop.reader.key("window")) == 0
    await other.close()


async def test_evaluations_wait_for_training(start: Start) -> None:
    """Where a window has to be opened first, places are not given to an evaluation meanwhile."""
    loop = await start(trainer__groups_per_step=2, **LONGEST_FIRST)
    loop.reader.request_eval("0:main", policy_version=0, num_episodes=2, sampling={})
    first = (await loop.claim(3)).claims
    assert [claim.purpose for claim in first] == ["train"] * 3
    second = (await loop.claim(3)).claims
    assert [claim.purpose for claim in second] == ["train", "eval", "eval"]


def test_an_order_without_effect_is_refused(tmp_path: Any) -> None:
    """One group a step has no order."""
    tree = {
        "run": {"name": "t", "dir": str(tmp_path)},
        "model": {"path": str(tmp_path)},
        "buffer": {"task_order": "longest_first"},
        "trainer": {"groups_per_step": 1},
    }
    with pytest.raises(SettingsError, match=r"task_order=.longest_first. .*groups_per_step=1 has"):
        build_settings(json.loads(json.dumps(tree)), source="test")
