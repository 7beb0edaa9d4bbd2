"""`outloop monitor`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.cli.options import RUN
from outloop.cli.parts import open_as, stop_event


@click.command()
@RUN
def monitor(run_dir: Path) -> None:
    """Watch a run for alarms and show its metrics to Prometheus; `outloop train` starts it."""
    from outloop.buffer.monitor.process import monitor_run

    monitor_run(open_as("monitor", run_dir.absolute()), stop=stop_event())
