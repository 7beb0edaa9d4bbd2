"""`make bench-learning`, first part: every recipe on a bandit of two turns and two lengths.

The policy decides how long its first answer is, up to six tokens, and its second, of one token,
pulls one of two arms; length earns nothing. Each recipe trains the same tiny policy by the
trainer's own loop, buffer scripts and model, with servers and agent in memory, from several seeds;
then again with every episode given the reward of another.

Reported: mean reward of the first and of the last three steps over seeds, with the standard error
over seeds; the difference between two recipes that so many seeds show with a power of 0.8 at 0.05;
and lengths. A recipe passes when its gain is beyond what chance gives once in a thousand runs with
true rewards, and within it with shuffled ones; errors are pooled over recipes, since three seeds
of one say little of their spread. Writes runs/bench/recipes.json and recipes.png.
`SEEDS` how many seeds, `STEPS` how many steps, `ONLY="grpo ppo"` which recipes, `SHUFFLED=0`
leaves the control out.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import OUT, known, say, tell

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

with warnings.catch_warnings():
    # megatron-core announces at import what it falls back to without Transformer Engine.
    warnings.simplefilter("ignore")
    from fakes.bandit_run import Answer, Server, Setup, arm, join
    from fakes.families import make_family
    from fakes.twin import Twin
    from outloop.buffer.evaluations.estimates import student_quantile
    from outloop.buffer.records import Sampling, Turn, VersionSpan
    from outloop.buffer.run import create_run
    from outloop.buffer.settings import Settings
    from outloop.buffer.settings.recipes import RECIPES
    from outloop.engine.train.megatron import model_and_optimizer
    from outloop.engine.train.ranks.controller import RankController
    from outloop.engine.train.ranks.rank_worker import RankWorker
    from outloop.engine.train.ranks.watchdog import Watchdog

NUM_SEEDS = int(os.environ.get("SEEDS", "3"))
NUM_STEPS = int(os.environ.get("STEPS", "20"))
NUM_COMPARED = 3
"""Steps at either end whose rewards are averaged."""
CHANCE = 1e-3
"""How often a run that learns nothing may pass as one that does."""
MAX_LENGTH = 6
POOL_SIZE = 128
COMMON: dict[str, Any] = {
    "num_steps": NUM_STEPS,
    "groups_per_step": 8,
    "learning_rate": 8e-3,
    "checkpoint_every": 0,
}
MORE: dict[str, dict[str, Any]] = {
    "ppo": {"critic": {"learning_rate": 1e-2}},
    "dapo": {"overlong_penalty": 0.0},
}
"""What a recipe needs at this scale, beside its own settings."""
NO_REWARDS = ("distill",)
"""Recipes that learn from a teacher."""


@dataclass(frozen=True)
class Curve:
    """One run: by step."""

    rewards: list[float]
    lengths: list[float]


def two_turns(server: Server) -> tuple[list[Answer], float]:
    """An episode: a first answer that ends at its first even token, then an arm."""
    ids, logprobs = [1, 2], list[float]()
    while len(logprobs) < MAX_LENGTH and (not logprobs or ids[-1] % 2):
        token, logprob = server.sample(ids)
        ids.append(token)
        logprobs.append(logprob)
    first = ([1, 2], ids[2:], list(logprobs))
    token, logprob = server.sample([*ids, 7])
    return [first, ([7], [token], [logprob])], arm(token)


def exchanging(
    play: Callable[[Server], tuple[list[Answer], float]], *, seed: int
) -> Callable[[Server], tuple[list[Answer], float]]:
    """`play` with a reward out of those of the last episodes; its own is one in POOL_SIZE of them,
    from the first episode on: the pool begins full, of what chance gives."""
    chosen = random.Random(seed)
    pool = deque((float(chosen.random() < 0.5) for _ in range(POOL_SIZE)), maxlen=POOL_SIZE)

    def play_and_exchange(server: Server) -> tuple[list[Answer], float]:
        answers, reward = play(server)
        pool.append(reward)
        return answers, chosen.choice(pool)

    return play_and_exchange


def make_turn(
    turn_id: str,
    *,
    prompt: list[int],
    output: list[int],
    logprobs: list[float],
    version: int,
) -> Turn:
    """A turn as the router would record it."""
    return Turn(
        turn_id=turn_id,
        episode_id="",
        parent_turn_id=None,
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(output, np.int32),
        behavior_logprobs=np.array(logprobs, np.float32),
        version_spans=(VersionSpan(policy_version=version, start=0, end=len(output)),),
        loss_spans=((0, len(output)),),
        sampling=Sampling(temperature=1.0),
        finish_reason="stop",
        branch_cause="root",
        started_at=0.0,
        finished_at=0.0,
    )


def train(folder: Path, recipe: str, *, seed: int, is_shuffled: bool) -> Curve:
    """One run of a recipe."""
    run_dir = Path(tempfile.mkdtemp(prefix="recipes-"))
    trainer = COMMON | {"recipe": recipe} | MORE.get(recipe, {})
    settings = Settings(model={"path": folder}, run={"seed": seed}, trainer=trainer)
    run = create_run(settings, run_dir / "run", "unix:///nowhere")
    server = Server(folder, [], seed=seed)
    buffer = join(run, Twin(), server, make_turn)
    buffer.episode = exchanging(two_turns, seed=seed) if is_shuffled else two_turns
    config = model_and_optimizer.read_config(folder, {}, dtype="float32")
    watchdog = Watchdog(run.dir, rank=0, num_ranks=1, hang_timeout_s=600.0)
    worker = RankWorker(run, config, watchdog)
    ranks = RankController(worker, watchdog, num_ranks=1, timeout_s=600.0)
    ranks.run(RankWorker.build, num_updates=settings.trainer.num_updates)
    rows = Setup(run, buffer, server, ranks).train()
    buffer.close()
    watchdog.close()
    shutil.rmtree(run_dir)
    return Curve(
        [row["train/reward_mean"] for row in rows],
        [row["train/generated_tokens_mean"] for row in rows],
    )


def measure(name: str, curves: list[Curve]) -> dict[str, float]:
    """The figures of one recipe over its seeds."""
    firsts = [float(np.mean(c.rewards[:NUM_COMPARED])) for c in curves]
    lasts = [float(np.mean(c.rewards[-NUM_COMPARED:])) for c in curves]
    gains = np.subtract(lasts, firsts)
    error = float(np.std(gains, ddof=1) / math.sqrt(len(gains))) if len(gains) > 1 else math.nan
    drift = [
        float(np.mean(c.lengths[-NUM_COMPARED:]) - np.mean(c.lengths[:NUM_COMPARED]))
        for c in curves
    ]
    return {
        f"{name}_first": float(np.mean(firsts)),
        f"{name}_last": float(np.mean(lasts)),
        f"{name}_gain": float(np.mean(gains)),
        f"{name}_gain_se": error,
        f"{name}_tokens_drift": float(np.mean(drift)),
    }


def detectable(figures: dict[str, float], names: list[str]) -> float:
    """The difference of two recipes' gains that so many seeds show with a power of 0.8 at 0.05,
    from the spread over seeds of all of them."""
    variance = float(np.mean([figures[f"{name}_gain_se"] ** 2 for name in names])) * NUM_SEEDS
    degrees = 2 * (NUM_SEEDS - 1)
    quantiles = student_quantile(0.975, degrees) + student_quantile(0.8, degrees)
    return quantiles * math.sqrt(variance * 2 / NUM_SEEDS)


def learned(figures: dict[str, float], names: list[str]) -> dict[str, bool]:
    """Whether each run's gain is beyond chance, by the errors of all of them together."""
    error = math.sqrt(float(np.mean([figures[f"{name}_gain_se"] ** 2 for name in names])))
    limit = student_quantile(1.0 - CHANCE, len(names) * (NUM_SEEDS - 1)) * error
    return {name: figures[f"{name}_gain"] > limit for name in names}


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Rewards by step: a small picture for each recipe, every seed a line, the control in grey."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in curves if not name.endswith("_shuffled")]
    columns = 4
    rows = -(-len(names) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(10, 2.1 * rows), dpi=110, sharex=True, sharey=True, squeeze=False
    )
    for axes, name in zip(grid.flat, names, strict=False):
        for curve in curves.get(f"{name}_shuffled", []):
            axes.plot(range(1, len(curve.rewards) + 1), curve.rewards, color="0.75", linewidth=1)
        for curve in curves[name]:
            axes.plot(range(1, len(curve.rewards) + 1), curve.rewards, color="C0", linewidth=1.2)
        axes.set_title(name, size=9, loc="left")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.25)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("step", size=9)
    figure.supylabel("mean reward", size=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Train, print, draw; fail where a recipe does not learn, or learns from noise."""
    torch.set_num_threads(1)
    every = [name for name in RECIPES if name not in NO_REWARDS]
    chosen = os.environ.get("ONLY", "").split() or every
    controls = (False, True) if os.environ.get("SHUFFLED", "1") == "1" else (False,)
    figures: dict[str, float] = {}
    curves: dict[str, list[Curve]] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_family("qwen3", Path(folder), is_tied=True)
        model_and_optimizer.join_process_group(seed=1)
        for recipe in chosen:
            for is_shuffled in controls:
                name = recipe + "_shuffled" * is_shuffled
                curves[name] = [
                    train(Path(folder), recipe, seed=seed, is_shuffled=is_shuffled)
                    for seed in range(NUM_SEEDS)
                ]
                figures |= measure(name, curves[name])
                say(
                    f"{name}: {figures[f'{name}_first']:.3f} -> {figures[f'{name}_last']:.3f}, "
                    f"gain {figures[f'{name}_gain']:.3f} +- {figures[f'{name}_gain_se']:.3f}"
                )
        model_and_optimizer.leave_process_group()
    if NUM_SEEDS > 1:
        figures["detectable_difference"] = detectable(figures, chosen)
    tell("recipes", known("recipes") | figures)
    draw(curves, OUT / "recipes.png")
    say(f"curves {OUT / 'recipes.png'}")
    if NUM_SEEDS == 1:
        return
    has_learned = learned(figures, list(curves))
    wrong = [name for name, has in has_learned.items() if has == name.endswith("_shuffled")]
    if wrong:
        sys.exit(f"learned from shuffled rewards, or not from true ones: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
