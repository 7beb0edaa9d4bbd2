"""Runs of one task for `learning_table`, one after the other in this process.

Started with a task's name; reads a cell a line from stdin, as JSON, and answers each with a line:
the rewards and lengths of its steps, or a sentence why there are none. What is imported once
serves all runs, and the parts of a run of calculator and guess_number are threads of this process
(`outloop train --single-process`): router, torch server, runner, trainer; Redis beside them.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import tomllib
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]


@dataclass(frozen=True)
class Task:
    """What is played, and what all recipes have in common there."""

    example: str
    """Folder of examples/; empty: the bandit."""
    num_steps: int
    num_warm_steps: int = 0
    """Of supervised learning before."""
    tasks: str = "tasks:train_tasks"
    conversations: str = "tasks:conversations"
    settings: dict[str, Any] = field(default_factory=dict)
    """Of [trainer]."""
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of [trainer], by recipe."""


TASKS = {
    "bandit": Task(
        example="",
        num_steps=20,
        settings={"groups_per_step": 8, "learning_rate": 8e-3},
        more={"ppo": {"critic": {"learning_rate": 1e-2}}},
    ),
    "calculator": Task(
        example="calculator",
        num_steps=16,
        num_warm_steps=300,
        settings={"groups_per_step": 8, "learning_rate": 1e-3},
        # Two answers of 24 tokens.
        more={"dr_grpo": {"token_budget": 48}, "ppo": {"critic": {"learning_rate": 1e-3}}},
    ),
    "guess_number": Task(
        example="guess_number",
        num_steps=30,
        num_warm_steps=300,
        tasks="small_games:train_tasks",
        conversations="small_games:conversations",
        settings={"groups_per_step": 8, "learning_rate": 1e-3},
        # Three answers of 8 tokens.
        more={"dr_grpo": {"token_budget": 24}, "ppo": {"critic": {"learning_rate": 1e-3}}},
    ),
}
EVERYWHERE: dict[str, dict[str, Any]] = {
    # Answers of several turns are longer than what it allows one.
    "dapo": {"overlong_penalty": 0.0},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo_head": ("ppo", {"critic": {"kind": "head"}}),
}
"""Names beside the recipes' own: of which recipe, and what is different."""


def trainer_settings(task: str, recipe: str) -> dict[str, Any]:
    """[trainer] of one cell."""
    base, different = VARIANTS.get(recipe, (recipe, {}))
    of = TASKS[task]
    found = {
        "num_steps": of.num_steps,
        "checkpoint_every": 0,
        **of.settings,
        "recipe": base,
        **EVERYWHERE.get(base, {}),
        **of.more.get(base, {}),
    }
    for name, value in different.items():
        own = found.get(name)
        found[name] = own | value if isinstance(own, dict) else value
    return found


def play_bandit(recipe: str, *, seed: int, is_exchanged: bool, folder: Path) -> dict[str, Any]:
    """The trainer's own loop on agent and servers in memory (recipes)."""
    import recipes

    curve = recipes.train(
        folder, trainer_settings("bandit", recipe), seed=seed, is_shuffled=is_exchanged
    )
    return {"rewards": curve.rewards, "lengths": curve.lengths, "num_episodes": 64}


def play_example(
    task: str, recipe: str, *, seed: int, is_exchanged: bool, folder: Path, model: Path
) -> dict[str, Any]:
    """The whole loop in this process."""
    from rich.console import Console

    from outloop.buffer.settings import settings_of
    from outloop.single import train_in_one_process

    of = TASKS[task]
    tree = tomllib.loads((ROOT / "examples" / of.example / "run.toml").read_text())
    tree["run"] = {"dir": str(folder), "name": "cell", "seed": seed}
    tree["model"]["path"] = str(model)
    tree["trainer"] = trainer_settings(task, recipe)
    tree["env"]["tasks"] = of.tasks
    del tree["env"]["eval_tasks"], tree["eval"]
    if is_exchanged:
        tree["env"]["rollout_function_path"] = "shuffled_rewards:play"
    # What is trained was sampled by the newest weights: REINFORCE has no weight for others.
    tree["buffer"]["max_staleness"] = 0
    settings = settings_of(tree, (), folder=ROOT / "examples" / of.example, source=task)
    output = io.StringIO()
    code = train_in_one_process(settings, stop=threading.Event(), console=Console(file=output))
    if code:
        raise RuntimeError(f"the run ended with {code}")
    lines = (folder / "cell" / "metrics.jsonl").read_text().splitlines()
    rows = [row for line in lines if "train/loss" in (row := json.loads(line))]
    return {
        "rewards": [row["train/reward_mean"] for row in rows],
        "lengths": [row["train/generated_tokens_mean"] for row in rows],
        "num_episodes": rows[0]["train/episodes"],
    }


def run(task: str, cell: dict[str, Any], model: Path) -> dict[str, Any]:
    """One cell, in a folder of its own."""
    began_at, cpu_before = time.monotonic(), time.process_time()
    chosen = {name: cell[name] for name in ("recipe", "seed", "is_exchanged")}
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        found = (
            play_bandit(**chosen, folder=model)
            if task == "bandit"
            else play_example(task, **chosen, folder=Path(folder), model=model)
        )
    wall, cpu = time.monotonic() - began_at, time.process_time() - cpu_before
    return found | {"seconds": wall, "cpu_seconds": cpu}


def serve(task: str, answers: TextIO) -> None:
    """Answer cells until stdin ends."""
    import torch

    from outloop.buffer.telemetry import configure_logging

    torch.set_num_threads(1)
    configure_logging("learning", "warning")
    model = Path(os.environ["MODEL"])
    if task == "bandit":
        from fakes.families import make_family
        from outloop.engine.train.megatron import model_and_optimizer

        shutil.rmtree(model, ignore_errors=True)
        make_family("qwen3", model, is_tied=True)
        model_and_optimizer.join_process_group(seed=1)
    for line in sys.stdin:
        try:
            answer = run(task, json.loads(line), model)
        except Exception as error:  # noqa: BLE001 - the table records it
            traceback.print_exc()
            answer = {"failure": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # What libraries print must not stand among the answers.
    with os.fdopen(os.dup(1), "w") as pipe, warnings.catch_warnings():
        os.dup2(2, 1)
        warnings.simplefilter("ignore")
        serve(sys.argv[1], pipe)
