"""The ledger: every attempt that started ends in one column, by its duration and its length."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest

from outloop.buffer.errors import TooManyReplaced
from outloop.buffer.records import DropReason, Turn
from outloop.buffer.stats import STATS
from outloop.buffer.store.ledger import Ledger, LedgerColumn
from outloop.buffer.telemetry import LEDGER_COLUMNS, LEDGER_METRICS, METRICS

SLOW = {
    "buffer__group_size": 3,
    "trainer__groups_per_step": 1,
    "env__episode_deadline_s": 600,
    "buffer__group_deadline_s": 60,
    "buffer__cuts_slow_episodes": True,
}


def columns_of(loop: Any) -> dict[str, int]:
    """The columns that hold an attempt, and how many."""
    ledger = loop.reader.ledger()
    ledger.check()
    return {name: column.num_attempts for name, column in ledger.columns.items()}


async def play_long(
    loop: Any, claim: Any, make_turn: Callable[..., Turn], num_output: int = 4
) -> None:
    """A whole episode with one turn of `num_output` tokens."""
    episode_id = await loop.open(claim)
    await loop.writer.append_turn(make_turn(episode_id, num_output=num_output))
    await loop.close(episode_id)


async def test_an_attempt_is_open_until_its_group_is_trained(
    start: Callable[..., Any], clock: Any, make_turn: Callable[..., Turn]
) -> None:
    """By duration from claim to score, and by tokens sampled; a checkpoint changes nothing."""
    loop = await start(trainer__groups_per_step=1)
    first, second = (await loop.claim(2)).claims
    assert columns_of(loop) == {"open": 2}
    clock.advance(5)
    await play_long(loop, first, make_turn, 200)
    clock.advance(15)
    await play_long(loop, second, make_turn, 4)
    leases = loop.take(1)
    assert columns_of(loop) == {"open": 2}
    mark = loop.train(leases, 1)
    ledger = loop.reader.ledger()
    trained = ledger.columns["trained"]
    assert (trained.num_attempts, trained.duration_s, trained.num_tokens) == (2, 25.0, 204)
    assert trained.by_duration == {10.0: 1, 30.0: 1}
    assert trained.by_tokens == {10.0: 1, 300.0: 1}
    loop.reader.acknowledge(mark)
    assert columns_of(loop) == {"trained": 2}
    assert loop.reader.ledger().num_started == 2


async def test_dropped_attempts_are_counted_by_reason(start: Callable[..., Any]) -> None:
    """What the trainer leaves out, and what is stale at the take."""
    loop = await start(trainer__groups_per_step=4)
    await loop.play_all()
    leases = loop.take(4)
    loop.reader.drop(leases[0].group.group_id, "no_signal", fence=loop.fence)
    loop.reader.drop(leases[1].group.group_id, "filtered", fence=loop.fence)
    loop.reader.drop(leases[1].group.group_id, "filtered", fence=loop.fence)
    loop.reader.drop(leases[2].group.group_id, "malformed", fence=loop.fence)
    assert columns_of(loop) == {
        "dropped/no_signal": 2,
        "dropped/filtered": 2,
        "dropped/malformed": 2,
        "open": 2,
    }


async def test_what_a_deadline_cuts_is_discarded_and_counts_as_without_a_result(
    start: Callable[..., Any], clock: Any, make_turn: Callable[..., Turn]
) -> None:
    """Without this a group's deadline takes the slow episodes out, and nothing says so."""
    loop = await start(**SLOW)
    claims = (await loop.claim(3)).claims
    for claim in claims[:2]:
        await loop.play(claim)
    slow = await loop.open(claims[2])
    await loop.writer.append_turn(make_turn(slow, num_output=50))
    clock.advance(61)
    (lease,) = loop.take(1)
    assert len(lease.group.trajectories) == 2
    assert columns_of(loop) == {"open": 2, "discarded": 1}
    discarded = loop.reader.ledger().columns["discarded"]
    assert (discarded.duration_s, discarded.num_tokens) == (61.0, 50)
    assert loop.reader.stats()["buffer/resultless_attempts"] == 1


