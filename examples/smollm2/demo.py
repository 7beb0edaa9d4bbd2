"""What `make demo-llm` runs: fetch the model, train it, and say what it learned.

    python examples/smollm2/demo.py          # SEEDS=0,1,2 for more than one seed

Everything lands in runs/demo-smollm2: a folder per seed, summary.json, curve.png and, with the
figures that it shows, curve.jsonl.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure
from model import smollm2
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
FOLDER = Path("runs/demo-smollm2")
STOP_TIMEOUT_S = 120
HELD_OUT = ("eval/sampled_reward", "eval/sampled_se")
TRAINED = "train/reward_mean"


def train(model: Path, seed: int) -> dict:
    """One seed's run; the row of summary.json."""
    name = f"seed-{seed}"
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    settings = {"run.dir": FOLDER, "run.name": name, "run.seed": seed, "model.path": model}
    overrides = [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "outloop.cli", "train", str(HERE / "run.toml"), *overrides]
    started = time.monotonic()
    # A thread each for the server and the trainer.
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # Ctrl-C reached it too: it stops its parts and then ends.
        process.wait(timeout=STOP_TIMEOUT_S)
        raise
    if code != 0:
        sys.exit(code)
    rows = [row for row in metrics(seed) if HELD_OUT[0] in row]
    before, after = rows[0], rows[-1]
    rise = after["eval/sampled_reward"] - before["eval/sampled_reward"]
    return {
        "seed": seed,
        "before": before["eval/sampled_reward"],
        "before_se": before["eval/sampled_se"],
        "after": after["eval/sampled_reward"],
        "after_se": after["eval/sampled_se"],
        "rise_in_se": rise / math.hypot(before["eval/sampled_se"], after["eval/sampled_se"]),
        "steps": after["step"],
        "minutes": round((time.monotonic() - started) / 60, 1),
    }


def metrics(seed: int) -> list[dict]:
    """What the picture shows of a seed's run, a row a step or an evaluation."""
    lines = (FOLDER / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
    rows = [
        {name: row[name] for name in ("step", TRAINED, *HELD_OUT) if row.get(name) is not None}
        for row in map(json.loads, lines)
    ]
    return [{"seed": seed, **row} for row in rows if len(row) > 1]


def draw(rows: list[dict], path: Path) -> None:
    """Every seed: held-out words with standard errors, and thin the mean of each training step."""
    figure = Figure(figsize=(7.5, 4.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    for number, seed in enumerate(sorted({row["seed"] for row in rows})):
        color, own = f"C{number}", [row for row in rows if row["seed"] == seed]
        trained = [(row["step"], row[TRAINED]) for row in own if TRAINED in row]
        if trained:
            axes.plot(*zip(*trained, strict=True), color=color, linewidth=0.8, alpha=0.4)
        points = [
            (row["step"], *(row[name] for name in HELD_OUT)) for row in own if HELD_OUT[0] in row
        ]
        steps, rewards, errors = zip(*points, strict=True)
        label = f"seed {seed}: held-out words"
        axes.errorbar(steps, rewards, yerr=errors, color=color, fmt="-o", capsize=3, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward, T = 1")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def main() -> None:
    console = Console()
    model = smollm2()
    seeds = []
    for seed in map(int, os.environ.get("SEEDS", "0").split(",")):
        seeds.append(train(model, seed))
        (FOLDER / "summary.json").write_text(json.dumps({"seeds": seeds}, indent=1) + "\n")
    shown = [row for one in seeds for row in metrics(one["seed"])]
    (FOLDER / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    draw(shown, FOLDER / "curve.png")
    table = Table(title="Mean reward on words that training never showed, T = 1")
    for column in ("seed", "before", "after", "rise", "in standard errors", "steps", "minutes"):
        table.add_column(column, justify="right")
    for row in seeds:
        table.add_row(
            str(row["seed"]),
            f"{row['before']:.3f} +- {row['before_se']:.3f}",
            f"{row['after']:.3f} +- {row['after_se']:.3f}",
            f"{row['after'] - row['before']:+.3f}",
            f"{row['rise_in_se']:.1f}",
            str(row["steps"]),
            f"{row['minutes']:.0f}",
        )
    console.print(table)
    console.print(f"curve {FOLDER}/curve.png, figures {FOLDER}/summary.json")


if __name__ == "__main__":
    main()
