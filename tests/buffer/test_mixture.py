"""Mixtures of task sources, and weights that change while a run goes on."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from outloop.buffer.errors import NotFound, RecordError, SettingsError
from outloop.buffer.records import Task
from outloop.buffer.tasks.mixture import Mixture, TaskSource, WeightsFrom
from outloop.buffer.tasks.order import task_index
from outloop.cli import cli

SOURCES = (TaskSource("easy", 3), TaskSource("hard", 5))
EVEN = (WeightsFrom(0, (1.0, 1.0)),)


def owner(index: int) -> str:
    """The source of a task of SOURCES."""
    return "easy" if index < 3 else "hard"


def test_one_source_is_played_in_the_order_of_the_policy() -> None:
    """A run without a mixture keeps its order."""
    alone = Mixture([TaskSource("tasks", 5)], [], seed=3)
    assert [alone.task_index(slot) for slot in range(20)] == [
        task_index(slot, 5, 3) for slot in range(20)
    ]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40), st.lists(st.integers(0, 9000), min_size=1, max_size=30))
def test_a_slots_task_depends_on_nothing_but_the_seed_and_the_weights(
    seed: int, slots: list[int]
) -> None:
    """Routers that saw other slots before agree; each source is played epoch by epoch."""
    schedule = [*EVEN, WeightsFrom(4000, (1.0, 3.0)), WeightsFrom(4100, (1.0, 0.0))]
    first = Mixture(SOURCES, schedule, seed)
    second = Mixture(SOURCES, schedule, seed)
    order = [first.task_index(slot) for slot in range(300)]
    assert [second.task_index(slot) for slot in slots] == [first.task_index(slot) for slot in slots]
    for name, size in (("easy", 3), ("hard", 5)):
        played = [index for index in order if owner(index) == name]
        for start in range(0, len(played) - size, size):
            assert len(set(played[start : start + size])) == size
    assert all(owner(first.task_index(slot)) == "easy" for slot in (4100, 5000, 8999))


def test_a_task_knows_its_source() -> None:
    """By its place among the run's tasks; one source alone has no name."""
    mixture = Mixture(SOURCES, EVEN, seed=0)
    assert [mixture.source_of(index) for index in range(8)] == [owner(i) for i in range(8)]
    assert Mixture([TaskSource("tasks", 5)], [], seed=3).source_of(4) == ""


def test_the_order_is_fixed() -> None:
    """A release that mixes otherwise would play other tasks after a resume."""
    mixture = Mixture(SOURCES, EVEN, seed=0)
    assert [mixture.task_index(slot) for slot in range(10)] == [1, 0, 2, 3, 6, 0, 7, 5, 2, 1]


def test_shares_follow_the_weights() -> None:
    """Over many slots, within a few standard errors, on both sides of a change."""
    mixture = Mixture(SOURCES, [WeightsFrom(0, (3.0, 1.0)), WeightsFrom(6000, (1.0, 9.0))], seed=1)
    before = Counter(owner(mixture.task_index(slot)) for slot in range(6000))
    after = Counter(owner(mixture.task_index(slot)) for slot in range(6000, 12000))
    assert abs(before["easy"] / 6000 - 0.75) < 0.03
    assert abs(after["easy"] / 6000 - 0.1) < 0.03


def mixed_tasks() -> list[Task]:
    """The tasks of SOURCES."""
    return [Task(task_id=f"easy{i}", payload={"n": i}) for i in range(3)] + [
        Task(task_id=f"hard{i}", payload={"n": 10 + i}) for i in range(5)
    ]


async def claim_slots(writer: Any, reader: Any, num_groups: int, key: str) -> dict[int, str]:
    """Task of each newly claimed slot."""
    result = await writer.claim(key=key, count=2 * num_groups)
    return {int(c.group_id[1:].split("-")[0]): c.task.task_id for c in result.claims}


