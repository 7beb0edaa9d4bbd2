"""What a person looks at when a run is over: a table and a picture of the learning curve.

Both show what metrics.jsonl holds; a run without points gets no picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outloop.buffer.rich_terminal import PlainTable
from outloop.buffer.telemetry import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from outloop.buffer.evaluations.ratings import Rating


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPoint:
    """One evaluation: mean reward and its standard error at a policy version."""

    step: int
    reward: float
    se: float
    versions: str = ""
    """Which sampled it, where they are several: `5 to 17`."""

    @property
    def text(self) -> str:
        """For a person."""
        said = f" (of versions {self.versions})" if self.versions else ""
        return f"{self.reward:.3f} +- {self.se:.3f}{said}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Training reward per step and evaluations, in step order."""

    steps: tuple[int, ...]
    rewards: tuple[float, ...]
    """Empty for SFT."""
    losses: tuple[float, ...]
    failed_shares: tuple[float, ...]
    """Share of each step's episodes that failed; empty for SFT."""
    sampled: tuple[EvalPoint, ...]
    greedy: tuple[EvalPoint, ...]


def _points(rows: Sequence[dict[str, Any]], kind: str) -> tuple[EvalPoint, ...]:
    return tuple(
        EvalPoint(
            step=row["step"],
            reward=row[f"eval/{kind}_reward"],
            se=row.get(f"eval/{kind}_se") or 0.0,
            versions=_versions(row),
        )
        for row in rows
        if row.get(f"eval/{kind}_reward") is not None
    )


def _versions(row: dict[str, Any]) -> str:
    first, last = (row.get(f"eval/{name}_version") for name in ("oldest", "newest"))
    is_known = row.get("eval/mixed_share") and first is not None and last is not None
    return f"{first:.0f} to {last:.0f}" if is_known else ""


def read_curve(run_dir: Path) -> Curve:
    """The curve recorded in `run_dir`; of repeated steps (after a resume) the last one counts."""
    rows = sorted(
        {(row["step"], "train/loss" in row): row for row in read_metrics(run_dir)}.values(),
        key=lambda row: row["step"],
    )
    trained = [row for row in rows if "train/loss" in row]
    rewarded = [row for row in trained if row.get("train/reward_mean") is not None]
    return Curve(
        steps=tuple(row["step"] for row in trained),
        rewards=tuple(row["train/reward_mean"] for row in rewarded),
        failed_shares=tuple(
            row["train/failed_share"]
            for row in trained
            if row.get("train/failed_share") is not None
        ),
        losses=tuple(row["train/loss"] for row in trained if row["train/loss"] is not None),
        sampled=_points(rows, "sampled"),
        greedy=_points(rows, "greedy"),
    )


def result_table(run_dir: Path) -> PlainTable:
    """First and last evaluation and training reward of a run; of training, means of ten steps."""
    curve = read_curve(run_dir)
    table = PlainTable(title=f"run {run_dir.name}")
    for heading in ("", "first", "last"):
        table.add_plain_column(heading, justify="left" if not heading else "right")
    if curve.rewards:
        table.add_plain_row(("training reward, sampled", *_ends(curve.rewards)))
        if any(curve.failed_shares):
            table.add_plain_row(("share of failed episodes", *_ends(curve.failed_shares)))
    elif curve.losses:
        table.add_plain_row(("training loss", f"{curve.losses[0]:.3f}", f"{curve.losses[-1]:.3f}"))
    for name, points in (("evaluation, sampled", curve.sampled), ("greedy", curve.greedy)):
        if points:
            table.add_plain_row((name, points[0].text, points[-1].text))
    table.add_plain_row(("steps", "", str(curve.steps[-1] if curve.steps else 0)))
    return table


def _ends(values: Sequence[float]) -> tuple[str, str]:
    """Means of the first and of the last steps, ten or a quarter of them."""
    number = min(10, max(1, len(values) // 4))
    first, last = values[:number], values[-number:]
    return f"{sum(first) / number:.3f}", f"{sum(last) / number:.3f}"


def draw_curve(run_dir: Path) -> Path | None:
    """Write `curve.png` into the run folder; None when nothing was recorded or no matplotlib."""
    curve = read_curve(run_dir)
    if not curve.rewards and not curve.sampled:
        return None
    try:
        figure = curve_figure(curve)
    except ImportError:
        return None
    path = run_dir / "curve.png"
    figure.savefig(path)
    return path


def curve_figure(curve: Curve) -> Figure:
    """The learning curve: training batches, and evaluations with 95% bars.

    No state of pyplot is used, so that it neither needs a screen nor changes a notebook's backend.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=130)
    axes = figure.subplots()
    axes.plot(
        curve.steps[: len(curve.rewards)],
        curve.rewards,
        color="#9db4c8",
        linewidth=1.2,
        label="training batches",
    )
    for points, name, color in (
        (curve.sampled, "held out, sampled", "#1f5f99"),
        (curve.greedy, "held out, greedy", "#c0561f"),
    ):
        if points:
            axes.errorbar(
                [point.step for point in points],
                [point.reward for point in points],
                yerr=[1.96 * point.se for point in points],
                color=color,
                marker="o",
                markersize=4,
                capsize=3,
                linewidth=1.6,
                label=name,
            )
    mixed = [one for one in (*curve.sampled, *curve.greedy) if one.versions]
    if mixed:
        axes.plot(
            [one.step for one in mixed],
            [one.reward for one in mixed],
            color="white",
            linestyle="",
            marker="o",
            markersize=2,
            markeredgewidth=0,
            zorder=5,
            label="(hollow: of several versions)",
        )
    axes.legend(frameon=False, loc="lower right")
    _finish(axes, "reward")
    figure.tight_layout()
    return figure


def ratings_figure(ratings: Sequence[Rating]) -> Figure:
    """Elo over versions, with 95% bars.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=130)
    axes = figure.subplots()
    axes.errorbar(
        [one.player for one in ratings],
        [one.elo for one in ratings],
        yerr=[one.elo - one.interval[0] for one in ratings],
        color="#1f5f99",
        marker="o",
        markersize=4,
        capsize=3,
        linewidth=1.4,
    )
    _finish(axes, "Elo above the first version")
    axes.set_xlabel("policy version")
    figure.tight_layout()
    return figure


def metrics_figure(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Figure:
    """A chart for each metric over the steps that have it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 2.6 * len(names)), dpi=130)
    charts = figure.subplots(len(names), 1, squeeze=False)[:, 0]
    for axes, name in zip(charts, names, strict=True):
        points = {row["step"]: row[name] for row in rows if row.get(name) is not None}
        steps = sorted(points)
        axes.plot(steps, [points[step] for step in steps], color="#1f5f99", linewidth=1.6)
        _finish(axes, name)
    figure.tight_layout()
    return figure


def _finish(axes: Any, label: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
