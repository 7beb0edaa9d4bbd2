"""`outloop router`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.cli.options import ADVERTISE, RUN
from outloop.cli.parts import log_ready, open_as, run_until_signalled


@click.command()
@RUN
@click.option("--port", type=int, help="In place of router.port.")
@ADVERTISE
def router(run_dir: Path, port: int | None, advertise: str | None) -> None:
    """Run the router of a run."""
    run = open_as("router", run_dir)
    from outloop.router.main import own_the_process, serve

    own_the_process()
    run_until_signalled(
        lambda stop: serve(
            run, stop=stop, on_ready=log_ready("router"), port=port, advertise=advertise
        )
    )
