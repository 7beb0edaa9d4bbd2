"""What a tracker is: TensorBoard, Weights & Biases, MLflow, trackio, OTLP, or one of your own.

A tracker runs in a process of its own that reads the run's folder. It may fail, hang or be slow:
nothing of the run waits for it, and what it has not taken stays in the folder.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outloop.buffer.errors import SettingsError
from outloop.buffer.user_code import import_object, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What a tracker learns of its run."""

    run_id: str
    """Of this run alone; the same after a resume."""
    name: str
    dir: Path
    project: str
    """telemetry.project."""
    settings: Mapping[str, Any]
    """Resolved, by section; secrets are in files that it names, never in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenTurn:
    """A turn of an ended episode."""

    turn_id: str
    parent_turn_id: str | None
    prompt_text: str
    """What the turn added to its branch."""
    output_text: str
    num_prompt_tokens: int
    num_output_tokens: int
    policy_version: int | None
    """Of its first token."""
    finish_reason: str
    branch_cause: str
    temperature: float
    started_at: float
    """Unix seconds."""
    finished_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenEpisode:
    """An ended episode, as the archive holds it."""

    episode_id: str
    task_id: str
    group_id: str | None
    attempt: int
    purpose: str
    fate: str
    reason: str
    outcome: str | None
    reward: float | None
    components: Mapping[str, float]
    policy_version: int | None
    """The newest one that sampled in it."""
    num_output_tokens: int
    error: str
    text: str
    opened_at: float
    """Unix seconds."""
    closed_at: float | None
    ended_at: float
    turns: tuple[SeenTurn, ...] = ()
    """Empty where the tracker's `needs_turns` is False."""


class Tracker(Protocol):
    """Takes what happens in a run. Each call may take its time; one that raises is repeated."""

    needs_turns: bool
    """Whether episodes come with their turns."""

    def log_metrics(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """The finite numbers of a row of metrics.jsonl; `time`: Unix seconds. Names are open: a
        verifier's components and a user's own are among them. After a resume a step comes again."""

    def log_episodes(self, episodes: Sequence[SeenEpisode]) -> None:
        """Episodes that ended, each once, in the order in which they ended."""

    def close(self) -> None:
        """Send what is left; the run is over, or goes on later."""


class TrackerFactory(Protocol):
    """Makes a tracker of a run; called again after a failure and after a resume."""

    def __call__(self, run: RunFacts) -> Tracker: ...


TRACKERS: dict[str, tuple[str, str]] = {
    "tensorboard": ("outloop.buffer.trackers.tensorboard:TensorBoard", "tensorboardX"),
    "wandb": ("outloop.buffer.trackers.wandb_runs:WandbRun", "wandb"),
    "mlflow": ("outloop.buffer.trackers.mlflow_runs:MlflowRun", "mlflow"),
    "trackio": ("outloop.buffer.trackers.trackio_runs:TrackioRun", "trackio"),
    "otlp": ("outloop.buffer.trackers.otlp:OtlpSpans", "opentelemetry.exporter.otlp.proto.http"),
}
"""Name -> where it is, and the package that it needs."""


def check_tracker(name: str) -> None:
    """Refuse a tracker that could not run here.

    Raises:
        SettingsError: unknown, or its package is not installed.
    """
    if name in TRACKERS:
        package = TRACKERS[name][1]
        try:
            is_there = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise SettingsError(
                f"telemetry.trackers={name!r} needs the package {package}, which is not installed; "
                f"run pip install 'outloop[{name}]', or leave it out"
            )
        return
    if ":" not in name:
        raise SettingsError(
            f"telemetry.trackers={name!r} is unknown; {nearest(name, TRACKERS)}"
            f"{', '.join(TRACKERS)} and your own as module:function are allowed"
        )


def factory_of(name: str, import_dir: Path | None = None) -> TrackerFactory:
    """The factory of a tracker: one of TRACKERS, or module:attribute, looked for in `import_dir`
    too.

    Raises:
        SettingsError: it cannot be had.
    """
    check_tracker(name)
    path = TRACKERS[name][0] if name in TRACKERS else name
    found: TrackerFactory = import_object(path, setting="telemetry.trackers", import_dir=import_dir)
    return found


def part_name(name: str) -> str:
    """What the process of a tracker is called in logs, statuses and files."""
    plain = "".join(c if c.isalnum() else "-" for c in name)
    return f"tracker-{plain}"
