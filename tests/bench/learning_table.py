"""`make bench-learning`, first part: every recipe on three tasks, from several seeds.

A cell is a run of one recipe on one task from one seed, or the same with every episode given the
reward of another. Tasks differ in kind: a bandit of two turns and two lengths, the calculator with
its tool, and guess_number, of three turns with one reward at the end. The bandit's agent and
servers are in memory; of the others every part runs (`learning_cell`). All are synchronous
(`buffer.max_staleness = 0`) and without evaluations: a step's episodes are played before they are
trained.

Finished cells are kept in runs/bench/learning_table/ and not run again, unless what they would run
has changed. Several run side by side. A line for each finished one, with how long the rest will
take. At the end: runs/bench/learning_table.json, a picture for each recipe, and with DOCS=1 the
table in docs/algorithms.md and its pictures.

`TASKS="bandit"`, `RECIPES="grpo ppo"`, `SEEDS=3` and `CONTROLS=1` (seeds with exchanged rewards)
choose cells, `JOBS=2` how many run at once; `DRAW=1` runs none.

Per cell: the mean reward of the first and last `NUM_COMPARED` steps, and the gain. Errors are
pooled over the recipes of a task, since three seeds of one say little of their spread: a recipe has
learned when its mean gain is beyond what chance gives once in a thousand. A control must not be
beyond that by the spread of the other recipes' controls. The difference of two recipes' gains that
so many seeds show is stated, with a power of 0.8 at 0.05.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from figures import OUT, machine, say
from learning_cell import ROOT, TASKS, VARIANTS, trainer_settings

from outloop.buffer.evaluations.estimates import student_quantile
from outloop.buffer.settings.recipes import RECIPES

CELLS = OUT / "learning_table"
PAGE = ROOT / "docs" / "algorithms.md"
IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- learning table: make bench-learning DOCS=1 -->", "<!-- end of learning table -->"
NUM_SEEDS = int(os.environ.get("SEEDS", "3"))
NUM_CONTROLS = int(os.environ.get("CONTROLS", "1"))
NUM_JOBS = int(os.environ.get("JOBS", "2"))
NUM_COMPARED = 4
"""Steps at either end whose rewards are averaged."""
CHANCE = 1e-3
"""How often a run that learns nothing may pass as one that does."""
CELL_TIMEOUT_S = 900.0
MIN_OTHERS = 4
"""Controls of other recipes by which one is judged."""
NO_REWARDS = ("distill",)
"""Recipes that learn from a teacher: bench-distillation."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    recipe: str
    seed: int
    is_exchanged: bool

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.task}-{self.recipe}-{self.seed}{'-exchanged' * self.is_exchanged}"

    @property
    def plan(self) -> dict[str, Any]:
        """What a finished one must have run to count."""
        of = TASKS[self.task]
        made = {"num_warm_steps": of.num_warm_steps, "tasks": of.tasks}
        return made | {"trainer": trainer_settings(self.task, self.recipe)}

    def known(self, folder: Path = CELLS) -> dict[str, Any] | None:
        """What it came to; None: it has not been run as it would be now."""
        path = folder / f"{self.name}.json"
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found if found["plan"] == self.plan else None

    def keep(self, found: dict[str, Any], folder: Path = CELLS) -> None:
        """Write what it came to, whole or not at all."""
        path = folder / f"{self.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"plan": self.plan, "machine": machine()} | found, indent=1))
        os.replace(partial, path)


def cells_of(tasks: Iterable[str], recipes: Sequence[str]) -> list[Cell]:
    """Every cell, task by task, and there seed by seed."""
    return [
        Cell(task, recipe, seed, is_exchanged)
        for task in tasks
        for is_exchanged, num_seeds in ((False, NUM_SEEDS), (True, NUM_CONTROLS))
        for seed in range(num_seeds)
        for recipe in recipes
    ]


