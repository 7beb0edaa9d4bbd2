"""`outloop archiver`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from outloop.cli.options import RUN
from outloop.cli.parts import open_as, stop_event


@click.command()
@RUN
def archiver(run_dir: Path) -> None:
    """Keep what a run's episodes were, in RUN/trajectories; `outloop train` starts it itself."""
    # Arrow's own allocator keeps the pages of what was merged, more with each merge; that of the
    # system gives them back. Read when Arrow is imported.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from outloop.buffer.trajectories.archiver import archive_run

    archive_run(open_as("archiver", run_dir), stop=stop_event())
