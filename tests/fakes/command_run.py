"""`outloop train` as a process in a user's folder, and what belongs to it.

Owns: finding the run's processes, waiting for its first step, what it must hold at its end. Does
not own: what is in the folder (user_folder). Invariant: `training` leaves no command running.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from outloop.buffer.open_run import joined
from outloop.buffer.store.ledger import REACHED_TRAINER
from outloop.buffer.telemetry import read_metrics
from outloop.buffer.trajectories.steps import read_steps


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process whose command line names the folder or that works in it."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = [*(process.info["cmdline"] or []), process.info["cwd"] or ""]
        if any(str(folder) in word for word in words):
            found.append(process)
    return found


def assert_nothing_is_left(folder: Path) -> None:
    """No process of the run outlives it; torch's own memory manager may take a moment to notice."""
    _, alive = psutil.wait_procs(processes_of(folder), timeout=10)
    assert not alive


@contextmanager
def training(workspace: Path) -> Iterator[subprocess.Popen[str]]:
    """`outloop train` from its first recorded step on; killed on the way out if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "outloop.cli", "train", "run.toml"],
        cwd=workspace,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            wait_for_steps(workspace / "runs/tiny/metrics.jsonl", process)
            yield process
        finally:
            process.kill()


def wait_for_steps(path: Path, process: subprocess.Popen[str]) -> None:
    """Return once the run has recorded a step; fail when it ends or takes too long."""
    deadline = time.monotonic() + 90
    while not (path.exists() and "train/loss" in path.read_text()):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.2)


def part_of(folder: Path, part: str) -> psutil.Process:
    """The process of a part, as the launcher started it."""
    (found,) = [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(folder)
        and (process.info["cmdline"] or [])[1:5] == ["-P", "-m", "outloop.cli", part]
    ]
    return found


def redis_of(folder: Path) -> psutil.Process:
    """The run's own."""
    (found,) = [
        process
        for process in psutil.process_iter(["cwd"])
        if (process.info["cwd"] or "") == str(folder / "runs/tiny/redis")
    ]
    return found


def times_of_steps(folder: Path) -> list[float]:
    """When each step was recorded."""
    return [row["time"] for row in read_metrics(folder) if "train/loss" in row]


def read_until(sentence: str, process: subprocess.Popen[str]) -> str:
    """What the command said, up to and with the line that holds the sentence."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if sentence in line:
            return said
    raise AssertionError(f"it never said {sentence!r}: {said}")


def read_rest(process: subprocess.Popen[str]) -> str:
    """What the command says until it ends."""
    assert process.stdout is not None
    said = process.stdout.read()
    process.wait()
    return said


def assert_each_step_was_made_once(num_steps: int, folder: Path) -> None:
    """By groups of which none was trained twice, and every attempt ended in one way."""
    rows = [row for row in read_metrics(folder) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert [row["train/policy_version"] for row in rows] == list(range(1, num_steps + 1))
    steps = read_steps(folder).values()
    groups = [group_id for step in steps for take in step.takes for group_id in take]
    assert len(groups) == len(set(groups)) >= num_steps * 8
    with joined(folder) as reader:
        ledger = reader.ledger()
    ledger.check()
    reached = [ledger.columns[name] for name in REACHED_TRAINER if name in ledger.columns]
    assert sum(column.num_attempts for column in reached) == num_steps * 8 * 4
