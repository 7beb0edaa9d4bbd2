"""One side of a run alone, with real processes."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
Outloop = Callable[..., subprocess.CompletedProcess[str]]
WriteConfig = Callable[..., Path]
ReadMetrics = Callable[[Path], list[dict[str, float]]]


@pytest.mark.slow
def test_playing_and_training_may_be_done_apart(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """Episodes played without a trainer are trained without a server, their logprobs agreeing."""
    write_config(staleness=1, steps=1)
    graded = ("--set", "env.rollout_function_path=rollouts:graded", "--set", "run.name=played")
    played = outloop("rollout", "run.toml", "--out", "played.jsonl", *graded)
    assert played.returncode == 0, played.stdout + played.stderr
    lines = (workspace / "played.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert played.stdout.strip().endswith(f"wrote {len(episodes)} episodes to played.jsonl")
    assert len(episodes) == 32
    assert not list((workspace / "runs/played").glob("checkpoints/*"))
    trained = outloop("train-recorded", "run.toml", "played.jsonl")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    (row,) = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert row["train/episodes"] == 32
    assert row["train/logprob_gap_max"] < 1e-4
    assert not (workspace / "runs/tiny/redis").exists()
