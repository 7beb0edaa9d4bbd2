"""`make gpu-check`: every point that needs a GPU, in one command and under ten minutes.

Runs each as a process with a deadline, prints a table and the lines for docs/performance.md.
Without a CUDA device it says so and exits with 2. Exits with 1 if a point fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
MAX_S = 570.0
"""Of all points together."""
FIGURES = ("bucketed_vs_copy", "bucketed_vs_per_tensor", "pause_p50_ms", "pause_p99_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One thing to run; `max_s` bounds it."""

    name: str
    command: list[str]
    max_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How it went."""

    name: str
    is_good: bool
    seconds: float
    words: str


def points(folder: Path) -> list[Point]:
    """Everything, the quick ones first."""
    python = sys.executable
    loop = [
        "trainer.num_steps=3",
        "trainer.device=cuda",
        "eval.every=0",
        "server.device=cuda",
        "publish.transport=cuda_ipc",
    ]
    loop += [f"model.path={folder / 'policy'}", f"run.dir={folder}"]
    train = [python, "-m", "outloop.cli", "train", "examples/calculator/run.toml"]
    return [
        Point(
            name="server, Megatron-core, layers, CUDA-IPC, parity",
            # Warnings of a release of CUDA are no failures here.
            command=[python, "-m", "pytest", "-m", "gpu", "-W", "default", "tests/gpu"],
            max_s=240,
        ),
        Point(
            name="new policy for the loop",
            command=[python, "-m", "outloop.cli", "new-policy", "--out", str(folder / "policy")],
            max_s=60,
        ),
        Point(
            name="the loop with the torch server on the GPU",
            command=train + [part for value in loop for part in ("--set", value)],
            max_s=180,
        ),
        Point(
            name="bench-publish on the device",
            command=[python, "tests/bench/publish.py", "--device", "cuda"],
            max_s=240,
        ),
    ]


def run(point: Point, max_s: float) -> Outcome:
    """Run one point; its output goes on to the terminal."""
    print(f"--- {point.name}", flush=True)
    began_at = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "4"}
    try:
        code = subprocess.run(
            point.command, cwd=ROOT, env=environment, timeout=max_s, check=False
        ).returncode
        words = "ok" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        code, words = 1, f"not done after {max_s:.0f} s"
    seconds = time.monotonic() - began_at
    return Outcome(name=point.name, is_good=code == 0, seconds=seconds, words=words)


def tell(outcomes: list[Outcome], device: str) -> None:
    """The table, and the lines for docs/performance.md."""
    table = Table(title=f"gpu-check on {device}", title_justify="left")
    for column in ("point", "result", "seconds"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for outcome in outcomes:
        table.add_row(outcome.name, outcome.words, f"{outcome.seconds:.0f}")
    Console().print(table)
    print("Lines for docs/performance.md:\n")
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {device}, torch {torch.__version__} (`make gpu-check`).\n"
    )
    print("| point | result |\n|---|---|")
    for outcome in outcomes:
        print(f"| {outcome.name} | {outcome.words} |")
    report = ROOT / "runs" / "bench" / "publish-cuda.json"
    if outcomes[-1].is_good:
        figures = json.loads(report.read_text())["figures"]
        for name in FIGURES:
            print(f"| `{name}` | {figures[name]:.2f} |")


def main() -> int:
    """Exit code."""
    if not torch.cuda.is_available():
        print(
            "make gpu-check needs a CUDA device and a torch built for it: "
            f"torch.cuda.is_available() is false here (torch {torch.__version__})."
        )
        return 2
    deadline = time.monotonic() + MAX_S
    with tempfile.TemporaryDirectory() as name:
        outcomes = [
            run(point, min(point.max_s, max(1.0, deadline - time.monotonic())))
            for point in points(Path(name))
        ]
    tell(outcomes, torch.cuda.get_device_name())
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
