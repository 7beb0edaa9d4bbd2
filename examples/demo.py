"""From nothing to a learning curve, for an example with a warm start: what `make demo` runs.

    python examples/demo.py calculator          # SEEDS=0,1,2 for more than one seed

For each seed: make a policy, warm-start it by SFT on the example's scripted player, train it by
GRPO, and write down how it does on held-out problems. Everything lands in runs/demo, or
runs/demo-NAME for another example: a folder per seed, summary.json and curve.png.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(os.path.relpath(Path(__file__).resolve().parent))
STOP_TIMEOUT_S = 90


def outloop(*arguments: str) -> float:
    """Run the command line, its progress on this terminal; returns seconds."""
    command = [sys.executable, "-m", "outloop.cli", *arguments]
    started = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # Ctrl-C reached it too: it stops its parts and then ends.
        process.wait(timeout=STOP_TIMEOUT_S)
        raise
    if code != 0:
        sys.exit(code)
    return time.monotonic() - started


def train(config: Path, **settings: object) -> float:
    """Run `outloop train` with some settings of its own."""
    overrides = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
    return outloop("train", str(config), *(word for o in overrides for word in ("--set", o)))


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_seed(example: Path, tasks: ModuleType, folder: Path, seed: int, console: Console) -> dict:
    """Policy, warm start and RL of one seed; the row of summary.json."""
    shutil.rmtree(folder, ignore_errors=True)
    console.rule(f"seed {seed}: warm start (SFT on a mediocre scripted player)")
    outloop(
        *("new-policy", "--out", str(folder / "policy"), "--seed", str(seed)),
        *("--conversations", "tasks:conversations", "--import-dir", str(example)),
    )
    place = {"run__dir": str(folder), "run__seed": seed}
    policy = {"run__name": "warm-start", "model__path": str(folder / "policy")}
    warm_start_s = train(example / "warm_start.toml", **place, **policy)
    console.rule(f"seed {seed}: reinforcement learning (GRPO)")
    policy = {"run__name": "rl", "model__path": str(folder / "warm-start" / "hf")}
    rl_s = train(example / "run.toml", **place, **policy)
    rows = read_metrics(folder / "rl")
    sampled = [row for row in rows if row.get("eval/sampled_reward") is not None]
    greedy = [row for row in rows if row.get("eval/greedy_reward") is not None]
    return {
        "seed": seed,
        "scripted": tasks.reward_of(tasks.scripted_player),
        "warm_start": sampled[0]["eval/sampled_reward"],
        "trained": sampled[-1]["eval/sampled_reward"],
        "oracle": tasks.reward_of(tasks.oracle_player),
        "se": sampled[-1]["eval/sampled_se"],
        "warm_start_greedy": greedy[0]["eval/greedy_reward"],
        "trained_greedy": greedy[-1]["eval/greedy_reward"],
        "warm_start_s": round(warm_start_s, 1),
        "rl_s": round(rl_s, 1),
        "steps": max(row["step"] for row in rows),
    }


def result_table(seeds: list[dict]) -> Table:
    """A column per seed, so that it fits a narrow terminal."""
    table = Table(title="Mean reward on held-out problems (1 = every answer right)")
    table.add_column("")
    for row in seeds:
        table.add_column(f"seed {row['seed']}", justify="right")
    rows = (
        ("scripted player", "scripted"),
        ("warm start, T = 1", "warm_start"),
        ("trained, T = 1", "trained"),
        ("warm start, greedy", "warm_start_greedy"),
        ("trained, greedy", "trained_greedy"),
        ("oracle", "oracle"),
    )
    for name, key in rows:
        is_result = key == "trained"
        cells = [f"{r[key]:.3f}" + (f" +- {r['se']:.3f}" if is_result else "") for r in seeds]
        table.add_row(name, *cells, style="bold" if is_result else "")
    table.add_section()
    for name, key in (("warm start, seconds", "warm_start_s"), ("RL, seconds", "rl_s")):
        table.add_row(name, *(f"{row[key]:.0f}" for row in seeds))
    return table


def draw_curve(seeds: list[dict], folder: Path, title: str) -> None:
    """Training reward of every step, evaluations as points, and what to compare them with."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=120, layout="constrained")
    for number, row in enumerate(seeds):
        rows = read_metrics(folder / f"seed-{row['seed']}" / "rl")
        color = f"C{number}"
        trained = [r for r in rows if r.get("train/reward_mean") is not None]
        axes.plot(
            [r["step"] for r in trained],
            [r["train/reward_mean"] for r in trained],
            color=color,
            alpha=0.55,
            linewidth=1.2,
            label=f"seed {row['seed']}: training episodes",
        )
        held_out = [r for r in rows if r.get("eval/sampled_reward") is not None]
        axes.errorbar(
            [r["step"] for r in held_out],
            [r["eval/sampled_reward"] for r in held_out],
            yerr=[r["eval/sampled_se"] for r in held_out],
            color=color,
            fmt="o",
            markersize=5,
            capsize=3,
            label=f"seed {row['seed']}: held-out problems",
        )
    means = {
        name: sum(row[key] for row in seeds) / len(seeds)
        for name, key in (
            ("oracle", "oracle"),
            ("scripted player", "scripted"),
            ("warm start", "warm_start"),
        )
    }
    for (name, value), style in zip(means.items(), ("-", "--", ":"), strict=True):
        axes.axhline(value, color="0.4", linestyle=style, linewidth=1, label=f"{name} {value:.2f}")
    axes.set_xlabel("step (one optimizer update and its publish)")
    axes.set_ylabel("mean reward, T = 1")
    axes.set_ylim(0.0, 1.05)
    axes.set_xlim(left=0)
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(loc="best", fontsize=8)
    figure.savefig(folder / "curve.png")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an example from nothing.")
    parser.add_argument("name", help="a folder of examples/ that has a warm_start.toml")
    example = EXAMPLES / parser.parse_args().name
    sys.path.insert(0, str(example))
    tasks = importlib.import_module("tasks")
    console = Console()
    folder = Path("runs/demo" if example.name == "calculator" else f"runs/demo-{example.name}")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in map(int, os.environ.get("SEEDS", "0").split(",")):
        rows.append(run_seed(example, tasks, folder / f"seed-{seed}", seed, console))
        (folder / "summary.json").write_text(json.dumps({"seeds": rows}, indent=1) + "\n")
    draw_curve(rows, folder, tasks.TITLE)
    console.print(result_table(rows))
    console.print(f"curve {folder}/curve.png, figures {folder}/summary.json", highlight=False)


if __name__ == "__main__":
    main()
