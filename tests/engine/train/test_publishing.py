"""Publishing beside training: a version's own weights for every server, and no failure is lost."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.bandit_run import FAST, NEW_SERVER, Setup
from outloop.buffer.errors import PublishFailed, RankKilled
from outloop.buffer.records import ServerEntry
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.train.debug.recorded_groups import NoPublish
from outloop.engine.train.publishing import PublishingBeside
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.ranks.copied_weights import CopiedWeights

WAIT_S = 20.0


class Registry:
    """Servers in memory."""

    def __init__(self) -> None:
        self.joined: tuple[ServerEntry, ...] = ()

    def servers(self) -> tuple[ServerEntry, ...]:
        """Those that wait for weights."""
        return self.joined

    def report_status(self, part: str, fields: dict[str, str]) -> None:
        """Nobody reads it."""


class GatedPublisher:
    """Reads the weights that it is given when it may, and keeps them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()
        self.failures = 0
        """How many publishes fail from now on."""
        self.published: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.has_published = threading.Semaphore(0)

    def wait_for_servers(self, on_wait: Callable[[str], None]) -> None:
        """They are there."""

    def take_devices(self, *, keeps_weights: bool = False, on_wait: Callable[[str], None]) -> None:
        """They have devices of their own."""

    def give_devices(self, source: TensorSource) -> None:
        """They have devices of their own."""

    def publish(
        self, source: TensorSource, policy_version: int, *, on_wait: Callable[[str], None]
    ) -> NoPublish:
        """Once it may."""
        self.has_begun.set()
        assert self.may_go_on.wait(WAIT_S)
        if self.failures:
            self.failures -= 1
            raise PublishFailed("no server took the weights")
        found = zip(source.specs, source.read(source.specs), strict=True)
        self.published.append((policy_version, {s.name: t.clone() for s, t in found}))
        self._registry.joined = ()
        self.has_published.release()
        return NoPublish()


Parts = tuple[PublishingBeside, GatedPublisher, Registry, RankController]


@pytest.fixture
def beside(
    tmp_path: Path, tiny_folder: Callable[..., Path], make_ranks: Callable[..., RankController]
) -> Iterator[Parts]:
    """What publishes beside training, with a publisher that waits to be let go on."""
    run = create_run(Settings(model={"path": tiny_folder()}), tmp_path / "run", "unix:///nowhere")
    ranks, registry = make_ranks(run, num_updates=1), Registry()
    publisher = GatedPublisher(registry)
    copy = CopiedWeights(ranks, is_probed=True)
    made = PublishingBeside(ranks, registry, publisher, lambda sentence: None, copy=copy)
    yield made, publisher, registry, ranks
    publisher.may_go_on.set()
    made.close()


def change(ranks: RankController) -> None:
    """An update of every weight."""
    with torch.no_grad():
        for parameter in ranks.worker.policy.model.parameters():
            parameter.add_(1.0)


def weights_of(ranks: RankController) -> dict[str, torch.Tensor]:
    """As the model has them now."""
    found = zip(ranks.specs, ranks.read(ranks.specs), strict=True)
    return {spec.name: tensor.clone() for spec, tensor in found}


def are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Name by name, every element."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.medium
def test_a_version_keeps_its_weights_while_the_model_is_trained_on(beside: Parts) -> None:
    """For the servers that are there, for one that joins after the next update, and for the probe;
    the next version waits for this one, and what follows a publish follows it alone."""
    publishing, publisher, registry, ranks = beside
    settled: list[int] = []
    before = weights_of(ranks)
    scores = ranks.score_prompts([range(5)])
    publishing.begin(1, lambda: settled.append(1))
    assert publisher.has_begun.wait(WAIT_S)
    change(ranks)
    assert publishing.report() is None
    assert settled == []
    publisher.may_go_on.set()
    assert publishing.finish() is not None
    assert settled == [1]
    assert not are_equal(before, weights_of(ranks))
    registry.joined = (NEW_SERVER,)
    for _ in range(2):
        assert publisher.has_published.acquire(timeout=WAIT_S)
    publishing.look_after_servers()
    assert [version for version, _ in publisher.published] == [1, 1]
    assert all(are_equal(weights, before) for _, weights in publisher.published)
    publishing.begin(2, lambda: settled.append(2))
    publishing.finish()
    assert are_equal(publisher.published[-1][1], weights_of(ranks))
    assert settled == [1, 2]
    assert len(scores) == 1


