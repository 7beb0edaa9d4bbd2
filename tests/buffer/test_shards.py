"""Turns on shards: each point at which a writer, a shard or whoever deletes may die."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from outloop.buffer.errors import (
    BufferUnavailable,
    Conflict,
    DeadlineExceeded,
    Gone,
    NotFound,
    SettingsError,
    TurnsLost,
)
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.keys import shard_of, shard_tags
from outloop.buffer.settings import build_settings

NUM_SHARDS = 3
on_shards = pytest.mark.parametrize("where", ["shards"], indirect=True)


def bytes_of(loop: Any) -> dict[str, list[bytes]]:
    """Episodes that a shard has turns of, and these."""
    run_id = loop.reader.run.run_id
    found = {}
    for tag in shard_tags(run_id, NUM_SHARDS):
        for name in loop.reader.client.scan_iter(f"{{{tag}}}:*"):
            episode_id = name.decode().rpartition(":")[2]
            found[episode_id] = list(loop.reader.client.hgetall(name).values())
    return found


def key_of(loop: Any, episode_id: str, group_id: str) -> str:
    """Of the turns of an episode."""
    number = shard_of(group_id, NUM_SHARDS)
    tag = shard_tags(loop.reader.run.run_id, NUM_SHARDS)[number - 1]
    return f"{{{tag}}}:bytes:{episode_id}"


def lose(loop: Any, episode_id: str, group_id: str) -> None:
    """The shard loses what it has of an episode."""
    assert loop.reader.client.delete(key_of(loop, episode_id, group_id))


@on_shards
async def test_turns_are_on_the_shard_of_their_group_until_a_checkpoint_has_them(
    start: Callable[..., Any], make_turn: Callable[..., Any]
) -> None:
    loop = await start(buffer__max_staleness=3, buffer__pipeline_depth=3)
    claims = await loop.play_all()
    stored = bytes_of(loop)
    assert set(stored) == {f"{claim.group_id}-{claim.attempt}" for claim in claims}
    for claim in claims:
        episode_id = f"{claim.group_id}-{claim.attempt}"
        assert loop.reader.client.exists(key_of(loop, episode_id, claim.group_id))
        (name,) = loop.reader.client.lrange(loop.reader.key(f"episode:{episode_id}:turns"), 0, -1)
        assert len(name) < 40 < len(stored[episode_id][0])
    assert len({shard_of(claim.group_id, NUM_SHARDS) for claim in claims}) > 1
    leases = loop.take(2)
    trained = {t.episode.episode_id for lease in leases for t in lease.group.trajectories}
    assert set(bytes_of(loop)) == set(stored)
    loop.reader.acknowledge(loop.train(leases, 1))
    assert set(bytes_of(loop)) == set(stored) - trained
    assert loop.reader.stats()["buffer/episodes_to_delete"] == 0


@on_shards
async def test_the_same_turn_is_stored_once_and_another_changes_nothing(
    start: Callable[..., Any], make_turn: Callable[..., Any]
) -> None:
    loop = await start()
    (claim,) = (await loop.claim(1)).claims
    episode_id = await loop.open(claim)
    for _ in range(2):
        assert (await loop.writer.append_turn(make_turn(episode_id))).num_turns == 1
    (before,) = bytes_of(loop)[episode_id]
    with pytest.raises(Conflict, match="another content"):
        await loop.writer.append_turn(make_turn(episode_id, num_output=9))
    assert before in bytes_of(loop)[episode_id]
    loaded = await loop.writer.load_episode(episode_id)
    assert [len(turn.output_ids) for turn in loaded.turns] == [4]
    with pytest.raises(NotFound, match="no episode_id=unknown"):
        await loop.writer.append_turn(make_turn("unknown"))


@on_shards
async def test_what_a_dead_writer_left_without_a_name_goes_with_its_episode(
    start: Callable[..., Any], make_turn: Callable[..., Any]
) -> None:
    """It wrote a turn and died before the run's primary had its name."""
    loop = await start()
    claims = (await loop.claim(4)).claims
    for claim in claims:
        episode_id = await loop.open(claim)
        key = key_of(loop, episode_id, claim.group_id)
        loop.reader.client.hset(key, "0" * 32, b"never named")
        await loop.writer.append_turn(make_turn(episode_id))
        await loop.close(episode_id)
    leases = loop.take(2)
    assert all(len(t.turns) == 1 for lease in leases for t in lease.group.trajectories)
    loop.reader.acknowledge(loop.train(leases, 1))
    assert bytes_of(loop) == {}


@on_shards
async def test_what_arrives_after_its_episode_was_deleted_is_deleted(
    start: Callable[..., Any], make_turn: Callable[..., Any]
) -> None:
    """By the refusal of its name; of a writer that died before, when a trainer starts."""
    loop = await start(env__max_resumptions=0)
    (claim,) = (await loop.claim(1)).claims
    episode_id = await loop.open(claim)
    await loop.writer.append_turn(make_turn(episode_id))
    await loop.close(episode_id, None, failure_kind="infrastructure", outcome="failed")
    assert bytes_of(loop) == {}
    # A turn that was recorded, and one that comes too late.
    await loop.writer.append_turn(make_turn(episode_id))
    with pytest.raises(Gone):
        await loop.writer.append_turn(make_turn(episode_id, 1, parent=0))
    assert set(bytes_of(loop)) == {episode_id}
    await loop.play_all()
    assert episode_id not in bytes_of(loop)
    # Nobody said that these are to be deleted; the run does not know the second one any more.
    for name in (episode_id, "ended-long-ago"):
        key = key_of(loop, name, claim.group_id)
        loop.reader.client.hset(key, "0" * 32, b"never named")
    loop.reader.recover(loop.mark([], 0), fence=loop.fence)
    assert episode_id in bytes_of(loop)
    assert "ended-long-ago" not in bytes_of(loop)


