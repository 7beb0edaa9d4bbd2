"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

CONFIG = click.argument("config", type=click.Path(path_type=Path))
RUN = click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the run.",
)
SET = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting."
)
ADVERTISE = click.option(
    "--advertise",
    metavar="HOST",
    help="Name or address under which other machines reach this one.",
)
