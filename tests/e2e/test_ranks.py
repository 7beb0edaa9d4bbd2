"""The loop with a trainer of several ranks."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
Outloop = Callable[..., subprocess.CompletedProcess[str]]
WriteConfig = Callable[..., Path]
ReadMetrics = Callable[[Path], list[dict[str, float]]]
TWO_RANKS = (
    "--set",
    "trainer.num_ranks=2",
    "--set",
    "trainer.megatron.tensor_model_parallel_size=2",
    "--set",
    "trainer.megatron.sequence_parallel=true",
)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """With a path to which a socket's fits."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def ranks_of(folder: Path) -> list[psutil.Process]:
    """The trainer's ranks: children of torchrun, which is the trainer of the launcher."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and "outloop.cli trainer" in words and " -u " in words:
            found.append(process)
    return sorted(found, key=lambda process: process.pid)


def assert_nothing_is_left(folder: Path) -> None:
    """No process of the run outlives it."""
    left = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in str(p.info["cmdline"])]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive


@pytest.mark.slow
def test_two_ranks_train_and_publish(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """Two halves make one policy: logprobs agree with the server, the folder is whole."""
    write_config(steps=3)
    graded = ("--rollout-function-path", "rollouts:graded")
    answer = outloop("train", "run.toml", *TWO_RANKS, *graded, timeout_s=300.0)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert [row["train/policy_version"] for row in rows] == [1, 2, 3]
    gaps = [r["train/logprob_gap_max"] for r in rows if r["train/logprob_gap_max"] is not None]
    assert gaps
    assert max(gaps) < 1e-4
    assert (workspace / "runs/tiny/hf/model.safetensors").is_file()
    assert_nothing_is_left(workspace)


@pytest.mark.slow
def test_two_ranks_complete_one_batch(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """Reference, KL in the reward, recomputed logprobs and two updates of a take: columns that
    every rank gives the batch that it was sent."""
    write_config(steps=2)
    settings = ("trainer.recipe=reinforce_pp", "trainer.proximal=recompute")
    answer = outloop(
        *("train", "run.toml", *TWO_RANKS),
        *(word for setting in settings for word in ("--set", setting)),
        *("--set", "trainer.num_updates_per_take=2"),
        timeout_s=300.0,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "recipe reinforce_pp: " in answer.stdout
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["train/proximal_ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert row["train/last_ratio_max"] > 0
        assert row["train/kl_penalty_mean"] is not None
    assert abs(rows[0]["train/kl"]) < 1e-4


@pytest.mark.slow
def test_a_killed_rank_takes_the_trainer_with_it_and_the_run_goes_on(
    workspace: Path,
    write_config: WriteConfig,
    read_metrics: ReadMetrics,
    allow: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    short_folder: Path,
) -> None:
    """kill -9 of rank 1: no rank is left waiting, the trainer resumes, every step is there, and no
    temporary file but torch's own cache, and what its memory manager of a killed rank leaves."""
    monkeypatch.setenv("TMPDIR", str(short_folder))
    write_config(steps=4, held_s=100)
    allow(2)
    with subprocess.Popen(
        [sys.executable, "-m", "outloop.cli", "train", "run.toml", *TWO_RANKS],
        cwd=workspace,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            path = workspace / "runs/tiny/metrics.jsonl"
            deadline = time.monotonic() + 200
            while not (path.exists() and "train/loss" in path.read_text()):
                assert process.poll() is None, process.stdout.read() if process.stdout else ""
                assert time.monotonic() < deadline
                time.sleep(0.2)
            ranks_of(workspace)[-1].send_signal(signal.SIGKILL)
            allow()
            output, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert "part_restarted" in output
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert sorted({row["step"] for row in rows}) == [1, 2, 3, 4]
    assert_nothing_is_left(workspace)
    of_torch = ("torchinductor_", "torch-shm-dir-")
    assert [path for path in short_folder.iterdir() if not path.name.startswith(of_torch)] == []


@pytest.mark.slow
def test_sizes_that_the_model_does_not_allow_are_one_sentence(
    workspace: Path, write_config: WriteConfig, outloop: Outloop
) -> None:
    """Every rank refuses before a process group is formed; the sizes that work are named."""
    write_config()
    answer = outloop(
        "train",
        "run.toml",
        "--set",
        "trainer.num_ranks=3",
        "--set",
        "trainer.megatron.tensor_model_parallel_size=3",
        timeout_s=200.0,
    )
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert "tensor_model_parallel_size=3 does not divide" in answer.stderr
    assert "these do: 1, 2" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert_nothing_is_left(workspace)