@on_shards
async def test_who_dies_while_deleting_leaves_the_rest_to_the_next(
    start: Callable[..., Any], clock: Callable[[], float]
) -> None:
    loop = await start()
    await loop.play_all()
    leases = loop.take(2)
    mark = loop.train(leases, 1)

    class Dying(redis.Redis):
        """Deletes nothing."""

        def unlink(self, *names: Any) -> Any:
            raise redis.ConnectionError("died")

    def connect(url: str) -> redis.Redis:
        return Dying.from_pool(connect_sync(url).connection_pool)

    dying = BufferReader.connect(loop.reader.run, clock=clock, connect_client=connect)
    with pytest.raises(BufferUnavailable, match="died"):
        dying.acknowledge(mark)
    dying.close()
    assert len(bytes_of(loop)) == 4
    assert loop.reader.stats()["buffer/episodes_to_delete"] == 4
    loop.reader.acknowledge(mark)
    assert bytes_of(loop) == {}


@on_shards
@pytest.mark.parametrize("num_lost", [1, 2])
async def test_a_group_whose_shard_lost_turns_is_played_again(
    start: Callable[..., Any], num_lost: int
) -> None:
    """Whole, once, with a reason of its own; no dead letter, and no part of it is trained."""
    loop = await start()
    claims = await loop.play_all()
    first = claims[0].group_id
    slots = {claim.group_id: claim.task.task_id for claim in claims}
    for attempt in range(num_lost):
        lose(loop, f"{first}-{attempt}", first)
    with pytest.raises(DeadlineExceeded, match="ready groups 1/2"):
        loop.take(2)
    stats = loop.reader.stats()
    assert stats["buffer/dropped/lost"] == 1
    assert stats["buffer/ledger/dropped/lost"] == 2
    assert stats["buffer/dropped/malformed"] == stats["buffer/dead_letters"] == 0
    assert stats["buffer/replaced_share"] == 0
    again = await loop.play_all()
    assert {claim.task.task_id for claim in again} == {slots[first]}
    taken = loop.take(2)
    assert sorted(lease.group.task_id for lease in taken) == sorted(slots.values())
    assert first not in {lease.group.group_id for lease in taken}
    loop.reader.acknowledge(loop.train(taken, 1))
    assert bytes_of(loop) == {}
    loop.reader.ledger().check()


@on_shards
async def test_an_episode_in_flight_that_lost_a_turn_is_given_up(
    start: Callable[..., Any], make_turn: Callable[..., Any]
) -> None:
    """It could not be trained whole."""
    loop = await start()
    (claim,) = (await loop.claim(1)).claims
    episode_id = await loop.open(claim)
    await loop.writer.append_turn(make_turn(episode_id))
    lose(loop, episode_id, claim.group_id)
    with pytest.raises(TurnsLost, match="lacks 1 of 1 turns"):
        await loop.writer.load_episode(episode_id)
    with pytest.raises(Gone):
        await loop.writer.append_turn(make_turn(episode_id, 1, parent=0))
    (again,) = (await loop.claim(1)).claims
    assert (again.group_id, again.attempt) != (claim.group_id, claim.attempt)
    assert again.group_id == claim.group_id


@on_shards
async def test_lost_turns_of_a_resumed_episode_are_generated_again(
    start: Callable[..., Any], make_turn: Callable[..., Any]
) -> None:
    loop = await start()
    (claim,) = (await loop.claim(1)).claims
    lost = await loop.open(claim)
    await loop.writer.append_turn(make_turn(lost))
    await loop.close(lost, None, failure_kind="infrastructure", outcome="failed")
    lose(loop, lost, claim.group_id)
    (claim,) = (await loop.claim(1)).claims
    assert claim.resumes == lost
    resumed = await loop.open(claim, "again")
    assert (await loop.writer.load_episode(resumed)).recorded == ()


def test_as_many_primaries_as_shards_have_one_each() -> None:
    """Each is in its part of the slots, and groups spread over all."""
    for number in (1, 3, 16):
        tags = shard_tags("math-00c0ffee", number)
        slots = [key_slot(tag.encode()) for tag in tags]
        assert [slot * number // 16384 for slot in slots] == list(range(number))
    per_shard = [0] * 3
    for slot in range(3000):
        per_shard[shard_of(f"g{slot}-{slot + 1}", 3) - 1] += 1
    assert min(per_shard) > 900
    assert shard_of("g0-1", 3) == shard_of("g0-1", 3)


@pytest.mark.parametrize("url", [None, "redis://localhost", "sentinel://localhost/main/0"])
def test_shards_are_for_a_cluster(tmp_path: Path, url: str | None) -> None:
    buffer = {"shards": 2} | ({} if url is None else {"redis_url": url})
    tree = {"model": {"path": str(tmp_path)}, "buffer": buffer}
    with pytest.raises(SettingsError, match="begin buffer.redis_url with redis"):
        build_settings(tree, source="test")
