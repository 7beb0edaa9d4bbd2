"""Take, renew, mark, drop, acknowledge: what the trainer may do and when it may not."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outloop.buffer.errors import Conflict, DeadlineExceeded, FenceExpired, Gone
from outloop.buffer.records import ServerEntry, Turn

NUM_WAKES = 5


async def test_groups_are_taken_oldest_first_and_whole(start: Callable[..., Any]) -> None:
    """Of one version: by slot and not by when it was ready."""
    loop = await start(buffer__max_staleness=2, buffer__pipeline_depth=1)
    claims = (await loop.claim()).claims
    for claim in reversed(claims[2:]):
        await loop.play(claim)
    assert [lease.group.slot for lease in loop.take(2)] == [1, 2]
    for claim in claims[:2]:
        await loop.play(claim)
    (lease, other) = loop.take(2)
    assert (lease.group.slot, other.group.slot) == (0, 3)
    assert lease.group.task_id == claims[0].task.task_id
    assert lease.fence == loop.fence
    assert [t.episode.attempt for t in lease.group.trajectories] == [0, 1]


async def test_take_waits_with_a_sentence_and_wakes_up(start: Callable[..., Any]) -> None:
    """A take that waits is woken by the close that completes its batch, and does not look only
    twice a second."""
    loop = await start(num_tasks=40)
    sentences: list[str] = []
    is_waiting = threading.Event()

    def on_wait(sentence: str) -> None:
        sentences.append(sentence)
        is_waiting.set()

    def take(version: int) -> float:
        leases = loop.reader.take(
            2,
            fence=loop.fence,
            policy_version=version,
            timeout_s=20.0,
            on_wait=on_wait,
            should_stop=lambda: False,
        )
        taken_at = time.monotonic()
        assert len(leases) == 2
        loop.train(leases, version + 1)
        return taken_at

    delays: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        for version in range(NUM_WAKES):
            *claims, last = (await loop.claim()).claims
            for claim in claims:
                await loop.play(claim, version=version)
            is_waiting.clear()
            taking = pool.submit(take, version)
            # Its wait has just begun, so without the close it would last for half a second.
            assert await asyncio.to_thread(is_waiting.wait, 20)
            await loop.play(last, version=version)
            closed_at = time.monotonic()
            delays.append(await asyncio.wrap_future(taking) - closed_at)
    # A busy machine may hold up one of them.
    assert min(delays) < 0.25, delays
    assert all("ready groups" in sentence for sentence in sentences)


@pytest.mark.medium
async def test_take_ends_at_its_deadline_or_when_asked_to_stop(start: Callable[..., Any]) -> None:
    """The deadline names who is waited for; should_stop gives an empty answer."""
    loop = await start()
    await loop.play((await loop.claim(1)).claims[0])
    began = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"ready groups 0/2, 1 open, 0 attempts .* for the runners"
    ):
        loop.take(timeout_s=0.3)
    assert 0.25 < time.monotonic() - began < 2
    leases = loop.reader.take(
        2,
        fence=loop.fence,
        policy_version=0,
        timeout_s=9.0,
        on_wait=lambda sentence: None,
        should_stop=lambda: True,
    )
    assert leases == []


async def test_a_stale_group_is_repaired(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Only the attempts whose oldest trained token is too old are played again, at the publish that
    makes them so; the group keeps its slot and the others."""
    loop = await start(buffer__max_staleness=1, buffer__group_size=2, trainer__groups_per_step=1)
    first, second, third, fourth = (await loop.claim()).claims
    oldest = await loop.open(first)
    await loop.writer.append_turn(make_turn(oldest, version=0))
    early = await loop.open(third)
    await loop.writer.append_turn(make_turn(early, 0, version=0, trained=False))
    loop.publish(1, 0)
    await loop.play(second, version=1)
    await loop.close(oldest)
    await loop.writer.append_turn(make_turn(early, 1, parent=0, version=1))
    await loop.close(early)
    await loop.play(fourth, version=1)
    assert loop.reader.stats()["buffer/ready_groups"] == 2
    loop.publish(2, 1)
    stats = loop.reader.stats()
    assert (stats["buffer/ready_groups"], stats["buffer/reopened_groups"]) == (1, 1)
    assert (stats["buffer/replaced/stale"], stats["buffer/dropped/stale"]) == (1, 0)
    (again,) = (await loop.claim()).claims
    assert (again.group_id, again.attempt, again.task) == (first.group_id, 2, first.task)
    await loop.play(again, version=2)
    leases = [loop.take(1, version=2)[0], loop.take(1, version=2)[0]]
    assert [lease.group.slot for lease in leases] == [0, 1]
    assert [t.episode.attempt for t in leases[0].group.trajectories] == [1, 2]
    loop.reader.ledger().check()


