"""`make gpu-check`: every point that needs a GPU, in one command and under ten minutes.

Runs each row as a process with a deadline and prints what it said, a table, and the lines for
docs/performance.md and docs/gpu.md. On a machine without a GPU it is a rehearsal: each row does
what of it a CPU can do, or says what it needs. Exits with 1 if a row fails.

    python tests/gpu/check.py [ROW...]      # only rows whose names begin so
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
MAX_S = 580.0
"""Of all rows together."""
CANNOT = 77
"""Exit code of a row that needs what is not here, and has said what."""
FIGURES = ("bucketed_vs_copy", "bucketed_vs_per_tensor", "pause_p50_ms", "pause_p99_ms")
PYTHON = sys.executable
SGLANG_VARIABLE = "OUTLOOP_SGLANG_PYTHON"
"""Names the python of an environment with SGLang for GPUs."""
HAS_GPU = torch.cuda.is_available()
MARKS = ("PASS", "FAIL", "INFO", "NEEDS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing to run."""

    name: str
    command: Sequence[str]
    max_s: float
    expected: str
    """What shows that it is right, on a GPU."""
    cpu_expected: str = ""
    """Of what a CPU can do of it; empty: the same."""
    is_alone: bool = False
    """Timed, so nothing runs beside it."""
    cpu_command: Sequence[str] | None = None
    """In place of `command` without a GPU; None: the same."""
    needs: str = ""
    """What it lacks here; empty: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a row went."""

    row: Row
    result: str
    seconds: float
    output: str

    def lines(self, *marks: str) -> list[str]:
        """What it printed behind one of MARKS."""
        return [
            line.split(" ", 1)[1]
            for line in self.output.splitlines()
            if line.startswith(tuple(f"{mark} " for mark in marks))
        ]

    @property
    def expected(self) -> str:
        """What shows that it is right here, or what it needs."""
        if self.result == "needs":
            return "; ".join(self.lines("NEEDS"))
        return self.row.expected if HAS_GPU else self.row.cpu_expected or self.row.expected

    @property
    def is_failure(self) -> bool:
        """True unless it went well, or could not run here and said why."""
        return self.result not in ("ok", "needs")


def _row(*arguments: str) -> list[str]:
    return [PYTHON, "tests/gpu/rows.py", *arguments]


