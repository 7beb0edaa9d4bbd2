"""Arguments and options that several commands share."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outloop.cli.completion import complete_setting

if TYPE_CHECKING:
    from outloop.engine.launch.plan.report import Table

_MIN_WIDTH = 160


def check_writable(path: Path, name: str) -> None:
    """Refuse a path that cannot be written, before any work is done.

    Raises:
        SettingsError: names the path, and why.
    """
    from outloop.buffer.errors import SettingsError

    folder = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"{name}={str(path)!r} cannot be written ({error}); give a path that you may write"
        ) from error


CONFIG = click.argument("config", type=click.Path(path_type=Path))
RUN = click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the run.",
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one setting.",
    shell_complete=complete_setting,
)
ADVERTISE = click.option(
    "--advertise",
    metavar="HOST",
    help="Name or address at which other machines reach this one.",
)
ENGINES = click.Choice(["here", "slurm", "ray"])
"""Where parts of a run are started."""


def print_table(table: Table) -> None:
    """Show a table as wide as it is; nothing where it has no rows."""
    from rich.console import Console

    from outloop.buffer.rich_terminal import PlainTable, show_table

    if not table.rows:
        return
    shown = PlainTable(title=table.title, title_justify="left", show_header=any(table.names))
    for number, name in enumerate(table.names):
        shown.add_plain_column(name, justify="right" if number else "left", no_wrap=True)
    for row in table.rows:
        shown.add_plain_row(row)
    # A line that is longer than the terminal can be read; one that is cut cannot.
    show_table(Console(width=max(_MIN_WIDTH, Console().width)), shown)
