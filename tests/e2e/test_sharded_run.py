"""A run whose turns are on the three primaries of a Redis Cluster, of which one is killed."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes.command_run import (
    assert_each_step_was_made_once,
    assert_nothing_is_left,
    times_of_steps,
    training,
)
from fakes.redis_servers import Cluster
from outloop.buffer.redis.keys import hash_tag, shard_tags
from outloop.buffer.run import load_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
NUM_SHARDS = 3
NUM_STEPS = 8


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Each primary has a replica for its place and another one for `buffer.min_replicas`."""
    found = Cluster(tmp_path_factory.mktemp("cluster"), num_spares=6)
    try:
        found.form()
        found.replicate_all()
        yield found
    finally:
        found.stop()


@pytest.mark.parametrize(
    "victim", ["of a shard", pytest.param("of the run", marks=pytest.mark.node)]
)
def test_a_run_on_shards_goes_on_when_a_primary_is_killed(
    workspace: Path,
    write_config: Callable[..., Path],
    allow: Callable[..., None],
    cluster: Cluster,
    victim: str,
) -> None:
    """While every primary holds turns. No part ends, and each step is made once."""
    on_cluster = {"redis_url": cluster.url, "shards": NUM_SHARDS, "min_replicas": 1}
    write_config(steps=NUM_STEPS, held_s=200, **on_cluster)
    allow(1)
    folder = workspace / "runs/tiny"
    with training(workspace) as process:
        run_id = load_run(folder).run_id
        of_run = cluster.owner_of(hash_tag(run_id))
        of_shards = [cluster.owner_of(tag) for tag in shard_tags(run_id, NUM_SHARDS)]
        assert sorted(of_shards) == sorted(cluster.primaries)
        allow(2)
        while not all(cluster.ask(port, "KEYS", "*:bytes:*") for port in of_shards):
            assert process.poll() is None
            assert len(times_of_steps(folder)) < NUM_STEPS
            time.sleep(0.01)
        cluster.kill(of_run if victim == "of the run" else (set(of_shards) - {of_run}).pop())
        allow()
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "part_restarted" not in output
    assert_each_step_was_made_once(NUM_STEPS, folder)
    assert_nothing_is_left(workspace)
