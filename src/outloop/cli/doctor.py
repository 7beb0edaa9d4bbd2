"""`outloop doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from outloop.cli.options import ENGINES


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
    help="Show also whether the run of this settings file can start here, and who gets which GPU. "
    "A model of the hub is downloaded, as `outloop train` would.",
)
@click.option(
    "--on",
    type=ENGINES,
    default="here",
    show_default=True,
    help="With --config: examine every node that the run would use. ray: of a Ray cluster; slurm: "
    "of this job, or of an allocation of the run's shape.",
)
def doctor(run_dir: Path | None, config: Path | None, on: Literal["here", "slurm", "ray"]) -> None:
    """Show what is installed, what is missing and what this machine can run."""
    if on != "here" and config is None:
        raise click.UsageError(f"--on {on} needs --config PATH: the run whose nodes are examined")
    if run_dir is not None:
        from outloop.cli.buffer import show_drift

        return show_drift(run_dir)
    from outloop.engine.launch.doctor import examine

    settings = None
    if config is not None:
        from outloop.buffer.settings import load_settings
        from outloop.engine.launch.model_folder import with_model_folder

        settings = load_settings(config)
        if on != "here":
            from outloop.engine.launch.nodes.examination import examine_run_nodes

            sys.exit(examine_run_nodes(settings, config, on))
        settings = with_model_folder(settings)
    sys.exit(examine(settings=settings))
