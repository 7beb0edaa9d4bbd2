"""A server process killed (SIGKILL) before, during and after every phase of a publish."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.deadly_tap import MOMENTS, DeadlyTap
from fakes.lying_server import PATHS
from fakes.scored_source import source_of

PHASES = ["pause", "begin", "bucket", "end", "verify", "version", "continue"]
PATH_OF = PATHS | {"scramble": "/weights_checker", "probe": "/generate"}
SHORT_S = 10.0


@pytest.fixture
def tap() -> Iterator[Callable[..., DeadlyTap]]:
    """`tap(server, "end", "during")`: what kills the server there."""
    started: list[DeadlyTap] = []

    def start(server: Any, phase: str, moment: str, **options: Any) -> DeadlyTap:
        started.append(DeadlyTap(server, PATH_OF[phase], moment, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def check(
    server_process: Callable[..., Any],
    tap: Callable[..., DeadlyTap],
    make_publisher: Callable[..., Any],
    make_model: Callable[..., Path],
    registry: Any,
    greedy: Callable[[str], Any],
) -> Callable[..., None]:
    """`check("disk", "during", skip=1, transport="disk")`: a server dies there, beside another.

    The other holds the version within the deadlines; the dead one is never said to.
    """

    def run(
        phase: str, moment: str, *, skip: int = 0, dies_at_the_end: bool = False, **publish: Any
    ) -> None:
        good = server_process()
        registry.add("good", good.url)
        registry.add("victim", tap(server_process(), phase, moment, skip=skip).url)
        settings = {"bucket_mb": 0.05, "phase_timeout_s": SHORT_S, "fallback": "none"} | publish
        publisher, source = make_publisher(num_servers=2, **settings), source_of(make_model(seed=1))
        began_at = time.monotonic()
        report = publisher.publish(source, 1)
        assert time.monotonic() - began_at < 4 * SHORT_S
        assert report.quarantined == (() if dies_at_the_end else ("victim",))
        assert registry.state("good") == (1, False)
        assert publisher.publish(source, 2).quarantined == ()
        assert registry.state("good") == (2, False)
        assert registry.state("victim") == (None, True)
        assert greedy(good.url)["meta_info"]["weight_version"] == "2"

    return run


@pytest.mark.medium
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_death_in_any_phase_costs_only_the_dead(
    check: Callable[..., None], phase: str, moment: str
) -> None:
    """In shared memory; a bucket is the second, when both staging buffers are in use."""
    is_last = (phase, moment) == ("continue", "after")
    check(phase, moment, skip=phase == "bucket", dies_at_the_end=is_last)


@pytest.mark.medium
@pytest.mark.parametrize("phase", ["scramble", "probe"])
def test_a_death_around_a_probe_costs_only_the_dead(check: Callable[..., None], phase: str) -> None:
    """Filled at random and not fed yet, or fed and not verified: neither is ever served."""
    check(phase, "during", verify="probe")


@pytest.mark.medium
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("phase", ["join", "first_byte", "broadcast"])
def test_a_death_in_a_group_costs_only_the_dead(
    check: Callable[..., None], phase: str, moment: str
) -> None:
    """While joining or with the first byte, the group is made of the other; in the second bucket,
    or in the first, the other loads a folder."""
    is_broken = phase == "broadcast" or (phase, moment) == ("first_byte", "after")
    fallback = "disk" if is_broken else "none"
    skip = 2 if phase == "broadcast" else 0
    check(phase, moment, skip=skip, transport="collective", fallback=fallback)


@pytest.mark.medium
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_while_loading_from_disk_costs_only_the_dead(
    check: Callable[..., None], moment: str
) -> None:
    """The folder serves the other server all the same."""
    check("disk", moment, transport="disk")
