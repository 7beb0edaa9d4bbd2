"""Weights & Biases. WANDB_MODE=offline, WANDB_API_KEY, WANDB_ENTITY and the like are theirs; what
they keep on this machine is in the run's folder `wandb`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from outloop.buffer.trackers.samples import COLUMNS, Samples, row_of
from outloop.buffer.trackers.tracker import RunFacts, SeenEpisode


class WandbRun:
    """A run of theirs; after a resume the same one goes on."""

    needs_turns = False

    def __init__(self, run: RunFacts) -> None:
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.dir),
            config=dict(run.settings),
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True),
        )
        # Rows of evaluations and of episodes come between steps, so their own counter will not do.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._samples = Samples.of(run)

    def log_metrics(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One row, by `step`."""
        self._run.log({"step": step, "time": time, **values})

    def log_episodes(self, episodes: Sequence[SeenEpisode]) -> None:
        """A table for each version."""
        for version, chosen in self._samples.choose(episodes):
            rows = [row_of(one) for one in chosen]
            table = wandb.Table(columns=list(COLUMNS), data=rows, allow_mixed_types=True)
            self._run.log({"step": version, "episodes": table})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
