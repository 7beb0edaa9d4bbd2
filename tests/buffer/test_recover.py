"""Resuming from a checkpoint: what is trained again, what goes on, what was abandoned."""

from collections.abc import Callable
from typing import Any

import pytest

from outloop.buffer.errors import Conflict, Gone
from outloop.buffer.records import CheckpointMark, Turn


def _restart(loop: Any, mark: CheckpointMark | None) -> int:
    loop.fence = loop.reader.acquire_fence()
    highest = loop.reader.recover(mark, fence=loop.fence)
    loop.publish(highest + 1, None if mark is None else mark.policy_version)
    return highest + 1


async def test_a_first_start_has_nothing_to_recover(join: Callable[..., Any]) -> None:
    """No version was ever issued."""
    writer, reader = await join()
    assert reader.recover(None, fence=reader.acquire_fence()) == -1
    assert reader.highest_version() == -1
    await writer.close()


async def test_groups_trained_after_the_checkpoint_are_trained_again(
    start: Callable[..., Any],
) -> None:
    """Their tokens are of the surviving lineage, their update is lost: they are leased again."""
    loop = await start(buffer__max_staleness=1)
    await loop.play_all()
    first = loop.take()
    mark = loop.train(first, 1)
    loop.reader.acknowledge(mark)
    second = loop.take(version=1)
    loop.train(second, 2)
    version = _restart(loop, mark)
    assert version == 3
    again = loop.take(version=version)
    assert [lease.group.slot for lease in again] == [2, 3]
    assert [lease.group.group_id for lease in again] == [x.group.group_id for x in second]


async def test_groups_with_tokens_of_abandoned_versions_are_played_again(
    start: Callable[..., Any],
) -> None:
    """They are dropped as stale; their slots come first, under new group ids."""
    loop = await start()
    await loop.play_all()
    mark = loop.train(loop.take(), 1)
    loop.reader.acknowledge(mark)
    await loop.play_all(version=1)
    loop.train(loop.take(version=1), 2)
    await loop.play_all(version=2)
    version = _restart(loop, mark)
    assert (await loop.claim()).reason == "admission"
    leases = loop.take(version=version)
    assert [lease.group.slot for lease in leases] == [2, 3]
    loop.train(leases, version + 1)
    claims = await loop.play_all(version=version + 1)
    assert sorted({claim.group_id for claim in claims}) == ["g4-7", "g5-8"]
    assert loop.reader.stats()["buffer/dropped/stale"] == 2


async def test_no_group_with_an_abandoned_token_stays_where_there_is_room(
    start: Callable[..., Any],
) -> None:
    """Not the bound on admission but their versions decide."""
    loop = await start(buffer__max_staleness=3)
    mark = CheckpointMark(fence=loop.fence, group_ids=(), next_slot=0, policy_version=0)
    claims = (await loop.claim(4)).claims
    for claim in claims[:2]:
        await loop.play(claim)
    loop.publish(1, 0)
    await loop.play(claims[2], version=0)
    await loop.play(claims[3], version=1)
    version = _restart(loop, mark)
    (lease,) = loop.take(1, version=version)
    assert lease.group.slot == 0
    assert loop.reader.stats()["buffer/ready_groups"] == 0
    (claim,) = (await loop.claim(1)).claims
    assert claim.group_id == "g1-3"


