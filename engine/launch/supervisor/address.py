"""Where a run's supervisor is found."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from outloop.buffer.whole_file import whole_file

_FILE = "supervisor.json"


class Address:
    """What the run's folder says of its supervisor."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _FILE

    def write(self, socket_path: Path, grace_s: float) -> None:
        """Name this process."""
        process = psutil.Process()
        facts = {
            "pid": process.pid,
            "created": process.create_time(),
            "socket": str(socket_path),
            "grace_s": grace_s,
        }
        with whole_file(self._path) as writing:
            writing.write_text(json.dumps(facts))

    def remove(self) -> None:
        """Name none."""
        self._path.unlink(missing_ok=True)

    def find(self) -> tuple[psutil.Process, Path] | None:
        """The process and its socket; None where there is none on this machine."""
        try:
            facts = json.loads(self._path.read_text())
            process = psutil.Process(facts["pid"])
            is_it = process.create_time() == facts["created"]
            return (process, Path(facts["socket"])) if is_it and process.is_running() else None
        except (FileNotFoundError, psutil.NoSuchProcess):
            return None
