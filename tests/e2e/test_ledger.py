"""Whatever of a run is killed, every attempt that started is in one column of its ledger."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from outloop.buffer.open_run import joined
from outloop.buffer.store.ledger import REACHED_TRAINER, Ledger

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
NUM_PLAYED = 8 * 4
"""Episodes of one step."""
# What was in flight when the run was killed is played again soon after it goes on.
TRAIN = ("train", "run.toml", "--set", "env.max_runner_silence_s=4")
Outloop = Callable[..., subprocess.CompletedProcess[str]]
ReadMetrics = Callable[[Path], list[dict[str, float]]]


def ledger_of(run_dir: Path) -> Ledger:
    """The ledger, which closes."""
    with joined(run_dir) as reader:
        ledger = reader.ledger()
    ledger.check()
    return ledger


def kill_all(command: subprocess.Popen[str], folder: Path) -> None:
    """kill -9 of the command and of everything that works in the folder, Redis included."""
    command.kill()
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = [*(process.info["cmdline"] or []), process.info["cwd"] or ""]
        if any(str(folder) in word for word in words):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    command.wait()


@pytest.mark.slow
def test_the_columns_add_up_after_a_run_was_killed(
    workspace: Path,
    write_config: Callable[..., Path],
    outloop: Outloop,
    read_metrics: ReadMetrics,
    allow: Callable[..., None],
) -> None:
    """All processes at once in the middle of a step; then the run goes on to its end."""
    # Nothing that was acknowledged is lost, however busy the disk is.
    write_config(steps=4, staleness=1, held_s=100, fsync="always")
    allow(1)
    run_dir = workspace / "runs/tiny"
    log = workspace / "first.log"
    with log.open("w") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "outloop.cli", *TRAIN],
            cwd=workspace,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 120
        metrics = run_dir / "metrics.jsonl"
        is_held = (workspace / f"start-{NUM_PLAYED}").exists
        while not (metrics.exists() and "train/loss" in metrics.read_text() and is_held()):
            assert command.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        kill_all(command, workspace)
    allow()

    killed = ledger_of(run_dir)
    settled = [killed.columns[name] for name in REACHED_TRAINER if name in killed.columns]
    assert sum(column.num_attempts for column in settled) >= NUM_PLAYED
    assert killed.columns["open"].num_attempts > 0
    answer = outloop(*TRAIN)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    ended = ledger_of(run_dir)
    assert ended.num_started > killed.num_started
    rows = [row for row in read_metrics(run_dir) if "train/loss" in row]
    last = rows[-1]
    parts = [n for name, n in last.items() if name.startswith("buffer/ledger/")]
    assert sum(parts) == 2 * last["buffer/ledger/started"]
    assert last["buffer/ledger/trained"] == ended.columns["trained"].num_attempts
    assert last["buffer/length/trained_s"] > 0
    shown = outloop("buffer", "stats", "--run", str(run_dir))
    assert f"{ended.num_started} attempts started" in shown.stdout