def warm_start(task: str) -> Path:
    """The folder that every run of a task begins with; made once."""
    of = TASKS[task]
    if not of.example:
        return CELLS / "policy-bandit"
    made = CELLS / f"warm-{task}-{of.num_warm_steps}"
    if (made / "hf" / "model.safetensors").is_file():
        return made / "hf"
    say(f"{task}: a warm start of {of.num_warm_steps} steps")
    base = CELLS / f"policy-{task}"
    example = f"examples/{of.example}"
    _outloop(
        *("new-policy", "--out", str(base), "--conversations", of.conversations),
        *("--import-dir", example),
    )
    settings = {
        "run.dir": f'"{CELLS}"',
        "run.name": f'"{made.name}"',
        "model.path": f'"{base}"',
        "env.conversations": f'"{of.conversations}"',
        "trainer.num_steps": str(of.num_warm_steps),
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    _outloop("train", f"{example}/warm_start.toml", *flags)
    return made / "hf"


def _outloop(*arguments: str) -> None:
    path = CELLS / "warm-start.log"
    with path.open("a") as log:
        done = subprocess.run(
            [sys.executable, "-m", "outloop.cli", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            stdout=log,
            stderr=log,
        )
    if done.returncode:
        last = "\n".join(path.read_text().splitlines()[-10:])
        sys.exit(f"outloop {' '.join(arguments)} ended with {done.returncode}: {path}:\n{last}")


class Job:
    """One process at a time that runs the cells of a task."""

    def __init__(self, number: int, models: dict[str, Path]) -> None:
        self._log = CELLS / f"job-{number}.log"
        self._models = models
        self._task = ""
        self._process: subprocess.Popen[str] | None = None

    def run(self, cell: Cell) -> dict[str, Any]:
        """What a cell came to, or its failure."""
        if self._process is None or self._task != cell.task:
            self.close()
            self._start(cell.task)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(CELL_TIMEOUT_S, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(asdict(cell)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            if "failure" in found:
                # What failed may have left something behind.
                self.close()
            return found
        self.close()
        return {"failure": f"its process ended, at the latest after {CELL_TIMEOUT_S:.0f} s"}

    def _start(self, task: str) -> None:
        self._task = task
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("learning_cell.py")), task],
                env=os.environ | {"MODEL": str(self._models[task]), "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process = None


class Progress:
    """What is done, what has failed, and how long the rest will take."""

    def __init__(self, missing: Sequence[Cell]) -> None:
        self._missing = list(missing)
        self._num = len(missing)
        self._seconds: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        self.failures: dict[str, str] = {}

    def done(self, cell: Cell, found: dict[str, Any]) -> None:
        """Keep a cell, and say so."""
        with self._lock:
            self._missing.remove(cell)
            number = self._num - len(self._missing)
            if "failure" in found:
                self.failures[cell.name] = found["failure"]
                say(f"{number}/{self._num} {cell.name}: FAILED, {found['failure']}")
                return
            cell.keep(found)
            self._seconds.setdefault(cell.task, []).append(found["seconds"])
            first, last = ends(found)
            say(
                f"{number}/{self._num} {cell.name}: {first:.3f} -> {last:.3f} in "
                f"{found['seconds']:.0f} s ({found['cpu_seconds']:.0f} of CPU); "
                f"about {self._left() / 60:.0f} min left"
            )

    def _left(self) -> float:
        every = [s for of_task in self._seconds.values() for s in of_task]
        means = {task: float(np.mean(of_task)) for task, of_task in self._seconds.items()}
        overall = float(np.mean(every))
        return sum(means.get(cell.task, overall) for cell in self._missing) / NUM_JOBS


def run_all(missing: Sequence[Cell]) -> dict[str, str]:
    """Run cells, several at once; the failures by name."""
    models = {task: warm_start(task) for task in dict.fromkeys(cell.task for cell in missing)}
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in missing:
        waiting.put(cell)
    progress = Progress(missing)

    def work(number: int) -> None:
        # Jobs use folders of their own where they make a model.
        own = {task: path.with_name(f"{path.name}-{number}") for task, path in models.items()}
        job = Job(number, {t: own[t] if not TASKS[t].example else models[t] for t in models})
        try:
            while True:
                try:
                    cell = waiting.get_nowait()
                except queue.Empty:
                    return
                progress.done(cell, job.run(cell))
        finally:
            job.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(NUM_JOBS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return progress.failures


def ends(found: dict[str, Any]) -> tuple[float, float]:
    """Mean reward of the first and of the last steps."""
    rewards = found["rewards"]
    return float(np.mean(rewards[:NUM_COMPARED])), float(np.mean(rewards[-NUM_COMPARED:]))


def gain(found: dict[str, Any]) -> float:
    """By how much the last steps are better than the first."""
    first, last = ends(found)
    return last - first


@dataclass(frozen=True)
class Row:
    """A recipe on a task."""

    task: str
    recipe: str
    cells: tuple[dict[str, Any], ...]
    controls: tuple[dict[str, Any], ...]

    @property
    def is_complete(self) -> bool:
        """Whether every seed and every control has been run."""
        return len(self.cells) == NUM_SEEDS and len(self.controls) == NUM_CONTROLS

    @property
    def gains(self) -> list[float]:
        """By seed."""
        return [gain(cell) for cell in self.cells]


def rows_of(task: str, recipes: Sequence[str], folder: Path = CELLS) -> list[Row]:
    """What is known of a task, by recipe; those of which nothing is known are left out."""
    found = []
    for recipe in recipes:
        cells, controls = (
            tuple(
                known
                for seed in range(count)
                if (known := Cell(task, recipe, seed, is_exchanged).known(folder))
            )
            for is_exchanged, count in ((False, NUM_SEEDS), (True, NUM_CONTROLS))
        )
        if cells or controls:
            found.append(Row(task, recipe, cells, controls))
    return found


def spread(rows: Sequence[Row]) -> tuple[float, int]:
    """Standard deviation over seeds of one run's gain, pooled over recipes, and its degrees of
    freedom; NaN and 0 where no recipe has two seeds."""
    several = [row.gains for row in rows if len(row.gains) > 1]
    degrees = sum(len(gains) - 1 for gains in several)
    if not degrees:
        return math.nan, 0
    total = sum(float(np.var(gains)) * len(gains) for gains in several)
    return math.sqrt(total / degrees), degrees


def detectable(deviation: float, degrees: int) -> float:
    """The difference of two recipes' mean gains that is found in four of five cases."""
    quantiles = student_quantile(0.975, degrees) + student_quantile(0.8, degrees)
    return quantiles * deviation * math.sqrt(2 / NUM_SEEDS)


def limit(deviation: float, degrees: int, num_seeds: int) -> float:
    """The mean gain of so many runs that chance gives once in a thousand."""
    return student_quantile(1.0 - CHANCE, degrees) * deviation / math.sqrt(num_seeds)


def control_limit(others: Sequence[float]) -> float:
    """The gain of one more control that chance gives once in a thousand, by the spread of these;
    infinite where they are too few to tell."""
    if len(others) < MIN_OTHERS:
        return math.inf
    deviation = float(np.std(others, ddof=1)) * math.sqrt(1 + 1 / len(others))
    return student_quantile(1.0 - CHANCE, len(others) - 1) * deviation


def sentences(rows: Sequence[Row]) -> list[str]:
    """What the complete rows of a task do not show.

    A control is measured by those of the other recipes: a policy that wanders without aim spreads
    more than one that learns the same from every seed.
    """
    found = []
    deviation, degrees = spread(rows)
    for row in rows:
        has_all = degrees > 0 and len(row.cells) == NUM_SEEDS
        if has_all and np.mean(row.gains) <= limit(deviation, degrees, NUM_SEEDS):
            found.append(f"{row.task}, {row.recipe}: nothing is learned from true rewards")
        others = [gain(one) for other in rows if other is not row for one in other.controls]
        for control in row.controls:
            if gain(control) > control_limit(others):
                found.append(f"{row.task}, {row.recipe}: something is learned from exchanged ones")
    controls = [gain(one) for row in rows for one in row.controls]
    if len(controls) > MIN_OTHERS:
        own = float(np.std(controls, ddof=1))
        if np.mean(controls) > limit(own, len(controls) - 1, len(controls)):
            found.append(f"{rows[0].task}: exchanged rewards teach the recipes together")
    return found


def table(every: dict[str, list[Row]]) -> str:
    """Markdown, a part for each task."""
    parts = []
    for task, rows in every.items():
        if not rows:
            continue
        deviation, degrees = spread(rows)
        num_complete = sum(row.is_complete for row in rows)
        lines = [
            f"**{task}**, {TASKS[task].num_steps} steps of "
            f"{rows[0].cells[0]['num_episodes'] if rows[0].cells else 64:.0f} episodes; "
            f"complete ({NUM_SEEDS} seeds, {NUM_CONTROLS} with exchanged rewards): {num_complete} "
            f"of {len(rows)} recipes.",
            "",
            "| recipe | first | last | gain | rewards exchanged: gain | seeds |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            first, last = np.mean([ends(cell) for cell in row.cells] or [[math.nan] * 2], axis=0)
            own = f"{np.mean(row.gains):.3f}" if row.cells else "-"
            if len(row.gains) > 1:
                own += f" +- {np.std(row.gains, ddof=1) / len(row.gains) ** 0.5:.3f}"
            other = ", ".join(f"{gain(control):.3f}" for control in row.controls) or "not run"
            count = f"{len(row.cells)}" + ("" if row.is_complete else ", incomplete")
            lines.append(
                f"| `{row.recipe}` | {first:.3f} | {last:.3f} | {own} | {other} | {count} |"
            )
        if degrees:
            lines += [
                "",
                f"A difference of {detectable(deviation, degrees):.3f} between two recipes' gains "
                f"would be found; a mean gain above {limit(deviation, degrees, NUM_SEEDS):.3f} "
                "comes by chance once in a thousand times.",
            ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def draw(recipe: str, every: dict[str, list[Row]], path: Path) -> None:
    """Rewards of a recipe by step: a small picture for each task, every seed a line, the control in
    grey."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        1, len(every), figsize=(8, 2.1), dpi=100, sharey=True, squeeze=False
    )
    for axes, (task, rows) in zip(grid.flat, every.items(), strict=True):
        for row in rows:
            if row.recipe != recipe:
                continue
            for cells, colour in ((row.controls, "0.75"), (row.cells, "C0")):
                for cell in cells:
                    rewards = cell["rewards"]
                    axes.plot(range(1, len(rewards) + 1), rewards, color=colour, linewidth=1.1)
        axes.set_title(task, size=9, loc="left")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.25)
        axes.set_xlabel("step", size=8)
        axes.tick_params(labelsize=8)
    grid.flat[0].set_ylabel("mean reward", size=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write(every: dict[str, list[Row]]) -> None:
    """The figures, the pictures, and with DOCS=1 both in the docs."""
    known = {task: rows for task, rows in every.items() if rows}
    figures = {
        f"{task}_{row.recipe}": {
            "rewards": [cell["rewards"] for cell in row.cells],
            "exchanged": [cell["rewards"] for cell in row.controls],
            "gains": row.gains,
            "seconds": [cell["seconds"] for cell in row.cells],
            "is_complete": row.is_complete,
        }
        for task, rows in known.items()
        for row in rows
    }
    report = {"name": "learning_table", "machine": machine(), "figures": figures}
    (OUT / "learning_table.json").write_text(json.dumps(report, indent=1))
    is_for_docs = os.environ.get("DOCS") == "1"
    for recipe in dict.fromkeys(row.recipe for rows in known.values() for row in rows):
        draw(recipe, known, (IMAGES if is_for_docs else OUT) / f"recipe_{recipe}.png")
    text = table(known)
    print(text)
    if is_for_docs:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        _, after = rest.split(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def chosen(name: str, every: Sequence[str]) -> list[str]:
    """What an environment variable names, or all; another name ends the program."""
    names = os.environ.get(name, "").split() or list(every)
    unknown = [one for one in names if one not in every]
    if unknown:
        sys.exit(f"{name}={' '.join(unknown)!r} is unknown; {', '.join(every)} are allowed")
    return names


def main() -> None:
    """Run what is missing, write; fail where a run failed or shows what it should not."""
    CELLS.mkdir(parents=True, exist_ok=True)
    tasks = chosen("TASKS", list(TASKS))
    known = [*(name for name in RECIPES if name not in NO_REWARDS), *VARIANTS]
    recipes = chosen("RECIPES", known)
    every = cells_of(tasks, recipes)
    missing = [cell for cell in every if cell.known() is None]
    failures: dict[str, str] = {}
    if os.environ.get("DRAW") != "1" and missing:
        say(f"{len(every)} cells, {len(every) - len(missing)} of them known")
        began_at = time.monotonic()
        failures = run_all(missing)
        say(f"{len(missing) - len(failures)} cells in {(time.monotonic() - began_at) / 60:.1f} min")
    rows = {task: rows_of(task, recipes) for task in tasks}
    write(rows)
    wrong = [f"{name}: {sentence}" for name, sentence in failures.items()]
    for of_task in rows.values():
        wrong += sentences(of_task)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
