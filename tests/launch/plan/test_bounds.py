"""The bounds of a run against cases that are solved by hand, and against samples."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from outloop.engine.launch.plan.bounds import Loop, Servers, binding, least_step_s
from outloop.engine.launch.plan.lengths import Lengths, Part

TAIL = Lengths.mixture(
    [
        Part(share=0.4, low=0.05, high=0.3),
        Part(share=0.5, low=0.3, high=3.0),
        Part(share=0.1, low=3.0, high=30.0, median=11.0, sigma=0.7),
    ]
)
"""40% short, 50% medium, 10% long."""


def loop(seconds: Lengths | float, **more: object) -> Loop:
    """A step of two groups of two; an update takes a second, nothing else takes time."""
    lengths = seconds if isinstance(seconds, Lengths) else Lengths.constant(seconds)
    defaults: dict[str, object] = {
        "group_size": 2,
        "groups_per_step": 2,
        "max_staleness": 0,
        "slots": 1000,
        "update_s": 1.0,
        "publish_s": 0.0,
        "tokens": Lengths.constant(0.0),
        "servers": None,
    }
    return Loop(seconds=lengths, **(defaults | more))  # type: ignore[arg-type]


def test_a_synchronous_step_is_its_longest_episode_its_update_and_its_publish() -> None:
    """5 s of episodes, 1 s of update, half a second of publish."""
    found = least_step_s(loop(TAIL, publish_s=0.5))
    assert found["longest episode"] == pytest.approx(TAIL.mean_of_max(2, 2) + 1.5)
    assert binding(loop(5.0, publish_s=0.5))[1] == pytest.approx(3600 / 6.5)


@pytest.mark.parametrize(("age", "seconds"), [(1, 3.0), (2, 2.0), (5, 1.0), (9, 1.0)])
def test_staleness_divides_the_wait_until_the_trainer_binds(age: int, seconds: float) -> None:
    """A group of 5 s and an update of 1 s: 6 / (age + 1) seconds, and at least the update."""
    assert 3600 / binding(loop(5.0, max_staleness=age))[1] == pytest.approx(seconds)


def test_slots_limit_episodes() -> None:
    """Four episodes of 5 s in two slots take 10 s."""
    assert least_step_s(loop(5.0, slots=2))["slots"] == pytest.approx(10.0)


def test_servers_limit_tokens() -> None:
    """Four turns of 100 tokens on a server of 200 tokens a second take 2 s."""
    servers = Servers(count=1, tokens_per_s_alone=100, tokens_per_s=200, max_running=4)
    found = least_step_s(loop(0.0, servers=servers, tokens=Lengths.constant(100.0)))
    assert found["servers"] == pytest.approx(2.0)
    assert found["longest episode"] == pytest.approx(2.0)


def test_refills_take_more_groups() -> None:
    """Half of the groups without signal and two refills: 1 + 1/2 + 1/4 times as many."""
    assert loop(5.0, no_signal_share=0.5, max_refills=2).num_groups == pytest.approx(3.5)


def test_a_server_that_is_faster_together_than_its_turns_alone_is_refused() -> None:
    """Both speeds are measured on one server, or the plan is wrong."""
    with pytest.raises(ValidationError, match="at most 400 is possible"):
        Servers(count=1, tokens_per_s_alone=100, tokens_per_s=500, max_running=4)


@pytest.mark.parametrize(
    ("groups", "size", "by_task"), [(1, 8, 0.0), (4, 4, 0.5), (8, 2, 1.0), (16, 8, 0.3)]
)
def test_the_mean_of_a_maximum_is_that_of_samples(groups: int, size: int, by_task: float) -> None:
    """The closed form of the longest of all attempts against 20,000 batches."""
    rng = np.random.default_rng(0)
    count = 20_000
    own = rng.random((count, groups, size))
    task = rng.random((count, groups, 1))
    ranks = np.where(rng.random((count, groups, size)) < by_task, task, own)
    longest = TAIL.values[(ranks * len(TAIL.values)).astype(int)].max(axis=(1, 2))
    assert TAIL.mean_of_max(groups, size, by_task) == pytest.approx(longest.mean(), rel=0.02)


@settings(deadline=None, max_examples=50)
@given(age=st.integers(0, 6), size=st.integers(1, 8), groups=st.integers(1, 8))
def test_more_staleness_is_never_slower(age: int, size: int, groups: int) -> None:
    """For any batch under the tail."""
    one = loop(TAIL, group_size=size, groups_per_step=groups, max_staleness=age)
    assert binding(replace(one, max_staleness=age + 1))[1] >= binding(one)[1]
