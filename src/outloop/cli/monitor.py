"""`outloop monitor`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.cli.options import RUN


@click.command()
@RUN
def monitor(run_dir: Path) -> None:
    """Watch a run for alarms and show its metrics to Prometheus; `outloop train` starts it."""
    import signal
    import threading

    from outloop.buffer.monitor.process import monitor_run
    from outloop.buffer.run import load_run
    from outloop.buffer.telemetry import configure_logging

    run = load_run(run_dir.absolute())
    configure_logging("monitor", run.settings.telemetry.log_level)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    monitor_run(run, stop=stop)