def test_a_publish_is_repeated_once_and_then_ends_the_run(beside: Parts) -> None:
    """As within the loop; nothing follows the one that failed, and a server that joined and could
    not be loaded is found wherever the trainer waits."""
    publishing, publisher, registry, _ = beside
    settled: list[int] = []
    publisher.may_go_on.set()
    publisher.failures = 1
    publishing.begin(1, lambda: settled.append(1))
    assert publishing.finish() is not None
    publisher.failures = 2
    publishing.begin(2, lambda: settled.append(2))
    with pytest.raises(PublishFailed, match="no server took"):
        publishing.finish()
    with pytest.raises(PublishFailed, match="no server took"):
        publishing.look_after_servers()
    assert settled == [1]
    assert not registry.joined


class LostRank:
    """The ranks, of which one is lost."""

    def __init__(self, ranks: RankController) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def look(self) -> None:
        """As rank 0's next message to that rank does."""
        raise RankKilled("trainer rank 1 is lost")


def test_a_rank_that_is_lost_is_found_while_the_publish_waits(beside: Parts) -> None:
    """Its thread may wait for that rank's answer for as long as trainer.rank_timeout_s."""
    _, publisher, registry, ranks = beside
    lost: Any = LostRank(ranks)
    copy = CopiedWeights(ranks, is_probed=True)
    publishing = PublishingBeside(lost, registry, publisher, lambda sentence: None, copy=copy)
    publishing.begin(1, lambda: None)
    with pytest.raises(RankKilled, match="rank 1 is lost"):
        publishing.finish()
    publisher.may_go_on.set()
    publishing.close()


def test_what_follows_a_publish_may_fail_too(beside: Parts) -> None:
    """A fence that is lost meanwhile is the trainer's failure, in its own thread."""
    publishing, publisher, _, _ = beside
    publisher.may_go_on.set()

    def lose() -> None:
        raise ConnectionError("lost")

    publishing.begin(1, lose)
    with pytest.raises(ConnectionError, match="lost"):
        publishing.finish()


@pytest.mark.medium
def test_the_next_step_begins_while_servers_load(setup: Callable[..., Setup]) -> None:
    """The server takes version 2 only when the trainer asks for the groups of step 3, which within
    the loop it never would; and every step has its row, in order."""
    made = setup(
        trainer=FAST | {"num_steps": 4},
        buffer={"max_staleness": 2, "pipeline_depth": 2},
        publish={"overlaps_training": True},
    )
    has_taken = threading.Event()

    def note() -> None:
        if made.buffer.num_takes > 2:
            has_taken.set()

    def load(source: Any, policy_version: int, **named: Any) -> Any:
        if policy_version == 2:
            assert has_taken.wait(WAIT_S)
        return publish(source, policy_version, **named)

    made.buffer.on_take = note
    publish, made.server.publish = made.server.publish, load
    rows = made.train()
    assert has_taken.is_set()
    assert [row["train/policy_version"] for row in rows] == [1, 2, 3, 4]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["train/staleness_max"] for row in rows) <= 2


@pytest.mark.medium
def test_a_failed_publish_beside_training_ends_the_run(setup: Callable[..., Setup]) -> None:
    """While groups are awaited, which are not played any more."""
    made = setup(
        trainer=FAST | {"num_steps": 4},
        buffer={"max_staleness": 1},
        publish={"overlaps_training": True},
    )

    def load(source: Any, policy_version: int, **named: Any) -> Any:
        if policy_version == 2:
            raise PublishFailed("no server took the weights")
        return publish(source, policy_version, **named)

    publish, made.server.publish = made.server.publish, load
    with pytest.raises(PublishFailed, match="no server took"):
        made.train()
    assert [value for kind, value in made.events if kind == "acknowledge"] == [0, 1]
