"""`outloop archiver`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.cli.options import RUN


@click.command()
@RUN
def archiver(run_dir: Path) -> None:
    """Keep what a run's episodes were, in RUN/trajectories; `outloop train` starts it itself."""
    import signal
    import threading

    from outloop.buffer.run import load_run
    from outloop.buffer.telemetry import configure_logging
    from outloop.buffer.trajectories.archiver import archive_run

    run = load_run(run_dir)
    configure_logging("archiver", run.settings.telemetry.log_level)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    archive_run(run, stop=stop)
