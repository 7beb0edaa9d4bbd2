"""What a plan says: tables.

Owns: which figures stand beside each other, and their units. Does not own: how they are
printed (cli, docs/generate.py). Invariant: every table is made from a plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from outloop.buffer.settings import Settings
from outloop.engine.launch.plan.admission import Rules
from outloop.engine.launch.plan.bounds import best
from outloop.engine.launch.plan.cost import (
    availability,
    best_checkpoint_interval_s,
    per_step,
    trainer_share,
)
from outloop.engine.launch.plan.fit import Fit, Gpus, gib
from outloop.engine.launch.plan.inputs import Plan, ServerInputs
from outloop.engine.launch.plan.lengths import Lengths, Part
from outloop.engine.launch.plan.memory import RESERVE, cached_tokens, rank_memory
from outloop.engine.launch.plan.network import broadcast_s, one_by_one_s
from outloop.engine.launch.plan.simulate import Scenario, Simulated, simulate
from outloop.engine.launch.plan.split import Split, best_split

LEVELS = (0, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words under a title."""

    title: str
    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Level(NamedTuple):
    """One way to run the loop, and what it reaches."""

    name: str
    rules: Rules
    bound: tuple[str, float]
    simulated: Simulated


def levels(plan: Plan, staleness: Sequence[int] = LEVELS) -> list[Level]:
    """Synchronous, synchronous with partial rollouts, and "auto" depth under each age."""
    given = plan.inputs.loop.rules()
    chosen: list[tuple[str, Rules]] = []
    for age in staleness:
        one = replace(given, max_staleness=age, pipeline_depth="auto", over_provision=1.0)
        chosen.append(("synchronous" if age == 0 else f"max_staleness {age}", one))
        if age == 0:
            one = replace(one, pipeline_depth=0.0)
            chosen[-1] = ("synchronous", one)
            partial = replace(one, over_provision=1.5)
            chosen.append(("synchronous, over_provision 1.5", partial))
    found = []
    for name, rules in chosen:
        scenario = plan.scenario(rules=rules)
        found.append(Level(name, rules, best(scenario), simulate(scenario)))
    return found


def level_table(found: Sequence[Level]) -> Table:
    """Levels beside each other, the first one as the unit."""
    first = found[0].simulated.steps_per_hour
    rows = tuple(
        (
            level.name,
            _number(level.simulated.steps_per_hour),
            f"{level.simulated.steps_per_hour / first:.2f}",
            f"{_number(level.bound[1])} ({level.bound[0]})",
            _share(level.simulated.trainer_wait_share),
            _share(level.simulated.server_share) if level.simulated.server_share else "-",
            f"{level.simulated.staleness_mean:.2f} / {max(level.simulated.staleness, default=0)}",
            _share(level.simulated.discarded_time_share),
        )
        for level in found
    )
    names = (
        "level",
        "steps/h",
        "of the first",
        "bound, by",
        "trainer waits",
        "servers busy",
        "staleness mean / max",
        "time discarded",
    )
    return Table("Levels, simulated", names, rows)