async def test_open_groups_go_on_without_their_abandoned_attempts(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """Only attempts that hold abandoned tokens are replaced, at no cost to max_replacements."""
    loop = await start(
        buffer__group_size=3,
        buffer__max_staleness=1,
        buffer__pipeline_depth=0,
        trainer__groups_per_step=1,
        env__max_replacements=0,
    )
    await loop.play_all()
    mark = loop.train(loop.take(1), 1)
    loop.reader.acknowledge(mark)
    first, second, third = (await loop.claim()).claims
    await loop.play(first, version=1)
    running = await loop.open(second)
    await loop.writer.append_turn(make_turn(running, version=1))
    loop.publish(2, 1)
    abandoned = await loop.open(third)
    await loop.writer.append_turn(make_turn(abandoned, version=2))
    version = _restart(loop, mark)
    with pytest.raises(Gone, match="replaced"):
        await loop.writer.append_turn(make_turn(abandoned, 1, parent=0, version=version))
    (again,) = (await loop.claim()).claims
    assert (again.group_id, again.attempt) == (third.group_id, 3)
    await loop.play(again, version=version)
    await loop.close(running)
    (lease,) = loop.take(1, version=version)
    assert [t.episode.attempt for t in lease.group.trajectories] == [0, 1, 3]


async def test_a_turn_of_an_abandoned_version_is_refused(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """A server that still holds abandoned weights cannot reach the training data."""
    loop = await start()
    loop.publish(1, 0)
    (claim, *_) = (await loop.claim()).claims
    episode_id = await loop.open(claim)
    mark = CheckpointMark(fence=loop.fence, group_ids=(), next_slot=0, policy_version=0)
    version = _restart(loop, mark)
    assert version == 2
    with pytest.raises(Gone, match="a rollback abandoned"):
        await loop.writer.append_turn(make_turn(episode_id, version=1))
    again = [c for c in (await loop.claim()).claims if c.attempt == 2]
    assert [c.group_id for c in again] == [claim.group_id]
    with pytest.raises(Conflict, match="abandoned"):
        loop.reader.announce_version(3, 1)


async def test_groups_beyond_admission_are_played_later(start: Callable[..., Any]) -> None:
    """Groups that are untrained again and groups just started do not overfill a batch."""
    loop = await start()
    await loop.play_all()
    mark = loop.train(loop.take(), 1)
    loop.reader.acknowledge(mark)
    await loop.play_all(version=1)
    loop.train(loop.take(version=1), 2)
    started = (await loop.claim()).claims
    assert {claim.group_id for claim in started} == {"g4-5", "g5-6"}
    version = _restart(loop, mark)
    with pytest.raises(Gone):
        await loop.open(started[0])
    loop.train(loop.take(version=version), version + 1)
    assert {c.group_id for c in (await loop.claim()).claims} == {"g4-7", "g5-8"}


async def test_nothing_is_claimed_before_the_next_publish(start: Callable[..., Any]) -> None:
    """Between recover and the new version servers hold weights that nobody vouches for."""
    loop = await start()
    loop.fence = loop.reader.acquire_fence()
    assert loop.reader.recover(loop.mark([], 0), fence=loop.fence) == 0
    assert (await loop.claim()).reason == "not_ready"
    state = await loop.writer.policy_state()
    assert (state.announced_version, state.acknowledged_version) == (None, None)


async def test_an_unacknowledged_mark_is_acknowledged_by_recover(
    start: Callable[..., Any],
) -> None:
    """A crash between the checkpoint and its acknowledgement trains nothing twice."""
    loop = await start()
    await loop.play_all()
    mark = loop.train(loop.take(), 1)
    version = _restart(loop, mark)
    stats = loop.reader.stats()
    assert (stats["buffer/acknowledged_groups"], stats["buffer/leased_groups"]) == (2, 0)
    claims = await loop.play_all(version=version)
    assert {claim.group_id for claim in claims} == {"g2-3", "g3-4"}


async def test_an_older_checkpoint_plays_the_slots_of_later_marks_again(
    start: Callable[..., Any],
) -> None:
    """Groups acknowledged by an abandoned checkpoint are gone; their slots are not."""
    loop = await start()
    marks = []
    for version in (1, 2, 3):
        await loop.play_all(version=version - 1)
        marks.append(loop.train(loop.take(version=version - 1), version))
        loop.reader.acknowledge(marks[-1])
    version = _restart(loop, marks[0])
    assert version == 4
    slots = []
    for _ in range(3):
        await loop.play_all(version=version)
        leases = loop.take(version=version)
        slots += [lease.group.slot for lease in leases]
        version += 1
        loop.reader.acknowledge(loop.train(leases, version))
    assert slots == [2, 3, 4, 5, 6, 7]


async def test_slots_played_again_stay_one_group_each_after_another_crash(
    start: Callable[..., Any],
) -> None:
    """A second resume from the same older checkpoint does not play a slot beside itself."""
    loop = await start()
    marks = []
    for version in (1, 2):
        await loop.play_all(version=version - 1)
        marks.append(loop.train(loop.take(version=version - 1), version))
        loop.reader.acknowledge(marks[-1])
    _restart(loop, marks[0])
    first = (await loop.claim()).claims
    version = _restart(loop, marks[0])
    for claim in first:
        await loop.play(claim, version=version)
    leases = loop.take(version=version)
    assert [lease.group.slot for lease in leases] == [2, 3]
    loop.train(leases, version + 1)
    assert {claim.group_id[:2] for claim in (await loop.claim()).claims} == {"g4", "g5"}


async def test_without_a_checkpoint_everything_is_played_again(start: Callable[..., Any]) -> None:
    """The first slots come again; numbers of versions go on."""
    loop = await start()
    await loop.play_all()
    loop.train(loop.take(), 1)
    await loop.play_all(version=1)
    version = _restart(loop, None)
    assert version == 2
    await loop.play_all(version=2)
    assert [lease.group.slot for lease in loop.take(version=2)] == [0, 1]


async def test_a_checkpoint_outlives_the_data_of_redis(join: Callable[..., Any]) -> None:
    """On a fresh Redis the cursor and the numbers of versions go on from the mark."""
    writer, reader = await join()
    fence = reader.acquire_fence()
    mark = CheckpointMark(fence=99, group_ids=("g8-9",), next_slot=40, policy_version=12)
    assert reader.recover(mark, fence=fence) == 12
    assert reader.highest_version() == 12
    await writer.close()


async def test_recovering_twice_is_once(start: Callable[..., Any]) -> None:
    """A trainer that dies while recovering recovers again."""
    loop = await start()
    await loop.play_all()
    mark = loop.train(loop.take(), 1)
    await loop.play_all(version=1)
    for _ in range(2):
        loop.fence = loop.reader.acquire_fence()
        assert loop.reader.recover(mark, fence=loop.fence) == 1
    loop.publish(2, 1)
    assert (await loop.claim()).reason == "admission"
    assert [lease.group.slot for lease in loop.take(version=2)] == [2, 3]