async def test_cutting_too_many_stops_the_run(start: Callable[..., Any], clock: Any) -> None:
    """The guard against favouring short episodes counts what deadlines cut."""
    loop = await start(**SLOW | {"buffer__group_size": 104, "trainer__groups_per_step": 2})
    claims = (await loop.claim(208)).claims
    assert len(claims) == 208
    slow = [*claims[:3], *claims[-3:]]
    for claim in claims:
        if claim not in slow:
            await loop.close(await loop.open(claim))
    clock.advance(61)
    with pytest.raises(TooManyReplaced, match=r"6 of 208 .*6 were cut by .*group_deadline_s"):
        loop.take(2)


@pytest.mark.medium
async def test_losing_too_many_to_staleness_stops_the_run(start: Callable[..., Any]) -> None:
    """The second way in which slow episodes are lost: a trainer that takes less than a batch a step
    leaves groups until they are too old. They are played again, and counted."""
    loop = await start(
        buffer__group_size=52,
        trainer__groups_per_step=2,
        buffer__max_staleness=1,
    )
    claims = (await loop.claim(208)).claims
    assert len(claims) == 208
    for claim in claims[52:]:
        await loop.play(claim)
    for version in (1, 2):
        leases = loop.take(1, version=version - 1)
        loop.train(leases, version)
    for claim in claims[:52]:
        await loop.play(claim)
    assert columns_of(loop) == {"trained": 104, "replaced": 104}
    with pytest.raises(TooManyReplaced, match=r"104 of 208 .*104 were too old .*pipeline_depth"):
        loop.take(2, version=2)


async def test_lost_attempts_are_replaced_or_discarded(start: Callable[..., Any]) -> None:
    """Replaced while another attempt takes the place; discarded when none does."""
    loop = await start(env__max_replacements=1, env__max_resumptions=0)
    first, _ = (await loop.claim(2)).claims
    await loop.close(await loop.open(first), None, failure_kind="environment", outcome="failed")
    assert columns_of(loop) == {"replaced": 1, "open": 1}
    (again,) = (await loop.claim(1)).claims
    assert again.group_id == first.group_id
    await loop.close(await loop.open(again), None, failure_kind="environment", outcome="failed")
    assert columns_of(loop) == {"replaced": 1, "discarded": 1, "open": 1}


async def test_a_resumed_attempt_is_the_same_one(
    start: Callable[..., Any], clock: Any, make_turn: Callable[..., Turn]
) -> None:
    """It started when it was first claimed, and is counted once."""
    loop = await start()
    first, _ = (await loop.claim(2)).claims
    episode_id = await loop.open(first)
    await loop.writer.append_turn(make_turn(episode_id))
    clock.advance(20)
    await loop.close(episode_id, None, failure_kind="infrastructure", outcome="failed")
    assert columns_of(loop) == {"open": 2}
    (again,) = (await loop.claim(1)).claims
    assert again.resumes == episode_id
    clock.advance(20)
    await loop.close(await loop.open(again), None, failure_kind="environment", outcome="failed")
    assert columns_of(loop) == {"replaced": 1, "open": 1}
    assert loop.reader.ledger().columns["replaced"].duration_s == 40.0


async def test_evaluations_have_a_column(start: Callable[..., Any]) -> None:
    """Scored ones; one that is lost is replaced."""
    loop = await start()
    loop.reader.request_eval(
        "0:main", policy_version=0, num_episodes=2, sampling={}, blocks_training=True
    )
    claims = (await loop.claim(2)).claims
    await loop.play(claims[0])
    await loop.close(await loop.open(claims[1]), None, outcome="aborted", failure_kind=None)
    assert columns_of(loop) == {"evaluated": 1, "replaced": 1}


async def test_a_rollback_takes_attempts_out_of_the_trained_column(
    start: Callable[..., Any],
) -> None:
    """Groups trained after the checkpoint are trained again, or dropped; never both."""
    loop = await start(buffer__max_staleness=1)
    await loop.play_all()
    mark = loop.train(loop.take(2), 1)
    loop.reader.acknowledge(mark)
    await loop.play_all(version=1)
    loop.train(loop.take(2, version=1), 2)
    assert columns_of(loop) == {"trained": 8, "open": 4}
    loop.fence = loop.reader.acquire_fence()
    loop.reader.recover(mark, fence=loop.fence)
    assert columns_of(loop) == {"trained": 4, "open": 8}
    loop.publish(3, 1)
    loop.train(loop.take(2, version=3), 4)
    assert columns_of(loop) == {"trained": 8, "open": 4}


