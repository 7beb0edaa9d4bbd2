"""`make bench-distillation`: a trained calculator teaches a warm-started one.

The teacher imitates the calculator's best player (supervised); the student the mediocre one, for
fewer steps. Then the student is trained from the same weights, with the same number of episodes a
step: by on-policy distillation, of the sampled token, of the teacher's 8 most probable ones with
either divergence, and by rewards (GRPO), everything through the whole loop. Reported is the mean
reward on held-out problems. Writes runs/bench/distillation.json and .png. `ONLY="forward grpo"`
chooses runs, `STEPS` how many steps; what is there already is not made again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
from figures import OUT, known, say, tell

ROOT = Path(__file__).resolve().parents[2]
PLACE = OUT / "distillation"
STEPS = int(os.environ.get("STEPS", "20"))
EVERY = 4
NUM_TEACHER_STEPS = 500
NUM_STUDENT_STEPS = 300
CALCULATOR = Path("examples/calculator")
TOP = ("trainer.teacher.top_k=8",)
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sampled": ("distill.toml", ("trainer.teacher.top_k=0",)),
    "reverse": ("distill.toml", TOP),
    "forward": ("distill.toml", (*TOP, 'trainer.teacher.divergence="forward"')),
    "grpo": ("run.toml", ("buffer.group_size=8", "trainer.groups_per_step=12")),
}
"""Settings file and what differs; 96 episodes a step each."""
LABELS = {
    "sampled": "distilled: sampled token",
    "reverse": "distilled: 8 tokens, KL(policy, teacher)",
    "forward": "distilled: 8 tokens, KL(teacher, policy)",
    "grpo": "GRPO on rewards",
}


def outloop(*arguments: str) -> None:
    """Run one command; its output goes to a file."""
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parent)]
    with (PLACE / "output.log").open("a") as log:
        subprocess.run(
            [sys.executable, "-m", "outloop.cli", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT / CALCULATOR)])},
            check=True,
            stdout=log,
            stderr=log,
        )


def train(config: str, name: str, model: Path, *overrides: str) -> Path:
    """Train once; the folder of the run."""
    folder = PLACE / name
    shutil.rmtree(folder, ignore_errors=True)
    settings = (f"run.dir={PLACE}", f"run.name={name}", f"model.path={model}", *overrides)
    flags = [part for setting in settings for part in ("--set", setting)]
    outloop("train", str(CALCULATOR / config), *flags)
    return folder


def imitator(name: str, model: Path, num_steps: int, *overrides: str) -> Path:
    """A supervised model, made once."""
    folder = PLACE / name / "hf"
    if not (folder / "model.safetensors").is_file():
        say(f"{name}: {num_steps} steps of supervised learning")
        train("warm_start.toml", name, model, f"trainer.num_steps={num_steps}", *overrides)
    return folder


def held_out(folder: Path) -> list[tuple[int, float, float]]:
    """(step, mean reward on held-out problems, its standard error)."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (row["step"], row["eval/sampled_reward"], row["eval/sampled_se"])
        for row in rows
        if row.get("eval/sampled_reward") is not None
    ]


def draw(curves: dict[str, list[tuple[int, float, float]]], teacher: float) -> None:
    """Held-out reward by step, and the teacher's."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.8), dpi=110, layout="constrained")
    for number, (name, points) in enumerate(curves.items()):
        steps, rewards, errors = zip(*points, strict=True)
        axes.errorbar(
            steps, rewards, yerr=errors, color=f"C{number}", marker="o", markersize=4, capsize=2,
            linewidth=1.3, label=LABELS[name],
        )  # fmt: skip
    axes.axhline(teacher, color="0.4", linestyle="--", linewidth=1, label=f"teacher {teacher:.2f}")
    axes.set_xlabel("step (96 episodes)")
    axes.set_ylabel("mean reward, held-out problems")
    axes.set_ylim(0.0, 1.05)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(OUT / "distillation.png")
    plt.close(figure)


def main() -> None:
    """Make the two models, train each way, print, write, draw."""
    PLACE.mkdir(parents=True, exist_ok=True)
    policy = PLACE / "policy"
    if not (policy / "model.safetensors").is_file():
        outloop(
            *("new-policy", "--out", str(policy), "--conversations", "tasks:conversations"),
            *("--import-dir", str(CALCULATOR)),
        )
    teacher = imitator(
        *("teacher", policy, NUM_TEACHER_STEPS),
        'env.conversations="oracle_conversations:conversations"',
    )
    student = imitator("student", policy, NUM_STUDENT_STEPS)
    chosen = os.environ.get("ONLY", "").split() or list(RUNS)
    evaluated = (f"eval.every={EVERY}", "eval.num_episodes=256", "eval.final_num_episodes=256")
    for name in chosen:
        config, overrides = RUNS[name]
        if not (PLACE / name / "hf").is_dir():
            say(f"{name}: {STEPS} steps")
            if config == "distill.toml":
                overrides = (*overrides, f"trainer.teacher.path={teacher}")
            train(config, name, student, f"trainer.num_steps={STEPS}", *evaluated, *overrides)
        points = held_out(PLACE / name)
        tell(
            "distillation",
            known("distillation")
            | {
                f"{name}_first": points[0][1],
                f"{name}_last": points[-1][1],
                f"{name}_gain_over_error": (points[-1][1] - points[0][1])
                / math.hypot(points[0][2], points[-1][2]),
            },
        )
    if not (PLACE / "teacher_evaluated" / "metrics.jsonl").is_file():
        train("run.toml", "teacher_evaluated", teacher, "trainer.num_steps=1", *evaluated)
    reward = held_out(PLACE / "teacher_evaluated")[0][1]
    tell("distillation", known("distillation") | {"teacher": reward})
    made = [name for name in RUNS if (PLACE / name / "hf").is_dir()]
    draw({name: held_out(PLACE / name) for name in made}, reward)
    weak = [name for name in chosen if known("distillation")[f"{name}_gain_over_error"] < 3.0]
    if weak:
        sys.exit(f"no gain of three standard errors: {', '.join(weak)}")


if __name__ == "__main__":
    main()
