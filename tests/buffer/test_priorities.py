"""Tasks with a higher priority are played earlier, inside the admission rule and a window."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outloop.buffer.errors import Conflict, RecordError
from outloop.buffer.records import Task
from outloop.buffer.tasks.mixture import Mixture, TaskSource, WeightsFrom
from outloop.buffer.tasks.priorities import Priorities
from outloop.buffer.tasks.validation import encode_priorities

SOURCES = (TaskSource("easy", 3), TaskSource("hard", 5))


def tasks(*priorities: int) -> list[Task]:
    """One task for each priority, named by it and its place."""
    return [
        Task(task_id=f"p{priority}-{index}", payload={"n": index}, priority=priority)
        for index, priority in enumerate(priorities)
    ]


@pytest.mark.medium
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=8, max_size=8),
    st.integers(1, 12),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 200), max_size=20),
    st.integers(0, 20),
)
def test_windows_are_sorted_and_nobody_starves(
    values: list[int], window: int, seed: int, slots: list[int], change: int
) -> None:
    """Each window plays its own tasks, the highest first, equals in their order; whoever asks for
    whichever slot first gets the same task, also where weights change between windows."""
    schedule = [WeightsFrom(0, (1.0, 1.0)), WeightsFrom(change * window, (1.0, 4.0))]
    array = np.array(values, np.int32)
    plain = Mixture(SOURCES, schedule, seed)
    one, other = (Mixture(SOURCES, schedule, seed, Priorities(array, window)) for _ in range(2))
    order = [one.task_index(slot) for slot in range(10 * window)]
    for first in range(0, len(order), window):
        chosen = [plain.task_index(slot) for slot in range(first, first + window)]
        expected = sorted(chosen, key=lambda index: -values[index])
        assert order[first : first + window] == expected
    assert [other.task_index(slot) for slot in slots] == [one.task_index(slot) for slot in slots]
    assert [plain.task_index(slot) for slot in range(30)] == [
        Mixture(SOURCES, schedule, seed, Priorities(array, 1)).task_index(slot)
        for slot in range(30)
    ]


async def test_claims_come_by_priority_as_far_as_admission_goes(
    start: Callable[..., Any], join: Callable[..., Any]
) -> None:
    """An epoch of six in a window of six: the urgent ones are in the first batch, every one is
    played once; a second writer and a slot that is played again agree."""
    writer, reader = await join(buffer__priority_window=6)
    try:
        given_tasks = tasks(0, 2, -1, 2, 1, 0)
        await writer.register_tasks(given_tasks, [])
        fence = reader.acquire_fence()
        reader.recover(None, fence=fence)
        reader.announce_version(0, None)
        reader.acknowledge_version(0)
        first = await writer.claim(key="a", count=99)
        assert len(first.claims) == 4
        assert {claim.task.task_id for claim in first.claims} == {"p2-1", "p2-3"}
        reader.recover(None, fence=fence)
        reader.announce_version(1, None)
        reader.acknowledge_version(1)
        again = await writer.claim(key="b", count=99)
        assert [c.task.task_id for c in again.claims] == [c.task.task_id for c in first.claims]
        with pytest.raises(Conflict):
            await writer.register_tasks(tasks(0, 2, -1, 2, 1, 5), [])
        await writer.register_tasks(given_tasks, [])
    finally:
        await writer.close()


async def test_a_source_lends_its_priority_to_its_tasks(
    join: Callable[..., Any],
) -> None:
    """Shares are those of the weights; changed ones hold from a window that nobody has begun."""
    sources = (TaskSource("calm", 3, 1.0), TaskSource("urgent", 5, 1.0, priority=1))
    writer, reader = await join(
        buffer__priority_window=8, trainer__groups_per_step=16, buffer__group_size=2
    )
    try:
        await writer.register_tasks(tasks(*[0] * 8), [], sources)
        fence = reader.acquire_fence()
        reader.recover(None, fence=fence)
        reader.announce_version(0, None)
        reader.acknowledge_version(0)
        played = []
        for index in range(16):
            claims = (await writer.claim(key=f"k{index}", count=2)).claims
            assert claims[0].task == claims[1].task
            played.append(int(claims[0].task.task_id.partition("-")[2]) >= 3)
            if index == 9:
                assert reader.task_weights.change({"urgent": 0.0}).from_slot == 16
        for first in (0, 8):
            window = played[first : first + 8]
            assert window == sorted(window, reverse=True)
        assert set(Counter(played)) == {True, False}
    finally:
        await writer.close()


@pytest.mark.parametrize("priority", [1.5, "high", True, 10**12])
def test_a_priority_is_a_whole_number(priority: object) -> None:
    """Anything else is refused, by the task's name or the source's."""
    odd: Any = priority
    with pytest.raises(RecordError, match=r"tasks: 'x': priority=.* whole number"):
        encode_priorities([Task(task_id="x", payload={}, priority=odd)], [TaskSource("tasks", 1)])
    with pytest.raises(RecordError, match=r"sources: 'all': priority="):
        encode_priorities([Task(task_id="x", payload={})], [TaskSource("all", 1, 1.0, odd)])
    assert encode_priorities(tasks(3, 3), [TaskSource("tasks", 2)]) == b""
