"""A server process killed (SIGKILL) before, during and after every phase of a publish."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deadly_tap import MOMENTS, DeadlyTap
from lying_server import PATHS

from outloop.engine.publish.source import LocalTensors

PHASES = ["pause", "begin", "bucket", "end", "verify", "version", "continue"]
SHORT_S = 10.0


@pytest.fixture
def tap() -> Iterator[Callable[..., DeadlyTap]]:
    """`tap(server, "end", "during")`: what kills the server there."""
    started: list[DeadlyTap] = []

    def start(server: Any, phase: str, moment: str, **options: Any) -> DeadlyTap:
        started.append(DeadlyTap(server, PATHS[phase], moment, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def _check(
    transport: str,
    server_process: Callable[..., Any],
    victim_url: str,
    make_publisher: Callable[..., Any],
    registry: Any,
    tensors: dict[str, torch.Tensor],
    greedy: Callable[[str], Any],
    *,
    dies_at_the_end: bool = False,
) -> None:
    """The other server holds the version within the deadlines; the dead one is never said to."""
    good = server_process()
    registry.add("good", good.url)
    registry.add("victim", victim_url)
    publisher = make_publisher(
        num_servers=2,
        transport=transport,
        bucket_mb=0.05,
        phase_timeout_s=SHORT_S,
        fallback="none",
    )
    began_at = time.monotonic()
    report = publisher.publish(LocalTensors.of(tensors), 1)
    assert time.monotonic() - began_at < 4 * SHORT_S
    assert report.quarantined == (() if dies_at_the_end else ("victim",))
    assert registry.state("good") == (1, False)
    assert publisher.publish(LocalTensors.of(tensors), 2).quarantined == ()
    assert registry.state("good") == (2, False)
    assert registry.state("victim") == (None, True)
    assert greedy(good.url)["meta_info"]["weight_version"] == "2"


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_death_in_any_phase_costs_only_the_dead(
    server_process: Callable[..., Any],
    tap: Callable[..., DeadlyTap],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    greedy: Callable[[str], Any],
    phase: str,
    moment: str,
) -> None:
    """In shared memory; a bucket is the second, when both staging buffers are in use."""
    victim = tap(server_process(), phase, moment, skip=phase == "bucket")
    _check(
        "shared_memory",
        server_process,
        victim.url,
        make_publisher,
        registry,
        other_weights,
        greedy,
        dies_at_the_end=(phase, moment) == ("continue", "after"),
    )


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("phase", ["join", "broadcast"])
def test_a_death_in_a_group_costs_only_the_dead(
    server_process: Callable[..., Any],
    tap: Callable[..., DeadlyTap],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    greedy: Callable[[str], Any],
    phase: str,
    moment: str,
) -> None:
    """While joining, and in the second broadcast."""
    victim = tap(server_process(), phase, moment, skip=phase == "broadcast")
    _check(
        "collective",
        server_process,
        victim.url,
        make_publisher,
        registry,
        other_weights,
        greedy,
    )


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_while_loading_from_disk_costs_only_the_dead(
    server_process: Callable[..., Any],
    tap: Callable[..., DeadlyTap],
    make_publisher: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    greedy: Callable[[str], Any],
    moment: str,
) -> None:
    """The folder serves the other server all the same."""
    victim = tap(server_process(), "disk", moment)
    _check("disk", server_process, victim.url, make_publisher, registry, other_weights, greedy)
