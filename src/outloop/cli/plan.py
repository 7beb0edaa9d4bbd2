"""`outloop plan`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.cli.options import print_table


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def plan(file: Path) -> None:
    """Bound the speed of a run by closed forms, and compute its memory, transfers and price.

    FILE is a TOML file of times and sizes in the form of docs/scaling.toml.
    """
    from outloop.engine.launch.plan.inputs import load_plan
    from outloop.engine.launch.plan.report import (
        level_table,
        memory_table,
        size_table,
        transfer_table,
    )

    made = load_plan(file)
    for table in (level_table(made), memory_table(made), transfer_table(made), size_table(made)):
        print_table(table)