async def test_doomed_attempts_end_at_the_publish(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """In flight, or waiting to be resumed, with a first turn that is too old: not played on. One
    without turns goes on, and is looked at when it is scored."""
    loop = await start(buffer__max_staleness=1, buffer__group_size=4, trainer__groups_per_step=1)
    claims = (await loop.claim(4)).claims
    doomed, lost, silent, fine = [await loop.open(claim) for claim in claims]
    for episode_id in (doomed, lost):
        await loop.writer.append_turn(make_turn(episode_id, version=0))
    await loop.close(lost, None, failure_kind="infrastructure", outcome="failed")
    loop.publish(1, 0)
    await loop.writer.append_turn(make_turn(fine, version=1))
    loop.publish(2, 1)
    with pytest.raises(Gone, match="replaced"):
        await loop.writer.append_turn(make_turn(doomed, 1, parent=0, version=2))
    assert loop.reader.stats()["buffer/replaced/stale"] == 2
    await loop.writer.append_turn(make_turn(silent, version=0))
    assert not (await loop.close(silent)).counted
    assert (await loop.close(fine)).counted
    assert loop.reader.stats()["buffer/replaced/stale"] == 3
    again = (await loop.claim(3)).claims
    assert {claim.group_id for claim in again} == {claims[0].group_id}
    for claim in again:
        assert claim.resumes is None
        await loop.play(claim, version=2)
    (lease,) = loop.take(1, version=2)
    assert {t.turns[0].version_spans[0].policy_version for t in lease.group.trajectories} == {1, 2}
    loop.reader.ledger().check()


@pytest.mark.medium
async def test_a_group_without_turns_is_never_stale(start: Callable[..., Any]) -> None:
    """Zero-turn episodes count in statistics and hold no tokens that could be old."""
    loop = await start()
    for claim in (await loop.claim()).claims:
        await loop.close(await loop.open(claim), 0.0)
    leases = loop.take(2, version=7)
    assert [len(t.turns) for lease in leases for t in lease.group.trajectories] == [0] * 4


async def test_only_the_newest_fence_counts(start: Callable[..., Any]) -> None:
    """Another trainer gets the leases; the first one changes nothing any more."""
    loop = await start()
    await loop.play_all()
    leases = loop.take()
    mark = loop.train(leases[:1], 1)
    other = loop.reader.acquire_fence()
    old = loop.fence
    group_id = leases[1].group.group_id
    for call in (
        lambda: loop.take(),
        lambda: loop.reader.renew(old),
        lambda: loop.reader.drop(group_id, "failed", fence=old),
        lambda: loop.reader.mark_trained([group_id], fence=old, policy_version=1),
        lambda: loop.reader.acknowledge(mark),
        lambda: loop.reader.recover(None, fence=old),
    ):
        with pytest.raises(FenceExpired, match=f"fence={old}"):
            call()
    loop.fence = other
    assert [lease.group.group_id for lease in loop.take(1)] == [group_id]


async def test_leases_expire_unless_renewed(start: Callable[..., Any], clock: Any) -> None:
    """A trainer that sends no heartbeat for lease_s loses its leases, and cannot acknowledge."""
    loop = await start(buffer__lease_s=60)
    await loop.play_all()
    leases = loop.take()
    assert leases[0].deadline == pytest.approx(clock() + 60)
    for _ in range(3):
        clock.advance(50)
        loop.reader.renew(loop.fence)
    clock.advance(61)
    with pytest.raises(FenceExpired, match="expired unrenewed"):
        loop.reader.acknowledge(loop.mark(leases, 1))
    with pytest.raises(FenceExpired):
        loop.reader.renew(loop.fence)
    loop.fence = loop.reader.acquire_fence()
    assert [lease.group.slot for lease in loop.take()] == [0, 1]
    assert loop.reader.stats()["buffer/expired_leases"] == 1


async def test_acknowledging_is_all_or_nothing_and_idempotent(
    start: Callable[..., Any],
) -> None:
    """A mark with a lost group acknowledges none of its groups; a repeated mark changes nothing."""
    loop = await start()
    await loop.play_all()
    leases = loop.take()
    mark = loop.train(leases, 1)
    await loop.play_all(version=1)
    wrong = loop.mark([*leases], 1)
    wrong = type(wrong)(
        fence=wrong.fence, group_ids=(*wrong.group_ids, "g2-3"), next_slot=3, policy_version=1
    )
    with pytest.raises(FenceExpired, match="g2-3 is ready"):
        loop.reader.acknowledge(wrong)
    assert loop.reader.stats()["buffer/leased_groups"] == 2
    loop.reader.acknowledge(mark)
    loop.reader.acknowledge(mark)
    loop.reader.mark_trained(mark.group_ids, fence=loop.fence, policy_version=1)
    stats = loop.reader.stats()
    assert (stats["buffer/acknowledged_groups"], stats["buffer/trained_groups"]) == (2, 2)
    assert (await loop.claim()).reason == "admission"
    assert (await loop.writer.load_episode("g0-1-0")).turns == ()


async def test_marking_trained_twice_returns_the_credit_once(start: Callable[..., Any]) -> None:
    """The bound on groups in flight holds whatever is repeated."""
    loop = await start()
    await loop.play_all()
    leases = loop.take()
    loop.train(leases, 1)
    loop.train(leases, 2)
    loop.reader.acknowledge(loop.mark(leases, 2))
    assert len({c.group_id for c in (await loop.claim()).claims}) == 2


async def test_acknowledged_data_is_freed(start: Callable[..., Any]) -> None:
    """After a checkpoint only expiring hashes of its groups and episodes are left."""
    loop = await start()
    await loop.play_all()
    loop.reader.acknowledge(loop.train(loop.take(), 1))
    client = loop.reader.client
    names = client.scan_iter(match=f"{loop.reader.prefix}*", count=1000)
    own = [name for name in names if b"episode:" in name or b"group:" in name]
    assert own
    assert not [name for name in own if name.endswith((b":turns", b":episodes"))]
    assert all(client.pttl(name) > 0 for name in own)


async def test_a_damaged_group_is_dropped_and_the_next_one_taken(
    start: Callable[..., Any],
) -> None:
    """Rubbish in Redis costs its group, never the reader."""
    loop = await start(buffer__max_staleness=1)
    await loop.play_all()
    client = loop.reader.client
    client.lset(loop.reader.key("episode:g0-1-0:turns"), 0, b"\x02\x00rubbish")
    assert [lease.group.slot for lease in loop.take(2)] == [1, 2]
    assert loop.reader.stats()["buffer/dropped/malformed"] == 1


async def test_versions_are_never_reused(start: Callable[..., Any]) -> None:
    """Numbers grow; the same announcement twice is one."""
    loop = await start()
    loop.reader.announce_version(3, 0)
    loop.reader.announce_version(3, 0)
    for version, parent in ((3, None), (2, 0), (0, None)):
        with pytest.raises(Conflict, match="issued before"):
            loop.reader.announce_version(version, parent)
    with pytest.raises(Conflict, match="not announced"):
        loop.reader.acknowledge_version(4)
    state = await loop.writer.policy_state()
    assert (state.announced_version, state.acknowledged_version) == (3, 0)
    loop.reader.acknowledge_version(3)
    loop.reader.acknowledge_version(1)
    assert (await loop.writer.policy_state()).acknowledged_version == 3
    assert loop.reader.highest_version() == 3


async def test_the_last_versions_stay_on_record(start: Callable[..., Any]) -> None:
    """Ten thousand of them, with their parents; tokens of earlier ones are too old."""
    loop = await start()
    reader = loop.reader
    loop.publish(1, 0)
    loop.publish(2, 1)

    def on_record(name: str) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = reader.client.hgetall(reader.key(name))
        return found

    assert on_record("versions") == {b"0": b"0", b"1": b"1", b"2": b"2"}
    loop.publish(10_001, 2)
    assert on_record("versions") == {b"2": b"2", b"10001": b"3"}
    assert on_record("version_parents") == {b"2": b"1", b"10001": b"2"}
    reader.announce_version(10_001, 2)
    with pytest.raises(Conflict, match="issued before"):
        reader.announce_version(10_001, 1)
    loop.publish(30_000, 10_001)
    assert on_record("versions") == {b"30000": b"4"}
    assert on_record("version_parents") == {b"30000": b"10001"}
    (claim,) = (await loop.claim(1)).claims
    await loop.play(claim, version=1)
    claims = (await loop.claim()).claims
    assert [c.attempt for c in claims if c.group_id == claim.group_id] == [1, 2]


async def test_the_registry_shows_who_is_there(start: Callable[..., Any]) -> None:
    """Servers, parts and statuses are seen by both faces."""
    loop = await start()
    entry = ServerEntry(
        server_id="s0", url="http://a", kind="torch", policy_version=None, is_quarantined=False
    )
    loop.reader.registry.register_server(entry)
    assert loop.reader.registry.servers() == (entry,)
    loop.reader.registry.set_server_version("s0", 4, quarantined=True)
    (seen,) = (await loop.writer.policy_state()).servers
    assert (seen.policy_version, seen.is_quarantined) == (4, True)
    await loop.writer.register_part("router", {"url": "http://b"})
    loop.reader.registry.register_part("server-0", {"url": "http://a"})
    await loop.writer.report_status("router", {"episodes": "3"})
    loop.reader.registry.report_status("trainer", {"step": "1"})
    assert loop.reader.registry.parts() == {
        "router": {"url": "http://b"},
        "server-0": {"url": "http://a"},
    }
    assert loop.reader.registry.statuses() == {
        "router": {"episodes": "3"},
        "trainer": {"step": "1"},
    }
    loop.reader.set_run_state("finished")
    assert (await loop.writer.policy_state()).run_state == "finished"


@pytest.mark.medium
async def test_a_batch_larger_than_what_one_command_takes(start: Callable[..., Any]) -> None:
    """510 groups, some named twice, are taken in order, marked and acknowledged, each once."""
    loop = await start(
        buffer__group_size=1, trainer__groups_per_step=510, trainer__advantage="reinforce_pp"
    )
    claims = (await loop.claim(510)).claims
    openings = [loop.opening(claim) for claim in claims]
    await loop.writer.open_episodes(openings)
    for opening in openings:
        await loop.close(opening.episode_id)
    leases = loop.take(510)
    assert [lease.group.slot for lease in leases] == list(range(510))
    mark = loop.train([*leases, *leases[:7]], 1)
    loop.reader.acknowledge(mark)
    stats = loop.reader.stats()
    assert stats["buffer/trained_groups"] == stats["buffer/acknowledged_groups"] == 510
    assert stats["buffer/leased_groups"] == stats["buffer/ready_groups"] == 0
    assert len((await loop.claim(1000)).claims) == 510


@pytest.mark.parametrize(
    ("reason", "is_replayed"),
    [
        ("stale", True),
        ("no_signal", False),
        ("filtered", False),
        ("overlong", False),
        ("malformed", False),
        ("failed", False),
    ],
)
async def test_a_slot_is_played_again_where_its_group_was_dropped_for_its_age_alone(
    start: Callable[..., Any], reason: Any, is_replayed: bool
) -> None:
    """Its task loses nothing by what the trainer's pace did; every other reason is of the group."""
    loop = await start()
    await loop.play_all()
    first, second = loop.take()
    loop.reader.drop(first.group.group_id, reason, fence=loop.fence)
    loop.train([second], 1)
    claims = (await loop.claim()).claims
    slots = {int(claim.group_id[1:].partition("-")[0]) for claim in claims}
    assert slots == ({0, 2} if is_replayed else {2, 3})


@pytest.mark.parametrize("versions", [(0, 1), (1, 0), (1, 0, 1), (0, 1, 1)])
async def test_an_episode_is_as_old_as_its_oldest_turn(
    start: Callable[..., Any], make_turn: Callable[..., Turn], versions: tuple[int, ...]
) -> None:
    """In whichever order its turns were recorded: it is played again when that is too old, and
    trained while it is not."""
    loop = await start(buffer__max_staleness=1, buffer__group_size=2, trainer__groups_per_step=1)
    mixed, newer = (await loop.claim(2)).claims
    loop.publish(1, 0)
    episode_id = await loop.open(mixed)
    for index, version in enumerate(versions):
        parent = index - 1 if index else None
        await loop.writer.append_turn(make_turn(episode_id, index, parent=parent, version=version))
    assert (await loop.close(episode_id)).counted
    await loop.play(newer, version=1)
    assert loop.reader.stats()["buffer/ready_groups"] == 1
    loop.publish(2, 1)
    stats = loop.reader.stats()
    assert (stats["buffer/ready_groups"], stats["buffer/replaced/stale"]) == (0, 1)
    again = (await loop.claim(1)).claims[0]
    assert (again.group_id, again.attempt) == (mixed.group_id, 2)
