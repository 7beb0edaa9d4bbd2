"""A run on a Redis Cluster whose primary is killed."""

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
from outloop.buffer.redis.keys import hash_tag
from outloop.buffer.run import load_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
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


@pytest.mark.slow
def test_a_run_goes_on_when_its_primary_is_killed(
    workspace: Path,
    write_config: Callable[..., Path],
    allow: Callable[..., None],
    cluster: Cluster,
) -> None:
    """No part ends, and each step is made once."""
    write_config(steps=NUM_STEPS, held_s=200, redis_url=cluster.url, min_replicas=1)
    allow(1)
    folder = workspace / "runs/tiny"
    with training(workspace) as process:
        primary = cluster.owner_of(hash_tag(load_run(folder).run_id))
        allow(2)
        while not cluster.ask(primary, "KEYS", "*:turns"):
            assert process.poll() is None
            assert len(times_of_steps(folder)) < NUM_STEPS
            time.sleep(0.01)
        cluster.kill(primary)
        allow()
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "part_restarted" not in output
    assert_each_step_was_made_once(NUM_STEPS, folder)
    assert_nothing_is_left(workspace)
