"""How many steps an hour a run cannot exceed, in closed form.

Owns: the bounds and their derivations. Invariant: with the demand of the groups that were trained,
no schedule is faster than `best`; with that of a distribution, none that drops nothing is, in the
long run.

With B groups of G episodes a step, D in flight for each step (`pipeline_depth` + 1), U the update
and P the publish:

* trainer: updates and publishes are made one after another, so a step takes at least U + P.
* servers: a step needs B G tokens-per-episode of work, and n servers give n R tokens a second.
* places: B G episodes of mean duration E[T] take B G E[T] seconds of places; there are M places.
* groups in flight (Little 1961, L = lambda W): a trained group holds its credit from its first
  attempt until its version is acknowledged, at least E[max of G] + U + P; at most D B credits are
  out, so lambda <= D B / (E[max of G] + U + P), and a step consumes B groups.
* longest episode: with D = 1 a batch starts after the last was published, and ends with the longest
  of its B G episodes: a step takes at least E[max of B G] + U + P.

Refills take more groups: with a share p of groups without signal and r refills, B (1 + p + .. +
p^r).
"""

from __future__ import annotations

from collections.abc import Mapping

from outloop.engine.launch.plan.simulate import Demand, Scenario


def demand_of(scenario: Scenario) -> Demand:
    """What an episode and a group take on average where no server is shared."""
    episodes, servers = scenario.episodes, scenario.servers
    alone = episodes.seconds
    if servers is not None:
        alone = alone.plus(episodes.tokens, servers.seconds_per_token(1.0))
    beside_s = episodes.overhead_s + episodes.lost_share * episodes.recovery_s
    return Demand(
        tokens=episodes.tokens.mean(),
        seconds=alone.mean() + beside_s,
        longest_s=episodes.overhead_s
        + alone.mean_of_max(1, scenario.rules.group_size, episodes.by_task),
    )


def steps_per_hour(scenario: Scenario, demand: Demand | None = None) -> Mapping[str, float]:
    """Every bound by its name; the smallest holds.

    Args:
        demand: what the trained groups took; None: the scenario's distributions.
    """
    demand = demand or demand_of(scenario)
    rules, servers = scenario.rules, scenario.servers
    serial_s = scenario.update_s + scenario.publish_s
    p, r = scenario.no_signal_share, scenario.max_refills
    taken = rules.groups_per_step * sum(p**i for i in range(r + 1))
    episodes = taken * rules.group_size
    least_s = {
        "trainer": serial_s,
        "places": episodes * demand.seconds / scenario.places,
        "groups in flight": taken * (demand.longest_s + serial_s) / rules.most_live,
    }
    if servers is not None:
        least_s["servers"] = episodes * demand.tokens / servers.capacity
    return {name: 3600.0 / seconds for name, seconds in least_s.items() if seconds > 0}


def synchronous_steps_per_hour(scenario: Scenario) -> float:
    """The bound of the longest episode, for one batch in flight; exact where nothing is shared."""
    episodes, servers = scenario.episodes, scenario.servers
    alone = episodes.seconds
    if servers is not None:
        alone = alone.plus(episodes.tokens, servers.seconds_per_token(1.0))
    rules = scenario.rules
    longest_s = episodes.overhead_s + alone.mean_of_max(
        rules.groups_per_step, rules.group_size, episodes.by_task
    )
    return 3600.0 / (longest_s + scenario.update_s + scenario.publish_s)


def best(scenario: Scenario) -> tuple[str, float]:
    """The name of the bound that holds, and its steps per hour."""
    bounds = dict(steps_per_hour(scenario))
    if scenario.rules.most_live <= scenario.rules.groups_per_step:
        bounds["longest episode"] = synchronous_steps_per_hour(scenario)
    name = min(bounds, key=lambda name: bounds[name])
    return name, bounds[name]
