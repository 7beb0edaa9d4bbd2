"""`outloop submit`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import CONFIG, SET


@click.group()
def submit() -> None:
    """Hand a run to a cluster's queue."""


@submit.command()
@CONFIG
@SET
@click.option("--dry-run", is_flag=True, help="Print the batch script and submit nothing.")
def slurm(config: Path, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Submit the run of CONFIG as one heterogeneous Slurm job, described by [deploy]."""
    from outloop.buffer.settings import load_settings
    from outloop.engine.launch.deploy.slurm import batch_script, nodes_needed, submit_job
    from outloop.engine.launch.model_folder import with_model_folder
    from outloop.engine.launch.settings_checks import check_before_start

    settings = load_settings(config, overrides)
    script = batch_script(settings, config, overrides)
    for sentence in nodes_needed(settings):
        echo(sentence, err=True)
    if dry_run:
        echo(script, nl=False)
        return
    # Into the cache of this machine, which the nodes share or have to reach the hub for.
    check_before_start(with_model_folder(settings))
    echo(submit_job(settings, script))
