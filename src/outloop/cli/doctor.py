"""`outloop doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.option(
    "--drift",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="RUN",
    help="Show instead why the episodes of the run in this folder broke into branches.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Show also whether the run of this settings file can start here, and who gets which GPU.",
)
def doctor(run_dir: Path | None, config: Path | None) -> None:
    """Show what is installed, what is missing and what this machine can run."""
    if run_dir is not None:
        from outloop.buffer.cli.buffer import show_drift

        return show_drift(run_dir)
    from outloop.engine.launch.doctor import examine

    settings = None
    if config is not None:
        from outloop.buffer.settings import load_settings

        settings = load_settings(config)
    sys.exit(examine(settings=settings))
