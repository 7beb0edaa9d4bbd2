"""`outloop server`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.cli.options import ADVERTISE, RUN
from outloop.cli.parts import log_ready, open_as, run_until_signalled


@click.command()
@RUN
@click.option("--index", default=0, show_default=True)
@click.option(
    "--frozen", is_flag=True, help="Hold an earlier version, as one of server.num_frozen."
)
@click.option("--port", default=0, help="0, the default: any free one.")
@ADVERTISE
def server(run_dir: Path, index: int, frozen: bool, port: int, advertise: str | None) -> None:
    """Run one server of a run."""
    from outloop.engine.machine.network_interface import name_network

    name = f"frozen-{index}" if frozen else f"server-{index}"
    run = open_as(name, run_dir)
    # Threads keep the cores that they begin with.
    name_network(run.settings)
    from outloop.engine.serve.main import serve, serve_frozen

    run_part = serve_frozen if frozen else serve
    run_until_signalled(
        lambda stop: run_part(
            run, index, stop=stop, on_ready=log_ready(name), port=port, advertise=advertise
        )
    )
