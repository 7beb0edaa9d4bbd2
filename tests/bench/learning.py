"""Algorithms and settings compared on one example, by hand; every recipe is in `learning_table`.

Each algorithm trains the calculator's policy from one warm start for the same few steps through the
whole loop: agent, router, torch server, Redis, trainer; then once more with every episode given the
reward of another (shuffled_rewards). Reported is the mean reward of the first and of the last three
steps, and the difference over its standard error: an algorithm passes when that is at least 3, and
stays below 3 when rewards are shuffled. Adds to runs/bench/learning.json after every run.
`ONLY="gspo cispo"` chooses algorithms, `STEPS` how many steps, `SEEDS` how many seeds (of tasks and
sampling; the warm start is the same), `EXAMPLE=guess_number` another example, `SHUFFLED=0` leaves
the control out. With several seeds the mean of the last rewards over seeds, its standard error and
the tokens trained are reported, so that algorithms are compared at equal tokens:
`ONLY="grpo ppo" SEEDS=3 STEPS=30 SHUFFLED=0`. `NAME_equal_tokens` is that
mean up to the tokens of the run that trained the fewest. runs/bench/learning_EXAMPLE.png has the
curves, a line for each seed; `DRAW=1` compares and draws earlier runs and trains nothing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from figures import OUT, known, say, tell

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = int(os.environ.get("STEPS", "10"))
NUM_SEEDS = int(os.environ.get("SEEDS", "1"))
EXAMPLE = os.environ.get("EXAMPLE", "calculator")
HAS_CONTROL = os.environ.get("SHUFFLED", "1") == "1"
DRAWS_ONLY = os.environ.get("DRAW") == "1"
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
    """Run one command of the calculator's example; its output goes to a file, whose last lines say
    why it failed, if it did."""
    path = OUT / "learning" / "output.log"
    with path.open("a") as log:
        done = subprocess.run(
            [sys.executable, "-m", "outloop.cli", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_python_path())},
            stdout=log,
            stderr=log,
        )
    if done.returncode:
        last = "\n".join(path.read_text().splitlines()[-10:])
        command = f"outloop {' '.join(arguments)}"
        sys.exit(f"{command} ended with {done.returncode}; the last lines of {path}:\n{last}")


def _python_path() -> list[str]:
    """The caller's, and this folder for shuffled_rewards."""
    return [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parent)]


def warm_start() -> Path:
    """The policy that every algorithm begins with; made once."""
    name = "warm-start" if EXAMPLE == "calculator" else f"warm-start-{EXAMPLE}"
    folder = OUT / "learning" / name / "hf"
    if (folder / "model.safetensors").is_file():
        return folder
    model = OUT / "learning" / f"policy-{EXAMPLE}"
    outloop(
        *("new-policy", "--out", str(model), "--conversations", "tasks:conversations"),
        *("--import-dir", f"examples/{EXAMPLE}"),
    )
    place = ("--set", f"run.dir={OUT / 'learning'}", "--set", f"run.name={name}")
    place += ("--set", f"trainer.num_steps={NUM_WARM_STEPS}")
    outloop("train", f"examples/{EXAMPLE}/warm_start.toml", *place, "--set", f"model.path={model}")
    return folder


def train(name: str, model: Path, overrides: tuple[str, ...], *, seed: int) -> dict[str, float]:
    """Train one algorithm and compare the rewards at its ends."""
    run_dir = OUT / "learning" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = (
        f"run.dir={OUT / 'learning'}",
        f"run.name={name}",
        f"run.seed={seed}",
        f"model.path={model}",
        f"trainer.num_steps={NUM_STEPS}",
        "trainer.groups_per_step=12",
        "trainer.learning_rate=1e-3",
        "eval.every=0",
        *overrides,
    )
    flags = [part for setting in settings for part in ("--set", setting)]
    outloop("train", f"examples/{EXAMPLE}/run.toml", *flags)
    rows = steps_of(run_dir)
    first, first_error = mean_reward(rows[:NUM_COMPARED])
    last, last_error = mean_reward(rows[-NUM_COMPARED:])
    return {
        f"{name}_first": first,
        f"{name}_last": last,
        f"{name}_gain_over_error": (last - first) / math.hypot(first_error, last_error),
        f"{name}_trained_tokens": sum(row["train/trained_tokens"] for row in rows),
    }


