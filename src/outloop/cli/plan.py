"""`outloop plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from outloop.engine.launch.plan.inputs import Plan
    from outloop.engine.launch.plan.report import Table


_MIN_WIDTH = 160


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Take what was measured from the run in this folder.",
)
def plan(file: Path | None, run_dir: Path | None) -> None:
    """Say how fast a run would be, what it would need and what it would cost.

    FILE is a TOML file of times and sizes, docs/scaling.md. With --run they come from a run's
    metrics and ledger, and the simulator is compared with what the run did.
    """
    from outloop.buffer.errors import SettingsError
    from outloop.engine.launch.plan.inputs import load_plan
    from outloop.engine.launch.plan.report import (
        level_table,
        levels,
        memory_table,
        run_table,
        size_table,
        sizes,
        transfer_table,
    )

    if (file is None) == (run_dir is None):
        raise SettingsError(
            "a plan is made from measurements: give a file of times, or --run with the folder of "
            "a run that has made some steps; one of the two"
        )
    if run_dir is not None:
        made, measured = _of_run(run_dir)
        click.echo(f"measured: {measured:.4g} steps per hour")
    else:
        assert file is not None
        made = load_plan(file)
    for table in (
        run_table(made),
        level_table(levels(made)),
        memory_table(made),
        transfer_table(made),
        size_table(made, sizes(made)),
    ):
        _print(table)


def _of_run(run_dir: Path) -> tuple[Plan, float]:
    """The plan of a run, and the steps per hour that it made after its first."""
    from outloop.buffer.cli.open_run import joined
    from outloop.buffer.run import load_run_settings
    from outloop.buffer.telemetry import read_metrics
    from outloop.engine.launch.plan.inputs import measured_lengths, measured_tree, plan_of

    settings, rows = load_run_settings(run_dir), read_metrics(run_dir)
    with joined(run_dir) as reader:
        ledger = reader.ledger()
    source = f"run={str(run_dir)!r}"
    tree = measured_tree(settings, rows, ledger, source=source)
    made = plan_of(tree, source=source, lengths=measured_lengths(ledger, source=source))
    steps = [row["train/step_s"] for row in rows if row.get("train/step_s") is not None][1:]
    return made, 3600.0 * len(steps) / sum(steps)


def _print(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as Shown

    if not table.rows:
        return
    shown = Shown(title=table.title, title_justify="left", show_header=any(table.names))
    for number, name in enumerate(table.names):
        shown.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    # A line that is longer than the terminal can be read; one that is cut cannot.
    Console(width=max(_MIN_WIDTH, Console().width)).print(shown)
