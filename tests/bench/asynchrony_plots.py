"""The plots of `make bench-async`, from the results of its runs.

Owns: eight panels in one picture. Does not own: measuring, what a figure means (asynchrony.py).
Invariant: draws what is there; a level that was not run has no bar.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib as mpl

WIDTH = 0.38


class Measured(Protocol):
    """What is read of a run."""

    level: str
    step_s: float
    bare_step_s: float
    plan_step_s: float
    wait_share: float
    evaluation_share: float
    update_s: float
    publish_s: float
    overhead_s: float
    staleness_mean: float
    staleness_max: float
    slow_share_ratio: float
    discarded_time_share: float
    gap_by_age: dict[str, float]
    eval_steps: list[int]
    eval_seconds: list[float]
    eval_rewards: list[float]
    eval_errors: list[float]


def draw(results: Sequence[Measured], path: Path) -> None:
    """Write the picture."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(result.level for result in results))

    def mean(name: str, of: Callable[[Measured], float]) -> float:
        return statistics.fmean(of(result) for result in results if result.level == name)

    figure, axes = plt.subplots(2, 4, figsize=(20, 9.5), dpi=100, layout="constrained")
    seeds = max(sum(result.level == name for result in results) for name in names)
    figure.suptitle(
        f"Levels of asynchrony, {seeds} seed(s); the calculator's policy, agents that wait by a "
        "heavy or a light tail"
    )
    _speed(axes[0][0], names, mean)
    _against_bare(axes[0][1], names, mean)
    _rewards(axes[0][2], names, results, "eval_steps", "step")
    _rewards(axes[0][3], names, results, "eval_seconds", "seconds, evaluation left out")
    _staleness(axes[1][0], names, mean)
    _gaps(axes[1][1], names, results)
    _losses(axes[1][2], names, mean)
    _times(axes[1][3], names, mean)
    figure.savefig(path)
    plt.close(figure)


def _bars(axis: Any, names: Sequence[str], *rows: tuple[str, Sequence[float]]) -> None:
    """Groups of bars, each with its value on it."""
    width = 2 * WIDTH / len(rows)
    for number, (label, values) in enumerate(rows):
        offset = (number - (len(rows) - 1) / 2) * width
        bars = axis.bar([i + offset for i in range(len(names))], values, width, label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axis.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axis.margins(y=0.15)
    axis.grid(axis="y", alpha=0.25)


def _speed(axis: Any, names: Sequence[str], mean: Callable[..., float]) -> None:
    def ratio(name: str, of: Callable[[Measured], float]) -> float:
        base = f"{name.split('/')[0]}/sync"
        return mean(base, of) / mean(name, of) if base in names else float("nan")

    _bars(
        axis,
        names,
        ("measured", [ratio(name, lambda r: r.step_s) for name in names]),
        ("bare loop", [ratio(name, lambda r: r.bare_step_s) for name in names]),
    )
    axis.axhline(1.0, color="0.4", linewidth=1)
    axis.set_title("steps per hour over synchronous, of each tail")
    axis.legend(fontsize=8, loc="upper left")


def _against_bare(axis: Any, names: Sequence[str], mean: Callable[..., float]) -> None:
    bare = [mean(n, lambda r: r.bare_step_s) / mean(n, lambda r: r.step_s) for n in names]
    _bars(axis, names, ("of the bare loop", bare))
    axis.axhline(1.0, color="0.4", linewidth=1)
    axis.axhline(0.9, color="C0", linewidth=1, linestyle=":")
    axis.set_title("steps per hour over the bare loop's (dots: 0.9)")
    axis.margins(y=0.3)
    axis.legend(fontsize=8, loc="upper left")


def _rewards(
    axis: Any, names: Sequence[str], results: Sequence[Measured], x_name: str, label: str
) -> None:
    for number, name in enumerate(names):
        runs = [result for result in results if result.level == name and result.eval_steps]
        points = [
            (
                statistics.fmean(getattr(run, x_name)[i] for run in runs),
                statistics.fmean(run.eval_rewards[i] for run in runs),
                _error([run.eval_rewards[i] for run in runs], runs[0].eval_errors[i]),
            )
            for i in range(min((len(run.eval_steps) for run in runs), default=0))
        ]
        if not points:
            continue
        # Levels of the light tail are dashed; a little apart, so that no error hides another.
        nudge = (number - len(names) / 2) * 0.06 if x_name == "eval_steps" else 0.0
        style = "-" if name.startswith("heavy") else "--"
        xs, ys, errors = zip(*points, strict=True)
        axis.errorbar(
            [x + nudge for x in xs],
            ys,
            yerr=errors,
            fmt=f"o{style}",
            markersize=4,
            linewidth=1.2,
            capsize=2,
            color=f"C{number}",
            label=name,
        )
    axis.set_xlabel(label)
    axis.set_title("held-out reward at equal " + ("steps" if x_name == "eval_steps" else "time"))
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, loc="lower right")


