"""Which process leads the parts of a run on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from outloop.buffer.whole_file import whole_file

LAUNCHER_FILE = "launcher.json"


@contextmanager
def named_launcher(run_dir: Path) -> Iterator[None]:
    """While it lasts, the run's folder names this process as the one that leads its parts."""
    path = run_dir / LAUNCHER_FILE
    process = psutil.Process()
    with whole_file(path) as writing:
        writing.write_text(json.dumps({"pid": process.pid, "created": process.create_time()}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_launcher(run_dir: Path) -> psutil.Process | None:
    """The process that leads the run's parts on this machine; None when there is none."""
    try:
        named = json.loads((run_dir / LAUNCHER_FILE).read_text())
        process = psutil.Process(named["pid"])
        return process if process.create_time() == named["created"] else None
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
