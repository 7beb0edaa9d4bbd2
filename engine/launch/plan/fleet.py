"""How many processes of which part a plan asks of a cluster, as overrides of a run's settings.

The plan must be of that run: what decides about time is compared.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.launch.plan.cost import availability, per_step
from outloop.engine.launch.plan.inputs import Plan
from outloop.engine.launch.plan.report import size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Processes, and GPUs of each."""

    num_servers: int
    gpus_of_server: int
    num_ranks: int
    num_runners: int
    groups_per_step: int
    has_spot_servers: bool | None
    """Whether they are cheaper on spot machines; None: the plan has no price of these."""

    def overrides(self, settings: Settings) -> tuple[str, ...]:
        """As `--set` words; parts on spot machines but for servers stay as they are set."""
        given: dict[str, object] = {
            "server.num_servers": self.num_servers,
            "server.tensor_parallel_size": self.gpus_of_server,
            "trainer.num_ranks": self.num_ranks,
            "trainer.groups_per_step": self.groups_per_step,
            "env.num_runners": self.num_runners,
        }
        if self.has_spot_servers is not None:
            others = [part for part in settings.deploy.spot if part != "server"]
            given["deploy.spot"] = [*others, *["server"] * self.has_spot_servers]
        return tuple(f"{name}={json.dumps(value)}" for name, value in given.items())

    def sentence(self) -> str:
        """For a person."""
        spot = {None: "", True: ", on spot machines", False: ", not on spot machines"}
        return (
            f"the plan: {self.num_servers} servers of {self.gpus_of_server} GPUs"
            f"{spot[self.has_spot_servers]}, {self.num_ranks} trainer ranks, {self.num_runners} "
            f"runners, {self.groups_per_step} groups a step"
        )


def fleet_of(plan: Plan, settings: Settings, *, gpus: int | None = None) -> Fleet:
    """What the plan's servers and trainer are, or the best split of `gpus`.

    Runners have places for every episode that admission lets be in flight.

    Raises:
        SettingsError: the plan has no servers, is of a run with other settings, or `gpus` are too
            few.
    """
    servers = plan.inputs.servers
    if servers is None:
        raise SettingsError(
            "[servers] is missing in the plan: how many of them there are is to come from it; "
            "give their speed and count (docs/scaling.md)"
        )
    groups_per_step = plan.inputs.loop.groups_per_step
    num_servers, num_ranks = servers.count, plan.inputs.trainer.gpus
    if gpus is not None:
        size = size_of(plan, servers, gpus)
        groups_per_step = size.groups_per_step
        num_servers = size.split.server_gpus // servers.gpus
        num_ranks = size.split.trainer_gpus
    _refuse_another_run(plan, settings, is_scaled=gpus is not None)
    return Fleet(
        num_servers=num_servers,
        gpus_of_server=servers.gpus,
        num_ranks=num_ranks,
        num_runners=_num_runners(plan, settings, groups_per_step),
        groups_per_step=groups_per_step,
        has_spot_servers=_is_cheaper_on_spot(plan, num_servers * servers.gpus, num_ranks),
    )


def _refuse_another_run(plan: Plan, settings: Settings, *, is_scaled: bool) -> None:
    loop, buffer = plan.inputs.loop, settings.buffer
    pairs: dict[str, tuple[object, object]] = {
        "buffer.group_size": (loop.group_size, buffer.group_size),
        "buffer.max_staleness": (loop.max_staleness, buffer.max_staleness),
        "buffer.pipeline_depth": (loop.pipeline_depth, buffer.pipeline_depth),
        "buffer.over_provision": (loop.over_provision, buffer.over_provision),
    }
    if not is_scaled:
        groups = settings.trainer.groups_per_step
        pairs["trainer.groups_per_step"] = (loop.groups_per_step, groups)
    for name, (planned, own) in pairs.items():
        if planned != own:
            raise SettingsError(
                f"the plan has loop.{name.partition('.')[2]}={planned!r}, the settings have {name}="
                f"{own!r}: it is of another run; make both the same"
            )


def _num_runners(plan: Plan, settings: Settings, groups_per_step: int) -> int:
    rules = plan.inputs.loop.rules()
    age = rules.max_age
    depth = age if rules.pipeline_depth == "auto" else min(rules.pipeline_depth, age)
    num_groups = math.ceil(groups_per_step * (rules.over_provision + depth))
    episodes = min(num_groups * rules.group_size, plan.inputs.loop.max_concurrent_episodes)
    return math.ceil(episodes / settings.env.max_concurrent_episodes)


def _is_cheaper_on_spot(plan: Plan, server_gpus: int, trainer_gpus: int) -> bool | None:
    """By the cost of a step, of which a server that is taken back makes fewer."""
    prices, servers = plan.inputs.prices, plan.inputs.servers
    if prices is None or prices.spot is None or servers is None:
        return None
    up = availability(
        hours_between=prices.spot_hours_between / servers.gpus,
        recovery_s=plan.inputs.failures.server_recovery_s,
    )
    on_demand, on_spot = (
        per_step(
            servers=server_gpus,
            trainer=trainer_gpus,
            steps_per_hour=share,
            of_server=price,
            of_trainer=prices.on_demand,
        )
        for price, share in ((prices.on_demand, 1.0), (prices.spot, up))
    )
    return on_spot < on_demand
