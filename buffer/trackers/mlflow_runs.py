"""MLflow. The server's address is MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from outloop.buffer.trackers.samples import COLUMNS, Samples, row_of
from outloop.buffer.trackers.tracker import RunFacts, SeenEpisode

_TAG = "outloop.run_id"
_MAX_PARAM_CHARS = 6000
_MAX_BATCH = 1000
"""Metrics of one request, and 100 parameters: limits of their API."""
_MAX_PARAMS = 100


class MlflowRun:
    """A run of theirs, in the experiment telemetry.project; after a resume the same one goes on."""

    needs_turns = False

    def __init__(self, run: RunFacts) -> None:
        # Otherwise each table draws a bar into the log.
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(run.project)
        experiment: str = (
            self._client.create_experiment(run.project) if found is None else found.experiment_id
        )
        known = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run.run_id}'")
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
        else:
            made = self._client.create_run(experiment, tags={_TAG: run.run_id}, run_name=run.name)
            self._id = made.info.run_id
            self._log_settings(run.settings)
        self._samples = Samples.of(run)

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        params = [Param(n, str(v)[:_MAX_PARAM_CHARS]) for n, v in _flat(settings, "")]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MAX_PARAMS])
        self._client.log_dict(self._id, dict(settings), "settings.json")

    def log_metrics(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One metric for each name; characters that they do not allow become _."""
        metrics = [
            Metric(re.sub(r"[^\w\-. /]", "_", name), value, int(time * 1000), step)
            for name, value in values.items()
        ]
        for first in range(0, len(metrics), _MAX_BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MAX_BATCH])

    def log_episodes(self, episodes: Sequence[SeenEpisode]) -> None:
        """The table `episodes.json`, which grows with each version."""
        for _, chosen in self._samples.choose(episodes):
            rows = [row_of(one) for one in chosen]
            data = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
            self._client.log_table(self._id, data, "episodes.json")

    def close(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._id)


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found += _flat(value, f"{path}.")
        else:
            found.append((path, value))
    return found
