"""`outloop init`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.cli.options import CONFIG, SET


@click.command()
@CONFIG
@SET
def init(config: Path, overrides: tuple[str, ...]) -> None:
    """Make the run of CONFIG in its folder and in Redis, for parts that are started elsewhere."""
    from outloop.buffer.settings import load_settings
    from outloop.engine.launch import launcher
    from outloop.engine.launch.model_folder import with_model_folder

    settings = with_model_folder(load_settings(config, overrides))
    launcher.check_before_start(settings)
    click.echo(launcher.make_run(settings).dir)
