"""`outloop server`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.cli.options import ADVERTISE, RUN
from outloop.cli.parts import log_ready, open_as, run_until_signalled


@click.command()
@RUN
@click.option("--index", default=0, show_default=True)
@click.option("--port", default=0, help="0, the default: any free one.")
@ADVERTISE
def server(run_dir: Path, index: int, port: int, advertise: str | None) -> None:
    """Run one server of a run."""
    from outloop.engine.serve.main import serve

    name = f"server-{index}"
    run = open_as(name, run_dir)
    run_until_signalled(
        lambda stop: serve(
            run, index, stop=stop, on_ready=log_ready(name), port=port, advertise=advertise
        )
    )