async def test_weights_change_for_slots_that_nobody_claimed(join: Callable[..., Any]) -> None:
    """On every router at once; claimed slots and repeated claims keep their tasks."""
    writer, reader = await join(buffer__max_staleness=100, buffer__pipeline_depth=100)
    with pytest.raises(NotFound, match="no tasks yet"):
        reader.task_weights.read()
    sources = (TaskSource("easy", 3, 1.0), TaskSource("hard", 5, 0.0))
    await writer.register_tasks(mixed_tasks(), [], sources)
    fence = reader.acquire_fence()
    reader.recover(None, fence=fence)
    reader.announce_version(0, None)
    reader.acknowledge_version(0)
    first = await claim_slots(writer, reader, 20, "a")
    assert all(task.startswith("easy") for task in first.values())
    now = reader.task_weights.change({"easy": 0, "hard": 2.5})
    assert (now.from_slot, now.weights) == (20, (0.0, 2.5))
    second = await claim_slots(writer, reader, 20, "b")
    assert all(task.startswith("hard") for task in second.values())
    assert await claim_slots(writer, reader, 20, "a") == first
    reader.task_weights.change({"hard": 1.0})
    reader.task_weights.change({"easy": 1.0})
    _, schedule = reader.task_weights.read()
    assert [(entry.from_slot, entry.weights) for entry in schedule] == [
        (0, (1.0, 0.0)),
        (20, (0.0, 2.5)),
        (40, (1.0, 1.0)),
    ]
    await writer.close()


async def test_wrong_weights_are_refused(join: Callable[..., Any], tmp_path: Any) -> None:
    """An unknown source names the nearest; weights that choose nothing are no weights."""
    writer, reader = await join()
    await writer.register_tasks(mixed_tasks(), [], SOURCES)
    with pytest.raises(SettingsError, match="did you mean 'easy'"):
        reader.task_weights.change({"esy": 1})
    for wrong in ({"easy": -1.0}, {"easy": float("nan")}, {"easy": 0, "hard": 0}):
        with pytest.raises(RecordError, match="finite numbers of 0 or more"):
            reader.task_weights.change(wrong)
    with pytest.raises(RecordError, match="sizes above 0 that add up"):
        await writer.register_tasks(mixed_tasks(), [], (TaskSource("easy", 3),))
    shown = CliRunner().invoke(cli, ["tasks", "weights", "--run", str(tmp_path), "easy"])
    assert shown.exit_code == 2
    assert "is not NAME=WEIGHT" in shown.output
    await writer.close()


async def test_the_command_changes_and_shows_weights(
    server: Any, loop_on: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`outloop tasks weights --run DIR NAME=WEIGHT` on a run that is up."""
    monkeypatch.setenv("COLUMNS", "120")
    await loop_on(server.url, buffer__redis_url=server.url)
    words = ["tasks", "weights", "--run", str(tmp_path / "t")]
    shown = CliRunner().invoke(cli, [*words, "tasks=3"], catch_exceptions=False)
    assert shown.exit_code == 0
    row = [word for word in shown.output.splitlines() if "tasks" in word and "1.000" in word]
    assert len(row) == 1
    assert "3" in row[0]


async def test_a_task_may_have_its_own_deadline(join: Callable[..., Any]) -> None:
    """Its `deadline_s` is the claim's; others have the run's."""
    writer, reader = await join(env__episode_deadline_s=60.0)
    await writer.register_tasks(
        [
            Task(task_id="slow", payload={"deadline_s": 7.5}),
            Task(task_id="other", payload={"q": 1}),
        ],
        [],
    )
    reader.recover(None, fence=reader.acquire_fence())
    reader.announce_version(0, None)
    reader.acknowledge_version(0)
    claims = (await writer.claim(key="k", count=8)).claims
    assert {claim.task.task_id: claim.deadline_s for claim in claims} == {
        "slow": 7.5,
        "other": 60.0,
    }
    await writer.close()
