"""The settings of logs, trackers and metrics, and of alarms: `[telemetry]` and `[alarms]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from outloop.buffer.settings.section import Section


class TelemetrySettings(Section):
    """Logs and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of runs/NAME/logs."""
    trackers: tuple[str, ...] = ()
    """Where metrics, settings and sample episodes go beside metrics.jsonl: tensorboard, wandb,
    mlflow, trackio, otlp, and your own as module:function (docs/trackers.md)."""
    project: str = Field("outloop", min_length=1)
    """What the run is entered under: the project of wandb and trackio, the experiment of mlflow."""
    num_sample_episodes: int = Field(4, ge=0)
    """Episodes of each policy version that trackers show as a table."""
    tracker_timeout_s: float = Field(30.0, gt=0)
    """A tracker whose call takes longer gets a line on the terminal; at the end of a run it is
    given up then."""
    prometheus_host: str = "127.0.0.1"
    """Address of the page for Prometheus; 0.0.0.0 for other machines."""
    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """Port of one page with the metrics of every part; 0: any free one. Left out: no page."""
    view_host: str = "127.0.0.1"
    """Address of the run's page; 0.0.0.0 for other machines, without encryption."""
    view_port: int | None = Field(None, ge=0, le=65535)
    """Port of the page of `outloop view`, which `outloop train` then shows while the run goes on;
    0: any free one. Left out: no page."""
    no_signal_warning_steps: int = Field(3, gt=0)
    """Warn after this many steps in a row without a group that had signal."""


class AlarmSettings(Section):
    """When the monitor says that a run goes wrong."""

    enabled: bool = True
    """False: nothing is watched."""
    webhook_file: Path | None = None
    """File with the URL that each alarm is posted to as JSON; the URL may hold a key."""
    num_steps: int = Field(10, ge=2)
    """Steps whose mean is compared with what was before."""
    reward_drop: float = Field(0.5, gt=0)
    """Share of what the reward had gained that may be lost, beyond four standard errors."""
    gap_factor: float = Field(10.0, gt=1)
    """By how much the logprob gap may grow over that of the first steps."""
    min_gap: float | None = Field(None, gt=0)
    """Nats; a smaller gap is no rise. None: 1e-6 where servers and trainer compute in float32, 0.02
    in bfloat16."""
    max_gap: float | None = Field(None, gt=0)
    """Nats; a larger mean gap of one step, also the first, is an alarm. None: 1e-5 in float32, 0.1
    in bfloat16, as `min_gap`. Servers with quantized weights may need more."""
    max_stale_share: float = Field(0.9, gt=0, le=1)
    """Of the groups that are over, those dropped as too old."""
    min_throughput: float = Field(0.5, gt=0, lt=1)
    """Of the best tokens per second that so many steps had."""
    min_disk_gb: float = Field(2.0, ge=0)
    """Free on the disk of the run's folder."""
    replaced_share: float = Field(0.5, gt=0, le=1)
    """Of env.max_replaced_share, at which the run stops."""
    max_silence_s: float = Field(3600.0, gt=0)
    """Longest time without a step."""
