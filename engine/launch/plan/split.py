"""How many of N GPUs serve, and how many train.

Owns: the search. Invariant: the split that is returned was simulated, and is the best of the
`NUM_SIMULATED` most promising ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outloop.buffer.errors import SettingsError
from outloop.engine.launch.plan.bounds import best, steps_per_hour
from outloop.engine.launch.plan.simulate import Scenario, Simulated, simulate

NUM_SIMULATED = 2
NUM_CANDIDATES = 40
"""Numbers of servers that are looked at, equally far apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """GPUs of servers and trainer, and what they reach."""

    server_gpus: int
    trainer_gpus: int
    scenario: Scenario
    bound: tuple[str, float]
    """The bound that holds, and its steps per hour."""
    simulated: Simulated


def best_split(
    gpus: int,
    *,
    gpus_per_server: int,
    gpus_per_replica: int,
    scenario_of: Callable[[int, int], Scenario],
    num_simulated: int = NUM_SIMULATED,
) -> Split:
    """The split of `gpus` with the most steps per hour.

    Args:
        gpus_per_server: what one server takes.
        gpus_per_replica: what the trainer takes at least; it takes multiples of it.
        scenario_of: (servers, trainer GPUs) -> the run.

    Raises:
        SettingsError: there is none.
    """
    candidates = []
    most = gpus // gpus_per_server
    steps = range(NUM_CANDIDATES + 1)
    for servers in sorted({max(1, most * step // NUM_CANDIDATES) for step in steps}):
        trainer = (gpus - servers * gpus_per_server) // gpus_per_replica * gpus_per_replica
        if trainer > 0:
            scenario = scenario_of(servers, trainer)
            candidates.append((best(scenario), servers, trainer, scenario))
    if not candidates:
        raise SettingsError(
            f"gpus={gpus} cannot hold a server of {gpus_per_server} and a trainer of "
            f"{gpus_per_replica}; at least {gpus_per_server + gpus_per_replica} are needed"
        )
    candidates.sort(key=lambda candidate: _promise(candidate[3]), reverse=True)
    found: Split | None = None
    for bound, servers, trainer, scenario in candidates[:num_simulated]:
        simulated = simulate(scenario)
        if found is None or simulated.steps_per_hour > found.simulated.steps_per_hour:
            found = Split(
                server_gpus=servers * gpus_per_server,
                trainer_gpus=trainer,
                scenario=scenario,
                bound=bound,
                simulated=simulated,
            )
    assert found is not None
    return found


def _promise(scenario: Scenario) -> float:
    """The bounds together: where two are near each other, a run reaches neither."""
    bounds = steps_per_hour(scenario).values()
    return float(sum(bound**-2 for bound in bounds) ** -0.5)