def _error(values: Sequence[float], of_one: float) -> float:
    """Standard error of the mean: between seeds where there are several."""
    if len(values) < 2:
        return of_one
    return statistics.stdev(values) / len(values) ** 0.5


def _staleness(axis: Any, names: Sequence[str], mean: Callable[..., float]) -> None:
    _bars(
        axis,
        names,
        ("mean", [mean(name, lambda r: r.staleness_mean) for name in names]),
        ("largest", [mean(name, lambda r: r.staleness_max) for name in names]),
    )
    axis.set_title("staleness of trained samples, versions")
    axis.legend(fontsize=8)


def _gaps(axis: Any, names: Sequence[str], results: Sequence[Measured]) -> None:
    ages = sorted({age for result in results for age in result.gap_by_age})
    for number, name in enumerate(names):
        known = [
            (i, statistics.fmean(found))
            for i, age in enumerate(ages)
            if (
                found := [
                    result.gap_by_age[age]
                    for result in results
                    if result.level == name and age in result.gap_by_age
                ]
            )
        ]
        if known:
            style = "-" if name.startswith("heavy") else "--"
            xs, ys = zip(*known, strict=True)
            axis.plot(xs, ys, f"o{style}", markersize=4, color=f"C{number}", label=name)
    axis.set_xticks(range(len(ages)), [age.removeprefix("age_") for age in ages])
    axis.set_xlabel("age of the token, versions")
    axis.set_yscale("log")
    axis.set_title("mean |policy - behavior| logprob by age")
    axis.grid(alpha=0.25)
    if ages:
        axis.legend(fontsize=7)


def _losses(axis: Any, names: Sequence[str], mean: Callable[..., float]) -> None:
    _bars(
        axis,
        names,
        ("slow trained over slow started", [mean(n, lambda r: r.slow_share_ratio) for n in names]),
        ("agent time discarded", [mean(n, lambda r: r.discarded_time_share) for n in names]),
    )
    axis.axhspan(0.95, 1.05, color="C0", alpha=0.12)
    axis.axhline(0.05, color="C1", linewidth=1, linestyle=":")
    axis.set_title("slow episodes (band: wanted; dots: 0.05 discarded)")
    axis.margins(y=0.3)
    axis.legend(fontsize=8, loc="upper left")


def _times(axis: Any, names: Sequence[str], mean: Callable[..., float]) -> None:
    parts = {
        "waiting for groups": [mean(n, lambda r: r.wait_share * r.step_s) for n in names],
        "update": [mean(n, lambda r: r.step_s * (1 - r.wait_share) - r.publish_s) for n in names],
        "publish and the rest": [mean(n, lambda r: r.publish_s) for n in names],
        "evaluation": [
            mean(n, lambda r: r.step_s * r.evaluation_share / (1 - r.evaluation_share))
            for n in names
        ],
    }
    bottom = [0.0] * len(names)
    for label, values in parts.items():
        axis.bar(range(len(names)), values, 2 * WIDTH, bottom=bottom, label=label)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    axis.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axis.set_title("the trainer's time, seconds a step")
    axis.grid(axis="y", alpha=0.25)
    axis.legend(fontsize=8)
