"""`outloop plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outloop.cli.options import print_table

if TYPE_CHECKING:
    from outloop.buffer.settings import Settings
    from outloop.engine.launch.plan.inputs import Plan
    from outloop.engine.launch.plan.simulate import Episodes


_MIN_ARCHIVED = 50
"""With fewer episodes the ledger's buckets say more of a distribution."""
_ARCHIVED = """
SELECT group_id, closed_at - opened_at AS seconds, num_output_tokens
FROM episodes WHERE purpose = 'train' AND closed_at IS NOT NULL AND num_output_tokens IS NOT NULL
ORDER BY closed_at
"""


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Take what was measured from the run in this folder.",
)
@click.option(
    "--runners",
    type=click.IntRange(min=1),
    help="With --run: how fast it would be with so many runners.",
)
def plan(file: Path | None, run_dir: Path | None, runners: int | None) -> None:
    """Say how fast a run would be, what it would need and what it would cost.

    FILE is a TOML file of times and sizes, docs/scaling.md. With --run they come from a run's
    metrics and ledger, and the simulator is compared with what the run did.
    """
    from dataclasses import replace

    from outloop.buffer.errors import SettingsError
    from outloop.buffer.run import load_run_settings
    from outloop.engine.launch.plan.inputs import load_plan
    from outloop.engine.launch.plan.report import (
        level_table,
        levels,
        memory_table,
        order_table,
        packing_table,
        run_table,
        size_table,
        sizes,
        transfer_table,
    )
    from outloop.engine.launch.plan.simulate import simulate

    if (file is None) == (run_dir is None):
        raise SettingsError(
            "a plan is made from measurements: give a file of times, or --run with the folder of "
            "a run that has made some steps; one of the two"
        )
    if runners is not None and run_dir is None:
        raise SettingsError(
            f"--runners={runners} goes with --run; in a file, loop.max_concurrent_episodes is the "
            "number of places over all runners"
        )
    if run_dir is not None:
        settings = load_run_settings(run_dir)
        made, measured, number, has_ended = _of_run(run_dir, settings)
        same = replace(made.scenario(), num_steps=number + 1, num_warmup_steps=1, has_end=has_ended)
        click.echo(
            f"measured: {measured:.4g} steps per hour over {number} steps after the first; "
            f"simulated over as many: {simulate(same).steps_per_hour:.4g}"
        )
        if runners is not None:
            made = made.with_places(runners * settings.env.max_concurrent_episodes)
            steps_per_hour = simulate(made.scenario()).steps_per_hour
            click.echo(f"with {runners} runners: {steps_per_hour:.4g}; all that follows is so too")
    else:
        assert file is not None
        made = load_plan(file)
    for table in (
        run_table(made),
        level_table(levels(made)),
        packing_table(made),
        order_table(made),
        memory_table(made),
        transfer_table(made),
        size_table(made, sizes(made)),
    ):
        print_table(table)


def _of_run(run_dir: Path, settings: Settings) -> tuple[Plan, float, int, bool]:
    """The plan of a run, the steps per hour that it made after its first, how many, and whether
    they were all."""
    from outloop.buffer.cli.open_run import joined
    from outloop.buffer.telemetry import read_metrics
    from outloop.engine.launch.plan.inputs import measured_lengths, measured_tree, plan_of

    rows = read_metrics(run_dir)
    with joined(run_dir) as reader:
        ledger = reader.ledger()
    source = f"run={str(run_dir)!r}"
    tree = measured_tree(settings, rows, ledger, source=source)
    lengths = _archived(run_dir) or measured_lengths(ledger, source=source)
    made = plan_of(tree, source=source, lengths=lengths)
    steps = [
        row["train/step_s"] - (row.get("train/evaluation_wait_s") or 0.0)
        for row in rows
        if row.get("train/step_s") is not None
    ][1:]
    has_ended = len(steps) + 1 == settings.trainer.num_steps
    return made, 3600.0 * len(steps) / sum(steps), len(steps), has_ended


def _archived(run_dir: Path) -> Episodes | None:
    """The lengths of the training episodes in a run's archive; None: too few are there."""
    import numpy as np

    from outloop.buffer.trajectories.folder import FOLDER
    from outloop.buffer.trajectories.query import query
    from outloop.engine.launch.plan.inputs import recorded_lengths

    if not (run_dir / FOLDER).is_dir():
        return None
    rows = query(run_dir / FOLDER, _ARCHIVED)
    if len(rows) < _MIN_ARCHIVED:
        return None
    seconds = np.array([float(row["seconds"]) for row in rows])
    tokens = np.array([float(row["num_output_tokens"]) for row in rows])
    return recorded_lengths([str(row["group_id"]) for row in rows], seconds, tokens)