def packing_table(plan: Plan) -> Table:
    """router.packed_turns_per_server: the last turns of a synchronous batch on all servers or on
    few, under the tail that is given and one without; empty without [servers], or where packing
    can do nothing.

    Laminar (arXiv 2510.12633) repacks stragglers, so that the servers they leave load later
    weights; in a synchronous loop there are none before the batch has ended.
    """
    scenario = plan.scenario(
        rules=replace(
            plan.inputs.loop.rules(), max_staleness=0, pipeline_depth=0.0, over_provision=1.0
        )
    )
    if scenario.servers is None or min(scenario.servers.max_running, scenario.servers.count) < 2:
        return Table("Turns on few servers", (), ())
    most, mean = scenario.servers.max_running, scenario.episodes.seconds.mean()
    light = Lengths.mixture([Part(share=1.0, low=0.5 * mean, high=1.5 * mean)])
    tails = {"as given": scenario.episodes.seconds, "light": light}
    rows = []
    for name, seconds in tails.items():
        spread: float | None = None
        for packed in (None, max(2, most // 4), most):
            servers = replace(scenario.servers, packed=packed)
            episodes = replace(scenario.episodes, seconds=seconds)
            found = simulate(replace(scenario, servers=servers, episodes=episodes))
            spread = spread or found.steps_per_hour
            rows.append(
                (
                    name,
                    "all servers alike" if packed is None else f"packed, {packed} on a server",
                    _number(found.steps_per_hour),
                    f"{found.steps_per_hour / spread:.3f}",
                    _share(found.free_server_share),
                    f"{found.moves_per_step:.0f}",
                )
            )
    names = (
        "tail",
        "turns",
        "steps/h",
        "of all alike",
        "servers without an episode",
        "turns moved a step",
    )
    return Table("Turns on few servers, synchronous", names, tuple(rows))


def order_table(plan: Plan, seeds: Sequence[int] = (0, 1)) -> Table:
    """buffer.task_order = "longest_first", where places hold half a batch.

    Each task was played by one group before. As much of an episode's length is its task's as the
    file says, or all. Of the speeds over that by slot, mean and extremes over `seeds`.
    """
    rows = []
    for name, age in (("synchronous", 0), ("max_staleness 1", 1)):
        rules = replace(plan.inputs.loop.rules(), max_staleness=age, over_provision=1.0)
        rules = replace(rules, pipeline_depth=0.0 if age == 0 else "auto", task_order="slot")
        places = max(rules.group_size, rules.groups_per_step * rules.group_size // 2)
        scenario = replace(plan.scenario(rules=rules), places=places)
        ordered = replace(scenario, rules=replace(rules, task_order="longest_first"))
        for by_task in sorted({scenario.episodes.by_task, 0.75, 1.0}):
            episodes = replace(scenario.episodes, by_task=by_task)
            found = [
                tuple(simulate(replace(one, episodes=episodes, seed=seed)) for one in pair)
                for seed in seeds
                for pair in ((scenario, ordered),)
            ]
            ratios = [after.steps_per_hour / before.steps_per_hour for before, after in found]
            known = fmean(before.rank_correlation for before, _ in found)
            ratio = f"{fmean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            rows.append((name, _share(by_task), f"{known:.2f}", ratio))
    names = ("level", "attempts as long as their task", "rank correlation", "speed over by slot")
    return Table("Long tasks first", names, tuple(rows))


def run_table(plan: Plan) -> Table:
    """The run as it is set."""
    scenario = plan.scenario()
    found, bound = simulate(scenario), best(scenario)
    ages = ", ".join(f"{age}: {_share(share)}" for age, share in found.staleness.items())
    rows = (
        ("steps per hour", _number(found.steps_per_hour)),
        ("at most, by the bound of", f"{_number(bound[1])}, {bound[0]}"),
        ("seconds per step", _number(found.seconds_per_step)),
        ("trainer at work / waiting", _pair(found.trainer_busy_share, found.trainer_wait_share)),
        ("servers busy", _share(found.server_share) if scenario.servers else "not simulated"),
        ("episodes in flight", _number(found.episodes_in_flight)),
        ("groups by staleness", ages),
        (
            "attempts / agent time discarded",
            _pair(found.discarded_share, found.discarded_time_share),
        ),
        ("slow among trained over slow among started", f"{found.slow_share_ratio:.2f}"),
        ("update / publish, s", f"{scenario.update_s:.3g} / {scenario.publish_s:.3g}"),
    )
    return Table("The run, simulated", ("", ""), rows)


def memory_table(plan: Plan) -> Table:
    """Bytes on the fullest trainer rank and on a server; empty without [model]."""
    if plan.model is None:
        return Table("Memory", (), ())
    trainer = plan.inputs.trainer
    layout = plan.layout(trainer.gpus)
    memory = rank_memory(plan.model, layout, microbatch_tokens=trainer.microbatch_tokens)
    limit = plan.inputs.gpu.memory_gb * 1e9
    rows = [
        ("parameters", f"{plan.model.num_params / 1e9:.2f} billion"),
        ("weights", _gigabytes(memory.weights)),
        ("gradients", _gigabytes(memory.gradients)),
        ("optimizer", _gigabytes(memory.optimizer)),
        ("activations", _gigabytes(memory.activations)),
        ("loss", _gigabytes(memory.loss)),
        ("together", _gigabytes(memory.total)),
        ("fits into 0.9 of a GPU", "yes" if memory.total <= (1 - RESERVE) * limit else "no"),
    ]
    if plan.inputs.servers is not None:
        tokens = cached_tokens(plan.model, gpus=plan.inputs.servers.gpus, gpu_bytes=limit)
        rows.append(("tokens in a server's cache", f"{tokens:,.0f}"))
    return Table("Memory of a trainer rank", ("", ""), tuple(rows))


def transfer_table(plan: Plan, counts: Sequence[int] = (1, 8, 64, 512)) -> Table:
    """How long the weights travel to so many servers; empty without [model]."""
    if plan.model is None:
        return Table("Weights", (), ())
    bandwidth = plan.inputs.network.publish_gb_per_s * 1e9
    rows = tuple(
        (
            f"{count}",
            f"{broadcast_s(plan.weight_bytes, servers=count, bandwidth=bandwidth):.2f}",
            f"{one_by_one_s(plan.weight_bytes, servers=count, bandwidth=bandwidth):.2f}",
        )
        for count in counts
    )
    title = f"Seconds for {plan.weight_bytes / 1e9:.3g} GB of weights at {bandwidth / 1e9:g} GB/s"
    return Table(title, ("servers", "broadcast", "one by one"), rows)


class Size(NamedTuple):
    """A cluster of one size, split."""

    gpus: int
    groups_per_step: int
    split: Split
    steps_per_hour: float
    """With what failures take."""


def sizes(plan: Plan) -> list[Size]:
    """The best split of every cluster.gpus; empty without [cluster]."""
    cluster, servers = plan.inputs.cluster, plan.inputs.servers
    if cluster is None or servers is None:
        return []
    return [size_of(plan, servers, gpus) for gpus in cluster.gpus]


def size_of(plan: Plan, servers: ServerInputs, gpus: int) -> Size:
    """The best split of so many GPUs.

    Raises:
        SettingsError: they are too few.
    """
    groups = plan.inputs.loop.groups_per_step
    cluster = plan.inputs.cluster
    if cluster is not None and cluster.gpus_per_group is not None:
        groups = max(groups, round(gpus / cluster.gpus_per_group))

    def scenario_of(num_servers: int, trainer_gpus: int) -> Scenario:
        return plan.slice(
            num_servers=num_servers, trainer_gpus=trainer_gpus, groups_per_step=groups
        )

    split = best_split(
        gpus,
        gpus_per_server=servers.gpus,
        gpus_per_replica=plan.layout(1).ranks_per_replica,
        scenario_of=scenario_of,
    )
    return Size(gpus, groups, split, _with_failures(plan, split))


def _with_failures(plan: Plan, split: Split) -> float:
    """Steps per hour of which failures take their part: of servers, then of the trainer."""
    given = plan.inputs.failures
    assert plan.inputs.servers is not None
    up = availability(
        hours_between=given.gpu_hours_between / plan.inputs.servers.gpus,
        recovery_s=given.server_recovery_s,
    )
    hours = given.gpu_hours_between / split.trainer_gpus
    interval = best_checkpoint_interval_s(hours_between=hours, write_s=given.checkpoint_write_s)
    share = trainer_share(
        hours_between=hours,
        restart_s=given.trainer_restart_s,
        interval_s=interval,
        write_s=given.checkpoint_write_s,
    )
    # A step needs its update and, at once, its episodes: what is lost of the servers counts only
    # where they are the bound.
    servers = up if split.bound[0] == "servers" else 1.0
    return split.simulated.steps_per_hour * share * servers


def size_table(plan: Plan, found: Sequence[Size]) -> Table:
    """Clusters beside each other; what their price is where [prices] says it."""
    prices = plan.inputs.prices
    names: tuple[str, ...] = (
        "GPUs",
        "groups/step",
        "servers + trainer",
        "steps/h",
        "episodes/s per GPU",
        "bound by",
        "trainer waits",
        "servers busy",
        "staleness",
        "after failures",
    )
    rows = []
    size = plan.inputs.loop.group_size
    for one in found:
        simulated = one.split.simulated
        episodes = simulated.steps_per_hour * one.groups_per_step * size / 3600 / one.gpus
        row = [
            f"{one.gpus:,}",
            f"{one.groups_per_step}",
            f"{one.split.server_gpus} + {one.split.trainer_gpus}",
            _number(simulated.steps_per_hour),
            f"{episodes:.3f}",
            one.split.bound[0],
            _share(simulated.trainer_wait_share),
            _share(simulated.server_share),
            f"{simulated.staleness_mean:.2f}",
            _number(one.steps_per_hour),
        ]
        if prices is not None:
            row += _costs(plan, one)
        rows.append(tuple(row))
    if prices is not None:
        names += ("cost of a step",)
        if prices.spot is not None:
            names += ("with spot servers",)
    return Table("Best split by size", names, tuple(rows))


def _costs(plan: Plan, one: Size) -> list[str]:
    given = plan.inputs.prices
    assert given is not None
    prices = given.prices()
    costs = [
        per_step(
            servers=one.split.server_gpus,
            trainer=one.split.trainer_gpus,
            steps_per_hour=one.steps_per_hour,
            of_server=prices.on_demand,
            of_trainer=prices.on_demand,
        )
    ]
    if prices.spot is not None and plan.inputs.servers is not None:
        up = availability(
            hours_between=prices.spot_hours_between / plan.inputs.servers.gpus,
            recovery_s=plan.inputs.failures.server_recovery_s,
        )
        costs.append(
            per_step(
                servers=one.split.server_gpus,
                trainer=one.split.trainer_gpus,
                # At most so much slower: the servers may not be the bound.
                steps_per_hour=one.steps_per_hour * up,
                of_server=prices.spot,
                of_trainer=prices.on_demand,
            )
        )
    return [_number(cost) for cost in costs]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"


def _pair(a: float, b: float) -> str:
    return f"{_share(a)} / {_share(b)}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def fit_tables(found: Fit, gpus: Gpus, settings: Settings) -> tuple[Table, ...]:
    """What a run's settings take: of a trainer rank, of a server, and in time."""
    layout, trainer, rank = found.layout, settings.trainer, found.rank
    split = ", ".join(
        f"{name} {size}"
        for name, size in (
            ("tensor", layout.tensor),
            ("pipeline", layout.pipeline),
            ("context", layout.context),
            ("expert", layout.expert),
            ("data", layout.data),
        )
        if size > 1
    )
    rows = [
        ("parameters", f"{found.shape.num_params / 1e9:.2f} billion"),
        ("ranks", f"{trainer.num_ranks}, {trainer.dtype}" + (f", {split}" if split else "")),
        ("weights", gib(rank.weights)),
        ("gradients", gib(rank.gradients)),
        ("optimizer", gib(rank.optimizer)),
        ("activations", gib(rank.activations)),
        ("loss", gib(rank.loss)),
    ]
    if found.reference:
        rows.append(("reference", gib(found.reference)))
    if found.critic:
        rows.append(("critic", gib(found.critic)))
    rows += [("together", gib(found.rank_total)), ("may take", gib(max(0.0, found.rank_limit)))]
    if found.checkpoint:
        rows.append(("beside the server's weights, for a checkpoint", gib(found.checkpoint)))
    tables = [Table("Each trainer rank", ("", ""), tuple(rows))]
    server = found.server
    if server is not None:
        of_server = (
            ("GPUs of a server", str(settings.server.tensor_parallel_size)),
            ("weights on each", gib(server.weights)),
            ("cache on each", gib(max(0.0, server.cache))),
            ("tokens in a server's cache", f"{max(0.0, server.cache_tokens):,.0f}"),
            ("turns of max_context_tokens at once", str(found.running)),
        )
        tables.append(Table("Each server", ("", ""), of_server))
    times = (
        ("GPUs of the run", str(found.num_gpus)),
        ("generate", f"{found.generate_s:.3g} s" if server is not None else "by other servers"),
        ("update", f"{found.update_s:.3g} s"),
        ("publish", f"{found.publish_s:.3g} s"),
        ("a step, at least", f"{found.step_s:.3g} s, by {found.bound}"),
        (
            "assumed",
            f"{gpus.memory_gib:g} GiB, {gpus.tflops:g} TFLOP/s at mfu {gpus.mfu:g}, "
            f"{gpus.tb_per_s:g} TB/s, publish at {gpus.publish_gb_per_s:g} GB/s",
        ),
    )
    return (*tables, Table("Each step", ("", ""), times))