def over_seeds(name: str, runs: list[str], figures: dict[str, float]) -> dict[str, float]:
    """The mean over seeds of what one algorithm came to, and its standard error."""
    lasts = [figures[f"{run}_last"] for run in runs]
    mean = sum(lasts) / len(lasts)
    variance = sum((last - mean) ** 2 for last in lasts) / (len(lasts) - 1)
    return {
        f"{name}_mean_last": mean,
        f"{name}_mean_last_se": math.sqrt(variance / len(lasts)),
        f"{name}_mean_tokens": sum(figures[f"{run}_trained_tokens"] for run in runs) / len(runs),
    }


def draw(names: list[str], prefix: str) -> None:
    """Mean reward over the tokens trained so far, a picture for each algorithm."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        1, len(names), figsize=(3.2 * len(names), 2.6), dpi=110, sharex=True, sharey=True
    )
    for axes, name in zip(np.atleast_1d(grid), names, strict=True):
        for seed in range(NUM_SEEDS):
            run = f"{prefix}{name}" + (f"_seed{seed}" if seed else "")
            rows = steps_of(OUT / "learning" / run)
            rewards = np.array([row["train/reward_mean"] for row in rows])
            tokens = np.cumsum([row["train/trained_tokens"] for row in rows])
            # Five steps of 96 episodes: single ones are too noisy to be read.
            smooth = np.convolve(rewards, np.full(5, 0.2), mode="valid")
            axes.plot(tokens[4:] / 1000, smooth, linewidth=1.3)
        axes.set_title(f"{EXAMPLE}: {name}", size=9, loc="left")
        axes.grid(alpha=0.25)
    figure.supxlabel("thousand trained tokens", size=9)
    figure.supylabel("mean reward", size=9)
    figure.tight_layout()
    figure.savefig(OUT / f"learning_{EXAMPLE}.png")
    plt.close(figure)


def at_equal_tokens(names: list[str], prefix: str) -> dict[str, float]:
    """Mean over seeds of the reward of the last steps within the tokens of the shortest run."""
    runs = {
        name: [
            steps_of(OUT / "learning" / f"{prefix}{name}{f'_seed{seed}' if seed else ''}")
            for seed in range(NUM_SEEDS)
        ]
        for name in names
    }
    sums = {
        name: [np.cumsum([row["train/trained_tokens"] for row in rows]) for rows in own]
        for name, own in runs.items()
    }
    budget = min(tokens[-1] for own in sums.values() for tokens in own)
    found = {f"{prefix}equal_tokens": float(budget)}
    for name, own in runs.items():
        lasts = []
        for rows, tokens in zip(own, sums[name], strict=True):
            end = int(np.searchsorted(tokens, budget, side="right"))
            lasts.append(mean_reward(rows[max(0, end - NUM_COMPARED) : end])[0])
        found[f"{prefix}{name}_equal_tokens"] = float(np.mean(lasts))
        found[f"{prefix}{name}_equal_tokens_se"] = float(np.std(lasts, ddof=1) / len(lasts) ** 0.5)
    return found


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run's steps."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if "train/loss" in (row := json.loads(line))]


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
    prefix = "" if EXAMPLE == "calculator" else f"{EXAMPLE}_"
    if DRAWS_ONLY:
        _compare(chosen, prefix)
        return
    say(f"{EXAMPLE}: a warm start, then {len(chosen)} algorithms of {NUM_SEEDS} seeds")
    model = warm_start()
    wrong = []
    for name in chosen:
        overrides = (ALGORITHMS | MORE)[name]
        for kind, more in (("", ()), ("_shuffled", SHUFFLED)):
            if kind and not HAS_CONTROL:
                continue
            base, runs = f"{prefix}{name}{kind}", list[str]()
            for seed in range(NUM_SEEDS):
                run = base + (f"_seed{seed}" if seed else "")
                say(f"training {run}, {NUM_STEPS} steps")
                figures = train(run, model, (*overrides, *more), seed=seed)
                tell("learning", known("learning") | figures)
                runs.append(run)
                has_learned = figures[f"{run}_gain_over_error"] >= MIN_GAIN_OVER_ERROR
                if has_learned == bool(kind):
                    wrong.append(run)
            if NUM_SEEDS > 1:
                summary = over_seeds(base, runs, known("learning"))
                tell("learning", known("learning") | summary)
    _compare(chosen, prefix)
    if wrong:
        sys.exit(f"learned from shuffled rewards, or not from true ones: {', '.join(wrong)}")


def _compare(names: list[str], prefix: str) -> None:
    if NUM_SEEDS > 1:
        tell("learning", known("learning") | at_equal_tokens(names, prefix))
    draw(names, prefix)


if __name__ == "__main__":
    main()
