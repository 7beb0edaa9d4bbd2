"""`make bench-learning`: every algorithm on the calculator, with true and with shuffled rewards.

Each algorithm trains the calculator's policy from one warm start for the same few steps through the
whole loop: agent, router, torch server, Redis, trainer; then once more with every episode given the
reward of another (shuffled_rewards). Reported is the mean reward of the first and of the last three
steps, and the difference over its standard error: an algorithm passes when that is at least 3, and
stays below 3 when rewards are shuffled. Adds to runs/bench/learning.json after every run.
`ONLY="gspo cispo"` chooses algorithms, `STEPS` how many steps.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

from figures import OUT, known, say, tell

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = int(os.environ.get("STEPS", "10"))
NUM_WARM_STEPS = 300
"""Of supervised learning: less than the demo's, so that more is left to learn."""
NUM_COMPARED = 3
"""Steps at either end whose rewards are averaged."""
MIN_GAIN_OVER_ERROR = 3.0
SHUFFLED = ('env.rollout_function_path="shuffled_rewards:play"',)
RECOMPUTE = ('trainer.proximal="recompute"',)
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": ("trainer.clip_high=0.2",),
    "dr_grpo": (
        'trainer.advantage="dr_grpo"',
        'trainer.denominator="budget"',
        "trainer.token_budget=48",
    ),
    "rloo": ('trainer.advantage="rloo"',),
    "reinforce_pp": ('trainer.advantage="reinforce_pp"',),
    # Two updates from each batch, so that the second one's ratios meet the clip.
    "ppo_clip": (
        'trainer.advantage="reinforce_pp_baseline"',
        "trainer.num_updates_per_take=2",
        "trainer.clip_high=0.2",
        *RECOMPUTE,
    ),
    "dapo": (
        "trainer.overlong_penalty=0.5",
        "trainer.overlong_max_tokens=48",
        "trainer.overlong_buffer_tokens=24",
    ),
    "reward_to_go": ('trainer.advantage="reward_to_go"',),
    "ppo": (
        'trainer.recipe="ppo"',
        'trainer.advantage="gae"',
        "trainer.critic.learning_rate=1e-3",
    ),
    "gspo": ('trainer.loss="gspo"',),
    "cispo": ('trainer.loss="cispo"',),
}
"""Every advantage and every loss."""
MORE: dict[str, tuple[str, ...]] = {
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
}
"""Corrections and terms beside the loss; by ONLY."""


def outloop(*arguments: str) -> None:
    """Run one command of the calculator's example; its output goes to a file."""
    with (OUT / "learning" / "output.log").open("a") as log:
        subprocess.run(
            [sys.executable, "-m", "outloop.cli", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_python_path())},
            check=True,
            stdout=log,
            stderr=log,
        )


def _python_path() -> list[str]:
    """The caller's, and this folder for shuffled_rewards."""
    return [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parent)]


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
        "trainer.groups_per_step=12",
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


def main() -> None:
    """Train each twice, print, write."""
    (OUT / "learning").mkdir(parents=True, exist_ok=True)
    chosen = os.environ.get("ONLY", "").split() or list(ALGORITHMS)
    say(f"a warm start, then {len(chosen)} algorithms, each with true and with shuffled rewards")
    model = warm_start()
    wrong = []
    for name in chosen:
        overrides = (ALGORITHMS | MORE)[name]
        for run, more in ((name, ()), (f"{name}_shuffled", SHUFFLED)):
            say(f"training {run}, {NUM_STEPS} steps")
            figures = train(run, model, (*overrides, *more))
            tell("learning", known("learning") | figures)
            has_learned = figures[f"{run}_gain_over_error"] >= MIN_GAIN_OVER_ERROR
            if has_learned == bool(more):
                wrong.append(run)
    if wrong:
        sys.exit(f"learned from shuffled rewards, or not from true ones: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
