"""trackio, which keeps runs in files on this machine (TRACKIO_DIR)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import trackio

from outloop.buffer.trackers.samples import COLUMNS, Samples, row_of
from outloop.buffer.trackers.tracker import RunFacts, SeenEpisode


class TrackioRun:
    """A run of theirs; after a resume the same one goes on."""

    needs_turns = False

    def __init__(self, run: RunFacts) -> None:
        self._run: Any = trackio.init(
            project=run.project, name=run.run_id, resume="allow", config=dict(run.settings)
        )
        self._samples = Samples.of(run)

    def log_metrics(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One row, by step."""
        self._run.log(dict(values), step=step)

    def log_episodes(self, episodes: Sequence[SeenEpisode]) -> None:
        """A table for each version."""
        for version, chosen in self._samples.choose(episodes):
            frame = pd.DataFrame([row_of(one) for one in chosen], columns=list(COLUMNS))
            self._run.log({"episodes": trackio.Table(dataframe=frame)}, step=version)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