async def test_no_attempt_of_a_new_lineage_is_lost_from_the_ledger(
    start: Callable[..., Any],
) -> None:
    """Without a checkpoint all that was played is dropped as stale, what is in flight too."""
    loop = await start(buffer__max_staleness=1)
    await loop.play_all()
    loop.train(loop.take(2), 1)
    in_flight = (await loop.claim(3)).claims
    assert len(in_flight) == 3
    loop.fence = loop.reader.acquire_fence()
    loop.reader.recover(None, fence=loop.fence)
    assert columns_of(loop) == {"dropped/stale": 11}


async def test_stats_hold_the_ledger(start: Callable[..., Any]) -> None:
    """By the names under which the trainer writes them into metrics.jsonl."""
    loop = await start()
    await loop.play_all()
    leases = loop.take(2)
    loop.reader.drop(leases[0].group.group_id, "no_signal", fence=loop.fence)
    loop.publish(1, 0)
    loop.reader.mark_trained([leases[1].group.group_id], fence=loop.fence, policy_version=1)
    await loop.claim(1)
    stats = loop.reader.stats()
    assert stats["buffer/ledger/started"] == 5
    assert stats["buffer/ledger/trained"] == 2
    assert stats["buffer/ledger/dropped/no_signal"] == 2
    assert stats["buffer/ledger/dropped/stale"] == 0
    assert stats["buffer/ledger/open"] == 1
    ends = [n for name, n in stats.items() if name.startswith("buffer/ledger/")]
    assert sum(ends) == 2 * stats["buffer/ledger/started"]


def test_every_reason_to_drop_has_a_column() -> None:
    """And a row of metrics."""
    for reason in get_args(DropReason):
        assert f"dropped/{reason}" in LEDGER_COLUMNS
        assert f"buffer/dropped/{reason}" in METRICS
    assert set(LEDGER_METRICS) <= set(METRICS)
    assert set(LEDGER_METRICS) <= set(STATS)


def _training(**numbers: dict[float, int]) -> Ledger:
    """A ledger of training attempts by column and upper bound of their duration."""
    columns = {
        name.replace("__", "/"): LedgerColumn(
            num_attempts=sum(counts.values()),
            duration_s=sum(bound * number for bound, number in counts.items()),
            by_duration=counts,
        )
        for name, counts in numbers.items()
    }
    return Ledger(num_started=0, columns=columns, training=columns)


def test_lost_slow_attempts_show_in_the_statistic() -> None:
    """The pooled two-proportion z of 8 lost of 40 slow ones against 4 lost of 360 others."""
    ledger = _training(
        trained={1.0: 256, 3.0: 90, 10.0: 22},
        dropped__no_signal={3.0: 10, 10.0: 10},
        replaced={10.0: 8, 3.0: 4},
        open={},
    )
    slow = ledger.slow_attempts()
    assert slow.bound_s == 3.0
    assert slow.lost_share == pytest.approx(0.2)
    assert slow.share_ratio == pytest.approx((32 / 388) / (40 / 400))
    pooled = 12 / 400
    error = (pooled * (1 - pooled) * (1 / 40 + 1 / 360)) ** 0.5
    assert slow.z == pytest.approx((0.2 - 4 / 360) / error)
    assert slow.z > 6
    lost, ended = 8 * 10 + 4 * 3, 256 + 104 * 3 + 40 * 10
    assert ledger.discarded_time_share() == pytest.approx(lost / ended)


def test_nothing_lost_is_no_finding() -> None:
    """Neither is a loss that meets all alike, attempts that are all equally long, or none."""
    whole = _training(trained={1.0: 90, 30.0: 10}).slow_attempts()
    assert (whole.share_ratio, whole.lost_share, whole.z) == (1.0, 0.0, 0.0)
    even = _training(trained={1.0: 72, 30.0: 8}, dropped__stale={1.0: 18, 30.0: 2}).slow_attempts()
    assert even.share_ratio == pytest.approx(1.0)
    assert even.z == pytest.approx(0.0, abs=1e-9)
    assert math.isnan(_training(trained={1.0: 90}).slow_attempts().share_ratio)
    assert math.isnan(_training().slow_attempts().share_ratio)
    assert _training().discarded_time_share() == 0.0