def rows(folder: Path) -> list[Row]:
    """Everything, in the order of what builds on what."""
    pytest = [PYTHON, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    loop = f"sh tests/gpu/loop.sh {PYTHON} {folder}"
    speed = [PYTHON, "tests/gpu/speed.py"]
    sglang = os.environ.get(SGLANG_VARIABLE, "")
    return [
        Row(name="setting", command=_row("setting"), max_s=60, expected="versions, GPU, NCCL"),
        Row(
            name="checksum",
            command=_row("gpu_hash"),
            max_s=120,
            expected="15 times PASS: our checksum is that of SGLang's kernel",
        ),
        Row(
            name="buckets into SGLang",
            command=_row("buckets_into_sglang"),
            max_s=90,
            expected="no tensor wrong after 20 publishes by CUDA-IPC",
            cpu_expected="no tensor wrong after 4 publishes by shared memory",
        ),
        Row(
            name="exported memory",
            command=_row("exported_memory"),
            max_s=120,
            expected="21,000 exports over 300 publishes neither grow memory nor end the process",
        ),
        Row(
            name="group of ours",
            command=_row("group", "ours"),
            max_s=90,
            expected="3 broadcasts over NCCL; the first takes seconds, the others under 0.5 s",
            cpu_expected="3 broadcasts over gloo",
        ),
        Row(
            name="group of SGLang",
            command=_row("group", "sglang"),
            max_s=90,
            expected="the same; SGLang returns about 1 s before ours began",
            cpu_expected="3 broadcasts over gloo; SGLang returns when ours ends",
        ),
        Row(
            name="group, member absent",
            command=_row("group_absent"),
            max_s=60,
            expected="an error within 20 s of a deadline of 5",
            cpu_expected="over gloo an error within 20 s of a deadline of 5",
        ),
        Row(
            name="group, member stopped",
            command=_row("group_stopped"),
            max_s=150,
            expected="an error after 5 s, the group left at once, the process alive a minute later",
            cpu_expected="over gloo an error after 5 s, the group left, the process alive",
        ),
        Row(
            name="server, trainer, layers",
            # Warnings of a release of CUDA are no failures here.
            command=[*pytest, "-m", "gpu", "-W", "default", "tests/gpu"],
            max_s=240,
            expected="torch server, layers of both kinds and CUDA-IPC against transformers",
            cpu_expected="how kernels of variable length are called; the kernels run on GPUs only",
            cpu_command=[*pytest, "tests/engine/train/test_layer_kind.py"],
        ),
        Row(
            name="ranks",
            command=_row("parity", "dp2", "dp2_distributed", "tp2_sp", "pp2"),
            max_s=240,
            expected="losses, gradients, logprobs, weights of two ranks are those of one process",
            cpu_expected="one of the four layouts, over gloo, gives what one process gives",
            cpu_command=_row("parity", "dp2_distributed"),
        ),
        Row(
            name="ranks with experts",
            command=_row("parity", "moe_dp2", "ep2"),
            max_s=200,
            expected="the same, without Transformer Engine too",
            cpu_expected="one of the two layouts, over gloo, gives what one process gives",
            cpu_command=_row("parity", "ep2"),
        ),
        Row(
            name="colocation",
            command=[PYTHON, "tests/gpu/colocated_step.py"],
            max_s=120,
            expected="released memory is free, weights agree, the order is the documented one",
            cpu_expected="weights agree, the order is the documented one; nothing is measured",
            # Others' memory on the device would be counted.
            is_alone=True,
        ),
        Row(
            name="tokens/s and MFU, bfloat16",
            command=[*speed, "qwen3-0.6b", "--microbatch-tokens", "8192"],
            cpu_command=[*speed, "tiny"],
            max_s=120,
            expected="tokens/s and MFU beside a plain loop over transformers",
            cpu_expected="the program runs, on a tiny shape: its figures say nothing",
            is_alone=True,
        ),
        Row(
            name="tokens/s and MFU, float32",
            command=[
                *(*speed, "qwen3-0.6b", "--dtype", "float32", "--alone"),
                *("--recompute", "--rows", "8"),
            ],
            cpu_command=[*speed, "tiny", "--dtype", "float32", "--alone"],
            max_s=60,
            expected="with TF32, a third to a half of bfloat16's tokens/s",
            cpu_expected="the program runs in float32 too",
            is_alone=True,
        ),
        Row(
            name="the loop",
            command=["sh", "-c", f"{loop} cuda cuda_ipc 200 3"],
            cpu_command=["sh", "-c", f"{loop} cpu shared_memory 20 1"],
            max_s=180,
            expected="warm start and RL in bfloat16 on one GPU that servers share: exit code 0",
            cpu_expected="20 steps of SFT and one of RL in bfloat16, by shared memory: exit code 0",
            is_alone=True,
        ),
        Row(
            name="bench-publish",
            command=[PYTHON, "tests/bench/publish.py", "--device", "cuda"],
            max_s=150,
            expected="figures for docs/performance.md",
            is_alone=True,
            needs="" if HAS_GPU else "a GPU; `make bench-publish` is the CPU's",
        ),
        Row(
            name="the loop beside SGLang",
            command=[
                *("sh", "-c", f'{loop} cuda cuda_ipc 200 2 "$@"', "loop"),
                *("--set", "server.kind=sglang", "--set", f"server.sglang_python={sglang}"),
            ],
            max_s=240,
            expected="the same with SGLang, which frees its memory for each step: exit code 0",
            is_alone=True,
            needs=""
            if HAS_GPU and sglang
            else f"a GPU, and {SGLANG_VARIABLE}=PYTHON of an environment with SGLang for it; on a "
            "CPU `make test-sglang` has SGLang's memory calls",
        ),
    ]


def run(row: Row, max_s: float) -> Outcome:
    """Run one row within `max_s`."""
    command = row.command if HAS_GPU or row.cpu_command is None else row.cpu_command
    began_at = time.monotonic()
    if row.needs:
        return Outcome(row=row, result="needs", seconds=0.0, output=f"NEEDS {row.needs}")
    environment = os.environ | {"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1"}
    try:
        answer = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=max_s,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output = answer.stdout
        codes = {0: "ok", CANNOT: "needs"}
        result = codes.get(answer.returncode, f"exit code {answer.returncode}")
    except subprocess.TimeoutExpired as error:
        output, result = error.stdout or b"", f"not done after {max_s:.0f} s"
    return Outcome(
        row=row,
        result=result,
        seconds=time.monotonic() - began_at,
        output=output.decode(errors="replace"),
    )


def say(outcome: Outcome) -> None:
    """What a row said that matters; all of its last lines if it failed."""
    print(f"--- {outcome.row.name}: {outcome.result}, {outcome.seconds:.0f} s", flush=True)
    lines = outcome.output.splitlines()
    known = [line for line in lines if line.startswith(MARKS)]
    for line in known:
        print(f"    {line}")
    if outcome.is_failure or not known:
        for line in lines[-25 if outcome.is_failure else -2 :]:
            print(f"    {line[:300]}")
    sys.stdout.flush()


def summarize(outcomes: Sequence[Outcome], device: str) -> None:
    """The table, and the lines for the pages."""
    table = Table(title=f"gpu-check on {device}", title_justify="left")
    for column in ("row", "result", "seconds", "expected, or needed"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for outcome in outcomes:
        seconds = f"{outcome.seconds:.0f}"
        table.add_row(outcome.row.name, outcome.result, seconds, outcome.expected)
    Console(width=160).print(table)
    print("Lines for docs/gpu.md and docs/performance.md:\n")
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {device}, torch {torch.__version__} (`make gpu-check`).\n"
    )
    print("| row | result |\n|---|---|")
    for outcome in outcomes:
        words = [outcome.result, *outcome.lines("INFO", "NEEDS")]
        print(f"| {outcome.row.name} | {'; '.join(words)} |")
    report = ROOT / "runs" / "bench" / "publish-cuda.json"
    if HAS_GPU and report.is_file():
        figures = json.loads(report.read_text())["figures"]
        for name in FIGURES:
            print(f"| `{name}` | {figures[name]:.2f} |")


def main() -> int:
    """Exit code."""
    deadline = time.monotonic() + MAX_S
    if not HAS_GPU:
        print(
            "torch offers no CUDA device here "
            f"(torch {torch.__version__}): a rehearsal of what a CPU can show."
        )

    def go(row: Row) -> Outcome:
        outcome = run(row, min(row.max_s, max(1.0, deadline - time.monotonic())))
        say(outcome)
        return outcome

    with tempfile.TemporaryDirectory() as name:
        chosen = [
            row
            for row in rows(Path(name))
            if len(sys.argv) == 1 or row.name.startswith(tuple(sys.argv[1:]))
        ]
        # Tiny models: on a GPU they fit beside each other; on a CPU they would slow each other.
        with ThreadPoolExecutor(8 if HAS_GPU else 1) as pool:
            outcomes = list(pool.map(go, [row for row in chosen if not row.is_alone]))
        outcomes += [go(row) for row in chosen if row.is_alone]
    summarize(outcomes, torch.cuda.get_device_name() if HAS_GPU else "a CPU")
    return 1 if any(outcome.is_failure for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
