"""`outloop viewer`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from outloop.cli.options import RUN
from outloop.cli.parts import open_as


@click.command()
@RUN
def viewer(run_dir: Path) -> None:
    """Show a run's page, as telemetry.view_port says; `outloop train` starts it."""
    from outloop.buffer.errors import SettingsError
    from outloop.buffer.reader import BufferReader
    from outloop.view import require_packages

    run = open_as("viewer", run_dir.absolute())
    telemetry = run.settings.telemetry
    if telemetry.view_port is None:
        raise SettingsError("telemetry.view_port is not set: give a port, or 0 for any free one")
    require_packages()
    from outloop.view.server import find_runs, serve_page

    def enter(url: str) -> None:
        with closing(BufferReader.connect_patiently(run)) as reader:
            reader.registry.register_part("viewer", {"url": url})

    serve_page(
        find_runs([run.dir]),
        host=telemetry.view_host,
        port=telemetry.view_port,
        key=run.keys.viewer_key,
        on_ready=enter,
    )
