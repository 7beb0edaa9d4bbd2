"""`make bench-learning`: every algorithm on the calculator, from one warm start.

Each algorithm trains the calculator's policy for the same few steps through the whole loop: agent,
router, torch server, Redis, trainer. Reported is the mean reward of the first and of the last three
steps, and the difference over its standard error. Prints a table and writes
runs/bench/learning.json after every algorithm, so that a run that is stopped leaves what it has.
`ONLY="gspo cispo"` chooses some, `STEPS` how many steps.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "runs" / "bench"
NUM_STEPS = int(os.environ.get("STEPS", "12"))
NUM_WARM_STEPS = 300
"""Of supervised learning: less than the demo's, so that more is left to learn."""
NUM_COMPARED = 3
"""Steps at either end whose rewards are averaged."""
RECOMPUTE = ('trainer.proximal="recompute"',)
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "gspo": (
        'trainer.loss="gspo"',
        'trainer.denominator="episodes"',
        "trainer.clip_low=3e-4",
        "trainer.clip_high=4e-4",
    ),
    "cispo": ('trainer.loss="cispo"', "trainer.clip_low=1.0"),
    "reinforce_pp": ('trainer.advantage="reinforce_pp"',),
    "rloo": ('trainer.advantage="rloo"',),
    "dr_grpo": (
        'trainer.advantage="dr_grpo"',
        'trainer.denominator="constant"',
        "trainer.denominator_constant=4000",
    ),
    "reinforce_pp_baseline": ('trainer.advantage="reinforce_pp_baseline"',),
    "token_tis": (*RECOMPUTE, 'trainer.correction="token_tis"'),
    "masked_veto": (
        *RECOMPUTE,
        'trainer.correction="token_mis"',
        "trainer.correction_floor=0.5",
        "trainer.correction_veto=0.001",
    ),
    "sequence_tis": (*RECOMPUTE, 'trainer.correction="sequence_tis"'),
    "sequence_mis": (*RECOMPUTE, 'trainer.correction="sequence_mis"'),
    "kl_k1": ('trainer.kl="k1"', "trainer.kl_coefficient=1e-3"),
    "kl_k2": ('trainer.kl="k2"', "trainer.kl_coefficient=1e-3"),
    "kl_k3": ('trainer.kl="k3"', "trainer.kl_coefficient=1e-3"),
    "entropy": ("trainer.entropy_coefficient=1e-3",),
    "overlong": (
        "trainer.overlong_penalty=0.5",
        "trainer.overlong_max_tokens=48",
        "trainer.overlong_buffer_tokens=24",
    ),
}


def outloop(*arguments: str) -> None:
    """Run one command of the calculator's example; its output goes to a file."""
    with (OUT / "learning" / "output.log").open("a") as log:
        subprocess.run(
            [sys.executable, "-m", "outloop.cli", *arguments],
            cwd=ROOT,
            check=True,
            stdout=log,
            stderr=log,
        )


def warm_start() -> Path:
    """The policy that every algorithm begins with; made once."""
    folder = OUT / "learning" / "warm-start" / "hf"
    if (folder / "model.safetensors").is_file():
        return folder
    model = OUT / "learning" / "policy"
    outloop(
        *("new-policy", "--out", str(model), "--conversations", "tasks:conversations"),
        *("--import-dir", "examples/calculator"),
    )
    place = ("--set", f"run.dir={OUT / 'learning'}", "--set", "run.name=warm-start")
    place += ("--set", f"trainer.num_steps={NUM_WARM_STEPS}")
    outloop("train", "examples/calculator/warm_start.toml", *place, "--set", f"model.path={model}")
    return folder


def train(name: str, model: Path, overrides: tuple[str, ...]) -> dict[str, float]:
    """Train one algorithm and compare the rewards at its ends."""
    run_dir = OUT / "learning" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = (
        f"run.dir={OUT / 'learning'}",
        f"run.name={name}",
        f"model.path={model}",
        f"trainer.num_steps={NUM_STEPS}",
        "trainer.groups_per_step=16",
        "trainer.learning_rate=1e-3",
        "eval.every=0",
        *overrides,
    )
    flags = [part for setting in settings for part in ("--set", setting)]
    outloop("train", "examples/calculator/run.toml", *flags)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for line in lines if "train/loss" in (row := json.loads(line))]
    first, first_error = mean_reward(rows[:NUM_COMPARED])
    last, last_error = mean_reward(rows[-NUM_COMPARED:])
    return {
        f"{name}_first": first,
        f"{name}_last": last,
        f"{name}_gain_over_error": (last - first) / math.hypot(first_error, last_error),
    }


def mean_reward(rows: list[dict[str, float]]) -> tuple[float, float]:
    """Mean over the episodes of some steps, and its standard error."""
    count = sum(row["train/episodes"] for row in rows)
    mean = sum(row["train/reward_mean"] * row["train/episodes"] for row in rows) / count
    variance = sum(row["train/reward_std"] ** 2 * row["train/episodes"] for row in rows) / count
    return mean, math.sqrt(max(variance, 1e-12) / count)


def write(figures: dict[str, float]) -> None:
    """Write what is known so far."""
    report = {
        "name": "learning",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "figures": figures,
    }
    (OUT / "learning.json").write_text(json.dumps(report, indent=1))


def main() -> None:
    """Train each, print, write."""
    (OUT / "learning").mkdir(parents=True, exist_ok=True)
    chosen = os.environ.get("ONLY", "").split() or list(ALGORITHMS)
    model = warm_start()
    figures: dict[str, float] = {}
    for name in chosen:
        figures |= train(name, model, ALGORITHMS[name])
        write(figures)
    table = Table(title=f"bench-learning, {NUM_STEPS} steps", title_justify="left")
    for column in ("algorithm", "first", "last", "gain / error"):
        table.add_column(column)
    for name in chosen:
        values = (figures[f"{name}_{what}"] for what in ("first", "last", "gain_over_error"))
        table.add_row(name, *(f"{value:.3f}" for value in values))
    Console().print(table)


if __name__ == "__main__":
    main()
