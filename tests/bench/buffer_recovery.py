"""From a killed process to the next trained step, in a real run of examples/calculator.

Owns: the run, who of it is killed when, and what bench-buffer measures of it. Does not own:
starting a part again, which the launcher does. Invariant: a figure is the time from a kill -9 to
the row in metrics.jsonl of a step later than any that was there; nothing that was started is left.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from figures import say

from outloop.buffer.telemetry import read_metrics

ROOT = Path(__file__).resolve().parents[2]
VICTIMS = ("trainer", "runner", "router", "server")
NUM_REPEATS = 3
"""As often as the launcher starts a part again."""
NUM_WARM_STEPS = 200
EPISODE_DEADLINE_S = 600.0
"""No recovery waits for it."""
SILENCE_S = 5.0
"""After which the attempts of a killed runner are lost."""
PEACE_STEPS = 3
"""Undisturbed steps before each kill; the last two of them are timed."""
STEP_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0
SETTINGS = {
    "run.name": "recovery",
    "env.episode_deadline_s": EPISODE_DEADLINE_S,
    "env.max_runner_silence_s": SILENCE_S,
    "buffer.group_deadline_s": 2 * EPISODE_DEADLINE_S,
    "env.max_replaced_share": 1.0,
    "trainer.num_steps": 1000,
    "trainer.groups_per_step": 8,
    "trainer.checkpoint_every": 1,
    "eval.every": 0,
}


def outloop(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """A command of the calculator's example; its output goes to a file."""
    with (folder / "output.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "outloop.cli", *words], cwd=ROOT, stdout=log, stderr=log
        )


def train(folder: Path, config: str, **settings: Any) -> subprocess.Popen[bytes]:
    """`outloop train` of one of the example's files."""
    place = {"run.dir": str(folder)} | settings
    flags = [word for k, v in place.items() for word in ("--set", f"{k}={json.dumps(v)}")]
    return outloop(folder, "train", f"examples/calculator/{config}", *flags)


def make_policy(folder: Path) -> None:
    """A policy that solves some problems, so that groups have signal."""
    model = folder / "policy"
    words = ("--conversations", "tasks:conversations", "--import-dir", "examples/calculator")
    new = outloop(folder, "new-policy", "--out", str(model), *words)
    assert new.wait() == 0, log_of(folder)
    warm = {"run.name": "warm", "model.path": str(model), "trainer.num_steps": NUM_WARM_STEPS}
    assert train(folder, "warm_start.toml", **warm).wait() == 0, log_of(folder)


def log_of(folder: Path) -> str:
    """The end of what was said."""
    return (folder / "output.log").read_text(errors="replace")[-3000:]


class RealRun:
    """The example under its launcher, and its steps as they are recorded."""

    def __init__(self, folder: Path, launcher: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.launcher = launcher
        self.choices = random.Random(0)
        self.step_seconds: list[float] = []

    def times(self) -> dict[int, float]:
        """Unix seconds at which each step was recorded first."""
        found: dict[int, float] = {}
        if (self.folder / "recovery" / "metrics.jsonl").is_file():
            for row in read_metrics(self.folder / "recovery"):
                if "train/loss" in row:
                    found.setdefault(row["step"], row["time"])
        return found

    def wait_for(self, step: int) -> dict[int, float]:
        """Until `step` is recorded.

        Raises:
            AssertionError: it took too long, or the run ended.
        """
        deadline = time.monotonic() + STEP_TIMEOUT_S
        pause = threading.Event()
        while max(times := self.times(), default=-1) < step:
            assert self.launcher.poll() is None, f"the run ended: {log_of(self.folder)}"
            assert time.monotonic() < deadline, f"no step {step}: {log_of(self.folder)}"
            pause.wait(0.05)
        return times

    def recovery_s(self, victim: str) -> float:
        """kill -9 of one part at any moment of a step, until a later step is recorded."""
        last = max(self.times(), default=0) + PEACE_STEPS
        times = self.wait_for(last)
        seconds = [times[step] - times[step - 1] for step in (last - 1, last)]
        self.step_seconds += seconds
        threading.Event().wait(self.choices.uniform(0.0, seconds[-1]))
        process = self._find(victim)
        reached = max(self.times())
        killed_at = time.time()
        process.kill()
        times = self.wait_for(reached + 1)
        return min(at for step, at in times.items() if step > reached) - killed_at

    def _find(self, victim: str) -> psutil.Process:
        for process in psutil.Process(self.launcher.pid).children():
            if victim in process.cmdline()[3:4]:
                return process
        raise AssertionError(f"no {victim} runs: {log_of(self.folder)}")

    def stop(self) -> None:
        """End it; its launcher ends the others."""
        self.launcher.terminate()
        self.launcher.wait(timeout=STOP_TIMEOUT_S)


@contextmanager
def running(folder: Path) -> Iterator[RealRun]:
    """The run, ended when the block ends."""
    model = str(folder / "warm" / "hf")
    run = RealRun(folder, train(folder, "run.toml", **SETTINGS, **{"model.path": model}))
    try:
        yield run
    finally:
        run.stop()


def measure_recovery_of_parts() -> dict[str, float]:
    """Median seconds by part, beside the run's own step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_policy(folder)
        seconds: dict[str, list[float]] = {victim: [] for victim in VICTIMS}
        with running(folder) as run:
            for _ in range(NUM_REPEATS):
                for victim in VICTIMS:
                    seconds[victim].append(run.recovery_s(victim))
                    say(f"{victim} killed, {seconds[victim][-1]:.1f} s until the next step")
            step_s = statistics.median(run.step_seconds)
    figures = {
        "recovery_step_s": step_s,
        "recovery_episode_deadline_s": EPISODE_DEADLINE_S,
        "recovery_silence_s": SILENCE_S,
    }
    for victim, some in seconds.items():
        figures[f"recovery_{victim}_s"] = statistics.median(some)
        figures[f"recovery_{victim}_max_s"] = max(some)
    return figures
