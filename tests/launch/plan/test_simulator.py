"""The simulator against cases that are solved by hand, and against its bounds."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outloop.buffer.errors import SettingsError
from outloop.engine.launch.plan.admission import Rules
from outloop.engine.launch.plan.bounds import (
    best,
    demand_of,
    steps_per_hour,
    synchronous_steps_per_hour,
)
from outloop.engine.launch.plan.lengths import Lengths, Part
from outloop.engine.launch.plan.serving import Servers, Serving
from outloop.engine.launch.plan.simulate import Episodes, Scenario, simulate
from outloop.router.servers.packing import Packing

TAIL = Lengths.mixture(
    [
        Part(share=0.4, low=0.05, high=0.3),
        Part(share=0.5, low=0.3, high=3.0),
        Part(share=0.1, low=3.0, high=30.0, median=11.0, sigma=0.7),
    ]
)
"""40% short, 50% medium, 10% long."""


def scenario(
    seconds: Lengths | float,
    *,
    staleness: int = 0,
    depth: float | str | None = None,
    over_provision: float = 1.0,
    groups: int = 2,
    size: int = 2,
    tokens: float = 0.0,
    servers: Servers | None = None,
    by_task: float = 0.0,
    num_turns: int = 1,
    **more: object,
) -> Scenario:
    """A small run; an update takes a second, nothing else takes time."""
    rules = Rules(
        group_size=size,
        groups_per_step=groups,
        max_staleness=staleness,
        pipeline_depth=staleness if depth is None else depth,  # type: ignore[arg-type]
        over_provision=over_provision,
    )
    lengths = seconds if isinstance(seconds, Lengths) else Lengths.constant(seconds)
    defaults: dict[str, object] = {
        "places": 1000,
        "update_s": 1.0,
        "num_steps": 24,
        "num_warmup_steps": 4,
    }
    return Scenario(
        rules=rules,
        episodes=Episodes(
            seconds=lengths,
            tokens=Lengths.constant(tokens),
            by_task=by_task,
            num_turns=num_turns,
        ),
        servers=servers,
        **(defaults | more),  # type: ignore[arg-type]
    )


def test_a_synchronous_step_is_its_episodes_then_its_update_then_its_publish() -> None:
    """5 s of episodes, 1 s of update, half a second of publish; the trainer works 1.5 of 6.5 s."""
    found = simulate(scenario(5.0, publish_s=0.5, pause_s=0.5))
    assert found.seconds_per_step == pytest.approx(6.5)
    assert found.trainer_busy_share == pytest.approx(1.5 / 6.5)
    assert found.trainer_wait_share == pytest.approx(5.0 / 6.5)
    assert found.staleness == {0: 1.0}
    assert best(scenario(5.0, publish_s=0.5))[1] == pytest.approx(3600 / 6.5)


def test_a_batch_in_advance_hides_the_shorter_of_the_two() -> None:
    """One batch plays while the other trains: the longer of 5 s and 1 s, or of 5 s and 7 s."""
    assert simulate(scenario(5.0, staleness=1)).seconds_per_step == pytest.approx(3.0)
    found = simulate(scenario(5.0, staleness=1, update_s=7.0))
    assert found.seconds_per_step == pytest.approx(7.0)
    assert found.trainer_wait_share == pytest.approx(0.0)
    assert found.staleness == {1: 1.0}


def test_a_run_s_end_waits_for_what_is_slow() -> None:
    """The last batches have no others behind them, so the deeper the longer; a synchronous run's
    are like all the others."""
    for staleness, slower in ((0, False), (8, True)):
        long = scenario(TAIL, staleness=staleness, depth="auto", groups=4, size=4, num_steps=16)
        ending = simulate(replace(long, has_end=True))
        assert (ending.elapsed_s > 1.1 * simulate(long).elapsed_s) is slower
        assert ending.num_steps == 12


def test_concurrent_episodes_limit_what_depth_does_not() -> None:
    """Four episodes of 5 s on two places take 10 s, however many may be admitted."""
    found = simulate(scenario(5.0, staleness=4, places=2))
    assert found.seconds_per_step == pytest.approx(10.0, rel=0.1)
    assert steps_per_hour(scenario(5.0, staleness=4, places=2))["places"] == pytest.approx(360)


def test_a_full_server_gives_each_turn_its_share() -> None:
    """Alone 100 tokens/s, four together 200: four turns of 100 tokens take 2 s; then an update."""
    servers = Servers(count=1, tokens_per_s_alone=100.0, tokens_per_s=200.0, max_running=4)
    found = simulate(scenario(0.0, tokens=100.0, servers=servers))
    assert found.seconds_per_step == pytest.approx(3.0)
    assert found.server_share == pytest.approx(2.0 / 3.0)
    two = replace(servers, count=2)
    # Two turns on each: 1/100 + (4/200 - 1/100) / 3 s a token.
    assert simulate(scenario(0.0, tokens=100.0, servers=two)).seconds_per_step == pytest.approx(
        1.0 + 100 * (0.01 + 0.01 / 3)
    )


def test_turns_beyond_what_servers_run_wait_in_the_queue() -> None:
    """Four turns of 1 s on a server that runs one at a time end after 4 s."""
    servers = Servers(count=1, tokens_per_s_alone=100.0, tokens_per_s=100.0, max_running=1)
    found = simulate(scenario(0.0, tokens=100.0, servers=servers))
    assert found.seconds_per_step == pytest.approx(5.0)


def test_turns_on_few_servers_are_slower_and_leave_the_others_idle() -> None:
    """Two turns of 1 s: on two servers, or on one that gives each 100/1.5 tokens a second."""
    servers = Servers(count=2, tokens_per_s_alone=100.0, tokens_per_s=200.0, max_running=4)
    both = scenario(0.0, tokens=100.0, servers=servers, groups=1)
    spread = simulate(both)
    packed = simulate(replace(both, servers=replace(servers, packed=4)))
    assert spread.seconds_per_step == pytest.approx(2.0)
    assert spread.idle_server_share == pytest.approx(0.5)
    seconds = 100 * (0.01 + 0.01 / 3)
    assert packed.seconds_per_step == pytest.approx(1.0 + seconds)
    assert packed.idle_server_share == pytest.approx((1.0 + seconds / 2) / (1.0 + seconds))
    with pytest.raises(SettingsError, match="servers.packed=5"):
        replace(servers, packed=5)


def test_servers_that_are_left_are_free_while_the_last_episodes_go_on() -> None:
    """Nine episodes on four servers, of 1 s or of 10 s: one long one leaves three servers free
    either way; three such are on three servers, or packed on one."""
    servers = Servers(count=4, tokens_per_s_alone=1e6, tokens_per_s=1e6, max_running=4)

    def free(packed: int | None, num_long: int) -> float:
        seconds = Lengths.mixture(
            [
                Part(share=9 - num_long, low=1.0, high=1.0),
                Part(share=num_long, low=10.0, high=10.0),
            ]
        )
        one = scenario(0.0, tokens=1e-9, servers=replace(servers, packed=packed), groups=1, size=9)
        episodes = replace(one.episodes, seconds=seconds)
        ranks = (np.arange(9) + 0.5) / 9
        return simulate(
            replace(one, episodes=episodes, quantiles=lambda slot: ranks)
        ).free_server_share

    assert free(None, 1) == free(4, 1) == pytest.approx(0.9 * 0.75, abs=1e-6)
    assert free(None, 3) == pytest.approx(0.9 * 0.25, abs=1e-6)
    assert free(4, 3) == pytest.approx(0.9 * 0.75, abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(
    num_servers=st.integers(1, 64),
    most=st.integers(2, 64),
    numbers=st.lists(st.integers(0, 4000), min_size=1, max_size=40),
)
def test_turns_are_packed_as_the_router_packs_them(
    num_servers: int, most: int, numbers: list[int]
) -> None:
    """On as many servers, and as many of them move, as soon as the router has seen that no more
    episodes come."""
    serving = Serving(
        Servers(
            count=num_servers, tokens_per_s_alone=1.0, tokens_per_s=1.0, max_running=64, packed=most
        )
    )
    packing = Packing(turns_per_server=most, count_move=lambda: None)
    servers = [f"server-{number:02}" for number in range(num_servers)]
    for number in numbers:
        serving.keep(number)
        for _ in range(5):
            packing.observe(servers, number)
        assert serving.num_kept == (len(packing.kept) or num_servers)


def test_tasks_that_took_long_are_played_first() -> None:
    """Sixteen attempts on four places: a long one that starts last is waited for.

    What says nothing of a task changes nothing but chance.
    """
    by_slot = scenario(TAIL, groups=8, places=4, by_task=1.0, num_steps=40)
    long_first = replace(by_slot, rules=replace(by_slot.rules, task_order="longest_first"))
    before, after = simulate(by_slot), simulate(long_first)
    assert after.seconds_per_step < 0.97 * before.seconds_per_step
    assert before.rank_correlation > 0.999
    by_chance = replace(long_first.episodes, by_task=0.0)
    assert abs(simulate(replace(by_slot, episodes=by_chance)).rank_correlation) < 0.15


def test_servers_stand_still_while_weights_are_exchanged() -> None:
    """A turn of 10 s, an update and a publish of 1 s each, with and without a turn in flight.

    Synchronous: 10 + 1 + 1. With a batch in advance a turn lives from a publish until the next but
    one's take: two steps less update and publish, of which the pause between is lost too: 2 x - 2 -
    1 = 10.
    """
    servers = Servers(count=4, tokens_per_s_alone=1.0, tokens_per_s=1.0, max_running=1)
    shape = {"tokens": 10.0, "update_s": 1.0, "publish_s": 1.0, "pause_s": 1.0}
    alone = scenario(0.0, servers=servers, **shape)  # type: ignore[arg-type]
    assert simulate(alone).seconds_per_step == pytest.approx(12.0)
    ahead = scenario(0.0, staleness=1, servers=replace(servers, count=8), **shape)  # type: ignore[arg-type]
    assert simulate(ahead).seconds_per_step == pytest.approx(6.5)


def test_no_signal_costs_a_synchronous_run_another_wait() -> None:
    """A refill plays its groups from the start: two waits of 5 s where it comes to one."""
    none = simulate(scenario(5.0, no_signal_share=0.5, num_steps=400))
    refilled = simulate(scenario(5.0, no_signal_share=0.5, max_refills=1, num_steps=400))
    assert none.seconds_per_step == pytest.approx(6.0)
    # At least one of two groups is without signal in 3 of 4 steps.
    assert refilled.seconds_per_step == pytest.approx(6.0 + 0.75 * 5.0, rel=0.1)


@pytest.mark.parametrize(
    ("staleness", "seconds"), [(0, 25.3), (1, 12.7), (2, 8.7), (4, 5.3), (8, 3.1)]
)
def test_another_simulator_of_the_same_rules_found_the_same(staleness: int, seconds: float) -> None:
    """Steps of 8 groups of 8 under the tail, 0.1 s of latency, 0.3 s of update; nothing dropped."""
    one = scenario(TAIL, staleness=staleness, groups=8, size=8, update_s=0.3, num_steps=150)
    one = replace(one, episodes=replace(one.episodes, overhead_s=0.1), num_warmup_steps=10)
    found = simulate(one)
    assert found.seconds_per_step == pytest.approx(seconds, rel=0.06)
    assert found.discarded_time_share == 0.0
    assert found.slow_share_ratio == pytest.approx(1.0, abs=0.05)
    assert max(found.staleness) <= staleness


def test_the_controller_reaches_the_speed_of_the_age_limit_with_half_the_age() -> None:
    """Depth "auto" against the whole depth that four publishes of age allow."""
    shape = {"staleness": 4, "groups": 8, "size": 8, "update_s": 0.3, "num_steps": 200}
    whole = simulate(scenario(TAIL, **shape))  # type: ignore[arg-type]
    auto = simulate(scenario(TAIL, depth="auto", **shape))  # type: ignore[arg-type]
    assert auto.steps_per_hour > 0.95 * whole.steps_per_hour
    assert auto.staleness_mean < 0.7 * whole.staleness_mean


def test_what_is_started_beyond_a_batch_goes_on_into_the_next() -> None:
    """Over-provision at staleness 0: faster, one publish old at most, and nothing is lost."""
    shape = {"groups": 8, "size": 8, "update_s": 0.3, "num_steps": 100}
    plain = simulate(scenario(TAIL, **shape))  # type: ignore[arg-type]
    partial = simulate(scenario(TAIL, over_provision=1.5, **shape))  # type: ignore[arg-type]
    assert partial.steps_per_hour > 1.25 * plain.steps_per_hour
    assert max(partial.staleness) == 1
    assert partial.discarded_time_share == 0.0


def test_more_depth_and_more_age_are_never_slower() -> None:
    """Steps per hour over staleness, with the depth it allows."""
    speeds = [
        simulate(scenario(TAIL, staleness=k, groups=4, size=4, num_steps=60)).steps_per_hour
        for k in (0, 1, 2, 4)
    ]
    assert all(slower < faster for slower, faster in pairwise(speeds))


def test_a_simulation_is_a_pure_function() -> None:
    """Twice the same is the same; another seed is another."""
    one = scenario(TAIL, staleness=1)
    assert simulate(one) == simulate(one)
    assert simulate(one) != simulate(replace(one, seed=1))


@settings(deadline=None, max_examples=50)
@given(
    staleness=st.integers(0, 3),
    over_provision=st.sampled_from([1.0, 1.5]),
    groups=st.integers(1, 4),
    size=st.integers(1, 4),
    places=st.integers(1, 40),
    update_s=st.floats(0.01, 20.0),
    publish_s=st.floats(0.0, 5.0),
    tokens=st.floats(0.0, 300.0),
    by_task=st.floats(0.0, 1.0),
    num_turns=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_no_run_is_faster_than_the_bounds_of_what_it_trained(
    staleness: int, over_provision: float, places: int, tokens: float, **more: object
) -> None:
    """The closed form, with the demand of exactly the trained groups; without a warm-up."""
    servers = Servers(count=2, tokens_per_s_alone=50.0, tokens_per_s=120.0, max_running=4)
    one = scenario(
        TAIL,
        staleness=staleness,
        over_provision=over_provision,
        places=places,
        tokens=tokens,
        servers=servers,
        num_steps=12,
        num_warmup_steps=0,
        **more,  # type: ignore[arg-type]
    )
    found = simulate(one)
    assert found.num_steps == 12
    assert max(found.staleness) <= one.rules.max_age
    for name, bound in steps_per_hour(one, found.demand).items():
        assert found.steps_per_hour <= bound * (1 + 1e-9), name


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_in_the_long_run_no_run_is_faster_than_the_bounds_of_its_distributions(
    staleness: int,
) -> None:
    """With the distribution's moments in place of the sample's; 4% are left to chance."""
    one = scenario(TAIL, staleness=staleness, groups=8, size=4, num_steps=500)
    assert simulate(one).steps_per_hour <= 1.04 * best(one)[1]


def test_the_bound_of_the_longest_episode_is_what_a_synchronous_run_reaches() -> None:
    """With places and servers for all, nothing else takes time."""
    one = scenario(TAIL, groups=8, size=4, num_steps=500)
    assert simulate(one).steps_per_hour == pytest.approx(synchronous_steps_per_hour(one), rel=0.04)


@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
def test_the_estimate_by_age_is_near_the_simulator(staleness: int) -> None:
    """E[max of a batch] / (k + 1) of the docs."""
    one = scenario(TAIL, staleness=staleness, groups=8, size=8, update_s=0.3, num_steps=120)
    by_age = synchronous_steps_per_hour(one) * (staleness + 1)
    estimate = min(by_age, *steps_per_hour(one).values())
    assert estimate == pytest.approx(simulate(one).steps_per_hour, rel=0.2)


@settings(deadline=None, max_examples=30)
@given(
    groups=st.integers(1, 6), size=st.integers(1, 6), by_task=st.sampled_from([0.0, 0.3, 0.8, 1.0])
)
def test_the_mean_of_a_maximum_is_that_of_samples(groups: int, size: int, by_task: float) -> None:
    """The closed form of the longest of all attempts against 5,000 batches."""
    rng = np.random.default_rng(0)
    shape = (5_000, groups, size)
    task = np.broadcast_to(rng.random((5_000, groups, 1)), shape)
    ranks = np.where(rng.random(shape) < by_task, task, rng.random(shape))
    longest = TAIL.at(ranks).max(axis=(1, 2))
    assert TAIL.mean_of_max(groups, size, by_task) == pytest.approx(longest.mean(), rel=0.06)


def test_a_histogram_keeps_its_mean_and_its_shares() -> None:
    """Buckets of a ledger become a distribution."""
    found = Lengths.histogram({1.0: 40, 3.0: 50, 30.0: 10}, mean=3.0)
    assert found.mean() == pytest.approx(3.0)
    scale = found.values[-1] / 30.0
    assert (found.values > 3.0 * scale).mean() == pytest.approx(0.1, abs=1e-3)


def test_demand_counts_waits_turns_and_losses() -> None:
    """2 s of waiting, 100 tokens at 50 a second alone, and a tenth lost for 10 s."""
    servers = Servers(count=1, tokens_per_s_alone=50.0, tokens_per_s=120.0, max_running=4)
    one = scenario(2.0, tokens=100.0, servers=servers)
    one = replace(one, episodes=replace(one.episodes, lost_share=0.1, recovery_s=10.0))
    assert demand_of(one).seconds == pytest.approx(2.0 + 2.0 + 1.0)
    assert demand_of(one).longest_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"over_provision": 0.9}, "over_provision=0.9"),
        ({"staleness": 1, "over_provision": 3.0}, "over_provision=3 with"),
    ],
)
def test_limits_that_cannot_be_met_are_refused(change: dict[str, object], sentence: str) -> None:
    """One sentence that names the number."""
    with pytest.raises(SettingsError, match=sentence):
        scenario(1.0, **change)  # type: ignore[arg-type]


def test_a_server_that_is_faster_together_than_its_turns_alone_is_refused() -> None:
    """Both speeds are measured on one server, or the plan is wrong."""
    with pytest.raises(SettingsError, match="tokens_per_s=500"):
        Servers(count=1, tokens_per_s_alone=100.0, tokens_per_s=500.0, max_running=4)
