"""A tracker of a user's own: notes what it is given, and fails or hangs when a file says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from outloop.buffer.trackers.tracker import RunFacts, SeenEpisode


class Noting:
    """Appends a line for each call to `noted.jsonl` in the run's folder."""

    needs_turns = True

    def __init__(self, run: RunFacts) -> None:
        self._dir = run.dir
        self._note(["start", run.name, run.project])

    def log_metrics(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Note the step and the names."""
        if (self._dir / "fail").exists():
            raise ConnectionError("the tracker's server is away")
        if (self._dir / "hang").exists():
            threading.Event().wait()
        self._note(["metrics", step, sorted(values)])

    def log_episodes(self, episodes: Sequence[SeenEpisode]) -> None:
        """Note ids and numbers of turns."""
        self._note(["episodes", [(one.episode_id, len(one.turns)) for one in episodes]])

    def close(self) -> None:
        """Note the end."""
        self._note(["close"])

    def _note(self, row: list[object]) -> None:
        with (self._dir / "noted.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def noted(run_dir: Path) -> list[list[object]]:
    """What was noted so far."""
    path = run_dir / "noted.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
