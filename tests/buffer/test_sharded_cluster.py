"""A run's turns on the three primaries of a real Redis Cluster, which are killed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.outages import play_while, until_accepted
from fakes.redis_servers import Cluster
from outloop.buffer.errors import BufferUnavailable, DeadlineExceeded
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.keys import hash_tag, prefix, shard_of, shard_tags
from outloop.buffer.run import Run
from outloop.buffer.writer import BufferWriter

NUM_SHARDS = 3


@pytest.fixture(params=[1])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """With so many nodes that own nothing yet."""
    found = Cluster(tmp_path / "cluster", num_spares=request.param)
    try:
        found.form()
        yield found
    finally:
        found.stop()


def run_on(cluster: Cluster, make_run: Callable[..., Run], **changes: Any) -> Run:
    """A run of three shards."""
    options = {"buffer__redis_url": cluster.url, "buffer__shards": NUM_SHARDS}
    return make_run(cluster.url, **options, buffer__max_outage_s=60, **changes)


def shard_owners(cluster: Cluster, run: Run) -> list[int]:
    """The port of the primary of each shard."""
    return [cluster.owner_of(tag) for tag in shard_tags(run.run_id, NUM_SHARDS)]


@pytest.mark.parametrize("cluster", [6], indirect=True)
@pytest.mark.parametrize("victim", ["shard", "run"])
async def test_nothing_acknowledged_is_lost_when_a_primary_is_killed(
    cluster: Cluster,
    make_run: Callable[..., Run],
    loop_of: Callable[..., Any],
    make_turn: Callable[..., Any],
    victim: str,
) -> None:
    """Turns are recorded without a pause while the primary of their shard dies, or that of the run;
    each is there once afterwards, and nothing was played again. Every primary has two replicas, of
    which one is left to the next."""
    run = run_on(cluster, make_run, buffer__min_replicas=1, buffer__group_size=8)
    cluster.replicate_all()
    owners = shard_owners(cluster, run)
    assert sorted(owners) == sorted(cluster.primaries)
    of_run = cluster.owner_of(hash_tag(run.run_id))
    writer = await BufferWriter.connect(run)
    reader = BufferReader.connect_patiently(run)
    loop = loop_of(writer, reader)
    await until_accepted(loop.start)

    def kill() -> None:
        if victim == "run":
            cluster.kill(of_run)
            return
        groups = cluster.ask(of_run, "ZRANGE", f"{prefix(run.run_id)}open", 0, -1)
        used = {owners[shard_of(group.decode(), NUM_SHARDS) - 1] for group in groups}
        cluster.kill((used - {of_run} or used).pop())

    await play_while(loop, make_turn, kill, timeout_s=90)
    assert reader.stats()["buffer/dropped_groups"] == 0
    reader.close()
    await writer.close()


async def test_a_turn_that_no_replica_of_its_shard_has_is_not_acknowledged(
    cluster: Cluster,
    make_run: Callable[..., Run],
    loop_of: Callable[..., Any],
    make_turn: Callable[..., Any],
) -> None:
    """The run's primary has a replica, the others have none. What has one is accepted sooner or
    later: a replica that lags for a second has nothing acknowledged meanwhile."""
    run = run_on(cluster, make_run, buffer__min_replicas=1, trainer__groups_per_step=8)
    of_run = cluster.owner_of(hash_tag(run.run_id))
    cluster.replicate(of_run)
    loop = loop_of(await BufferWriter.connect(run), BufferReader.connect_patiently(run))
    await until_accepted(lambda: loop.start(20))
    owners = shard_owners(cluster, run)
    refused = []
    claimed, _ = await until_accepted(lambda: loop.writer.claim(key="k", count=16, runner_id=""))
    for claim in claimed.claims:
        episode_id, _ = await until_accepted(lambda claim=claim: loop.open(claim))
        has_replica = owners[shard_of(claim.group_id, NUM_SHARDS) - 1] == of_run
        refused.append(not has_replica)
        if has_replica:
            turn = make_turn(episode_id)
            await until_accepted(lambda turn=turn: loop.writer.append_turn(turn))
            continue
        with pytest.raises(BufferUnavailable, match="not enough good replicas"):
            await loop.writer.append_turn(make_turn(episode_id))
        assert await loop.writer.count_turns(episode_id) == 0
    assert set(refused) == {True, False}
    loop.reader.close()
    await loop.writer.close()


@pytest.mark.parametrize("cluster", [0], indirect=True)
async def test_what_a_shard_lost_is_played_again(
    cluster: Cluster, make_run: Callable[..., Run], loop_of: Callable[..., Any]
) -> None:
    """A shard's primary comes back empty. Groups that are whole are trained, the others are played
    again, each slot once; no part of a group is trained, and none is a dead letter."""
    run = run_on(cluster, make_run, buffer__max_staleness=3, buffer__pipeline_depth=3)
    owners = shard_owners(cluster, run)
    of_run = cluster.owner_of(hash_tag(run.run_id))
    loop = loop_of(await BufferWriter.connect(run), BufferReader.connect_patiently(run))
    await loop.start()
    claims = await loop.play_all()
    groups = {claim.group_id: claim.task.task_id for claim in claims}
    on_shard = {group: owners[shard_of(group, NUM_SHARDS) - 1] for group in groups}
    victim = next(port for port in on_shard.values() if port != of_run)
    lost = {group for group, port in on_shard.items() if port == victim}
    assert 0 < len(lost) < len(groups) == 8
    cluster.kill(victim)
    cluster.start_again(victim)
    cluster.wait_until_whole(victim)
    with pytest.raises(DeadlineExceeded, match=f"ready groups {8 - len(lost)}/8"):
        loop.take(8)
    stats = loop.reader.stats()
    assert stats["buffer/dropped/lost"] == stats["buffer/dropped_groups"] == len(lost)
    assert stats["buffer/dead_letters"] == 0
    again, _ = await until_accepted(loop.play_all)
    assert {claim.task.task_id for claim in again} == {groups[group] for group in lost}
    leases = loop.take(8, timeout_s=30)
    assert sorted(lease.group.task_id for lease in leases) == sorted(groups.values())
    assert not lost & {lease.group.group_id for lease in leases}
    assert all(len(t.turns) == 1 for lease in leases for t in lease.group.trajectories)
    loop.reader.acknowledge(loop.train(leases, 1))
    assert not any(cluster.ask(port, "KEYS", "*:bytes:*") for port in cluster.primaries)
    loop.reader.ledger().check()
    loop.reader.close()
    await loop.writer.close()
