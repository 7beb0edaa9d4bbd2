"""`outloop tracker`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import RUN
from outloop.cli.parts import open_as, stop_event


@click.command()
@RUN
@click.option("--name", required=True, help="As in telemetry.trackers: wandb, mlflow, ...")
@click.option("--once", is_flag=True, help="Send what the run has recorded so far, and end.")
def tracker(run_dir: Path, name: str, once: bool) -> None:
    """Send a run's metrics, settings and episodes to a tracker; `outloop train` starts it itself.

    With --once it works on any run, also one that is over. What was sent is not sent again.
    """
    import os
    import sys

    from outloop.buffer.errors import BufferUnavailable, SettingsError
    from outloop.buffer.reader import BufferReader
    from outloop.buffer.run import load_run_settings
    from outloop.buffer.trackers.process import follow_run, send_once
    from outloop.buffer.trackers.tracker import part_name

    if once:
        rows, episodes = send_once(run_dir.absolute(), load_run_settings(run_dir), name)
        echo(f"{name}: {rows} rows of metrics and {episodes} episodes were sent")
        return
    part = part_name(name)
    run, stop = open_as(part, run_dir.absolute()), stop_event()
    reader = BufferReader.connect(run)

    def say(sentence: str) -> None:
        try:
            reader.registry.report_status(part, {"warning": sentence} if sentence else {})
        except (BufferUnavailable, SettingsError):
            echo(sentence, err=True)

    try:
        follow_run(run, name, stop=stop, say=say)
    finally:
        reader.close()
    # A call that hangs must not hold the run's end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
