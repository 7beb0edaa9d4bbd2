"""The learning curve of an example's README: what `make curves EXAMPLE=two_roles` runs.

    python examples/curves.py two_roles          # SEED=0
    python examples/curves.py customer --config frozen_customer.toml

A made policy, the warm start if the example has one, and its run: curve.toml where there is one, or
run.toml. Everything lands in runs/curve-NAME; the picture and its figures are copied into the
example's folder, and what its README says of them is printed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.figure import Figure

EXAMPLES = Path(os.path.relpath(Path(__file__).resolve().parent))
POLICY_TOKENS = 2048
SHOWN = {"two_roles": {"reward/guessed": "right guesses"}}
"""Metrics of the picture; the rewards of training where an example has no entry."""
REWARDS = {"train/reward_mean": "training episodes"}
HELD_OUT = ("eval/sampled_reward", "eval/sampled_se")
STOP_TIMEOUT_S = 90


def run(command: list[str]) -> None:
    """A program, its progress on this terminal; what it exits with is passed on."""
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # Ctrl-C reached it too: it stops its parts and then ends.
        process.wait(timeout=STOP_TIMEOUT_S)
        raise
    if code != 0:
        sys.exit(code)


def train(config: Path, folder: Path, name: str, model: Path, seed: int) -> float:
    """`outloop train` in `folder`; seconds."""
    settings = {"run.dir": folder, "run.name": name, "run.seed": seed, "model.path": model}
    overrides = [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]
    started = time.monotonic()
    run([sys.executable, "-m", "outloop.cli", "train", str(config), *overrides])
    return time.monotonic() - started


def play(example: Path, config: Path, folder: Path, seed: int) -> tuple[Path, dict[str, float]]:
    """The run's folder, and how long its parts took."""
    made = ["new-policy", "--out", str(folder / "policy"), "--seed", str(seed)]
    made += ["--max-context-tokens", str(POLICY_TOKENS)]
    if (example / "tasks.py").exists():
        made += ["--conversations", "tasks:conversations", "--import-dir", str(example)]
    run([sys.executable, "-m", "outloop.cli", *made])
    model, seconds = folder / "policy", {}
    if (example / "warm_start.toml").exists():
        took = train(example / "warm_start.toml", folder, "warm-start", model, seed)
        model, seconds["warm start"] = folder / "warm-start" / "hf", took
    seconds["RL"] = train(config, folder, "rl", model, seed)
    return folder / "rl", seconds


def figures(run_folder: Path, shown: dict[str, str]) -> list[dict[str, float]]:
    """What the picture shows, a row a step."""
    names = ("step", *shown, *HELD_OUT)
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    rows = [
        {name: row[name] for name in names if row.get(name) is not None}
        for row in map(json.loads, lines)
    ]
    return [row for row in rows if len(row) > 1]


def column(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps that have it, and its values."""
    found = [row for row in rows if name in row]
    return [row["step"] for row in found], [row[name] for row in found]


def draw(rows: list[dict[str, float]], shown: dict[str, str], path: Path) -> None:
    """Each step's mean over its episodes, and held-out tasks with a standard error."""
    figure = Figure(figsize=(7.5, 4.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    for name, label in shown.items():
        axes.plot(*column(rows, name), linewidth=1.2, label=label)
    points = column(rows, HELD_OUT[0])
    if points[0]:
        errors = column(rows, HELD_OUT[1])[1]
        axes.errorbar(*points, yerr=errors, fmt="o", capsize=3, color="black", label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward, T = 1")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)


def page_lines(
    rows: list[dict[str, float]], shown: dict[str, str], seconds: dict[str, float], seed: int
) -> str:
    """What the README says of the run."""
    took = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    load = "/".join(f"{value:.0f}" for value in os.getloadavg())
    day = datetime.now(UTC)
    lines = [f"seed {seed}, {day:%Y-%m-%d}, {os.cpu_count()} cores, load {load}; {took}"]
    for name, label in shown.items():
        values = column(rows, name)[1]
        first, last = (sum(some) / len(some) for some in (values[:5], values[-5:]))
        lines.append(f"{label}: {first:.2f} in the first five steps, {last:.2f} in the last five")
    for row in rows:
        if HELD_OUT[0] in row:
            lines.append(
                f"| step {row['step']} | {row[HELD_OUT[0]]:.3f} +- {row[HELD_OUT[1]]:.3f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the learning curve of an example.")
    parser.add_argument("name", help="a folder of examples/")
    parser.add_argument("--config", help="a settings file there, whose picture gets its name")
    arguments = parser.parse_args()
    example = EXAMPLES / arguments.name
    picture = "curve"
    if arguments.config:
        config = example / arguments.config
        picture += f"_{config.stem}"
    elif not (config := example / "curve.toml").exists():
        config = example / "run.toml"
    folder = Path(f"runs/{picture}-{example.name}")
    shutil.rmtree(folder, ignore_errors=True)
    seed = int(os.environ.get("SEED", "0"))
    run_folder, seconds = play(example, config, folder, seed)
    shown = SHOWN.get(example.name, REWARDS)
    rows = figures(run_folder, shown)
    draw(rows, shown, example / f"{picture}.png")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (example / f"{picture}.jsonl").write_text(lines)
    sys.stdout.write(page_lines(rows, shown, seconds, seed))


if __name__ == "__main__":
    main()
