"""Tables of `outloop plan` and `outloop check`: figures beside each other, and their units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.launch.plan.bounds import Servers, binding, least_step_s
from outloop.engine.launch.plan.cost import availability, per_step
from outloop.engine.launch.plan.fit import Fit, Gpus, gib
from outloop.engine.launch.plan.inputs import Plan
from outloop.engine.launch.plan.memory import RESERVE, cached_tokens, rank_memory
from outloop.engine.launch.plan.network import broadcast_s, one_by_one_s

LEVELS = (0, 1, 2, 3)
"""Values of max_staleness beside each other."""
NUM_CANDIDATES = 40
"""Splits of a cluster that are compared, equally far apart."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words under a title."""

    title: str
    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def level_table(plan: Plan, staleness: Sequence[int] = LEVELS) -> Table:
    """Compare values of max_staleness by their bounds."""
    loop, rows = plan.loop(), []
    _, synchronous = binding(replace(loop, max_staleness=0))
    for age in staleness:
        least = least_step_s(replace(loop, max_staleness=age))
        name, speed = binding(replace(loop, max_staleness=age))
        others = ", ".join(
            f"{other} {_number(3600 / seconds)}"
            for other, seconds in sorted(least.items(), key=lambda item: -item[1])
            if other != name and seconds > 0
        )
        rows.append((f"{age}", _number(speed), f"{speed / synchronous:.2f}", name, others))
    names = ("max_staleness", "steps/h, at most", "of synchronous", "bound by", "other bounds")
    return Table("Levels, four bounds each", names, tuple(rows))


def memory_table(plan: Plan) -> Table:
    """List the bytes on the fullest trainer rank and on a server; empty without [model]."""
    if plan.model is None:
        return Table("Memory", (), ())
    trainer, servers = plan.inputs.trainer, plan.inputs.servers
    memory = rank_memory(
        plan.model, plan.layout(trainer.gpus), microbatch_tokens=trainer.microbatch_tokens
    )
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
    if servers is not None:
        tokens = cached_tokens(plan.model, gpus=servers.gpus, gpu_bytes=limit)
        rows.append(("tokens in a server's cache", f"{tokens:,.0f}"))
    return Table("Memory of a trainer rank", ("", ""), tuple(rows))


def transfer_table(plan: Plan, counts: Sequence[int] = (1, 8, 64, 512)) -> Table:
    """List the seconds of a publish by number of servers; empty without [model]."""
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


def size_table(plan: Plan) -> Table:
    """Split every size of [cluster] at best; empty without [cluster]."""
    cluster, servers, prices = plan.inputs.cluster, plan.inputs.servers, plan.inputs.prices
    if cluster is None or servers is None:
        return Table("Best split by size", (), ())
    rows = []
    for gpus in cluster.gpus:
        groups = plan.inputs.loop.groups_per_step
        if cluster.gpus_per_group is not None:
            groups = max(groups, round(gpus / cluster.gpus_per_group))
        count, trainer, (name, speed) = best_split(plan, servers, gpus, groups)
        episodes = speed * groups * plan.inputs.loop.group_size / 3600 / gpus
        split = f"{count * servers.gpus} + {trainer}"
        row = [f"{gpus:,}", f"{groups}", split, _number(speed), f"{episodes:.3f}", name]
        if prices is not None:
            row += _prices(plan, servers, count, trainer, speed)
        rows.append(tuple(row))
    names = ["GPUs", "groups/step", "servers + trainer", "steps/h, at most"]
    names += ["episodes/s per GPU", "bound by"]
    if prices is not None:
        names += ["price of a step"] + ["with spot servers"] * (prices.spot is not None)
    return Table("Best split by size", tuple(names), tuple(rows))


def best_split(
    plan: Plan, servers: Servers, gpus: int, groups_per_step: int
) -> tuple[int, int, tuple[str, float]]:
    """Return servers, trainer GPUs and the bound of the split whose bound is highest.

    Raises:
        SettingsError: `gpus` hold no server beside a replica of the trainer.
    """
    replica = plan.layout(1).ranks_per_replica
    most, found = gpus // servers.gpus, []
    for count in sorted({max(1, most * i // NUM_CANDIDATES) for i in range(NUM_CANDIDATES + 1)}):
        trainer = (gpus - count * servers.gpus) // replica * replica
        if trainer > 0:
            loop = plan.loop(
                num_servers=count, trainer_gpus=trainer, groups_per_step=groups_per_step
            )
            found.append((count, trainer, binding(loop)))
    if not found:
        raise SettingsError(
            f"gpus={gpus} cannot hold a server of {servers.gpus} and a trainer of {replica}; at "
            f"least {servers.gpus + replica} are needed"
        )
    return max(found, key=lambda split: split[2][1])


def _prices(plan: Plan, servers: Servers, count: int, trainer: int, speed: float) -> list[str]:
    prices = plan.inputs.prices
    assert prices is not None
    found = []
    kinds = [(prices.on_demand, 1.0)]
    if prices.spot is not None:
        up = availability(
            hours_between=prices.spot_hours_between / servers.gpus,
            recovery_s=prices.spot_recovery_s,
        )
        kinds.append((prices.spot, up))
    for of_server, share in kinds:
        price = per_step(
            servers=count * servers.gpus,
            trainer=trainer,
            # At most so much slower: the servers may not be the bound.
            steps_per_hour=speed * share,
            of_server=of_server,
            of_trainer=prices.on_demand,
        )
        found.append(_number(price))
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def fit_tables(found: Fit, gpus: Gpus, settings: Settings) -> tuple[Table, ...]:
    """List what a run's settings take: on a trainer rank, on a server, and in time."""
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
    # A run on a CPU has no such GPU; the figures are those of the data sheet.
    is_here = settings.server.device != "cpu" or settings.trainer.device not in ("auto", "cpu")
    elsewhere = "" if is_here else "; on these GPUs, not on this machine's CPU"
    times = (
        ("GPUs of the run", str(found.num_gpus)),
        ("generate", f"{found.generate_s:.3g} s" if server is not None else "by other servers"),
        ("update", f"{found.update_s:.3g} s"),
        ("publish", f"{found.publish_s:.3g} s"),
        ("a step, at least", f"{found.step_s:.3g} s, by {found.bound}{elsewhere}"),
        (
            "assumed",
            f"{gpus.memory_gib:g} GiB, {gpus.tflops:g} TFLOP/s at mfu {gpus.mfu:g}, "
            f"{gpus.tb_per_s:g} TB/s, publish at {gpus.publish_gb_per_s:g} GB/s",
        ),
    )
    return (*tables, Table("Each step", ("", ""), times))
