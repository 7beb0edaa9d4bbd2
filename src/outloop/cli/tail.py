"""`outloop tail`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from outloop.buffer.terminal import echo
from outloop.cli.episodes import MAX_CHARS, print_transcript

_INTERVAL_S = 1.0


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--failed", is_flag=True, help="Only episodes that failed.")
@click.option("--full", is_flag=True, help="Texts as they are, not shortened.")
@click.option("--old", is_flag=True, help="Begin with those that are in Redis already.")
def tail(run_dir: Path, failed: bool, full: bool, old: bool) -> None:
    """Show a run's episodes as they close, with what was asked, answered and scored.

    Ends with the run, or by Ctrl-C.
    """
    from outloop.buffer.open_run import joined
    from outloop.buffer.transcripts import Transcripts
    from outloop.engine.launch.stop_signals import stop_on_signals

    with stop_on_signals() as stop, joined(run_dir) as reader:
        transcripts = Transcripts(reader, run_dir)
        if not old:
            transcripts.skip_old()
        is_last = False
        if reader.run_state() != "running":
            hint = f"the run is not up; `outloop episodes --run {run_dir}` shows what it played"
            echo(hint, err=True)
        while not is_last:
            started_at = time.monotonic()
            is_last = reader.run_state() != "running"
            for transcript in transcripts.read_new():
                if transcript.is_failed or not failed:
                    print_transcript(transcript, None if full else MAX_CHARS)
                if stop.is_set():
                    return
            remaining_s = _INTERVAL_S - (time.monotonic() - started_at)
            if not is_last and stop.wait(max(0.0, remaining_s)):
                return
