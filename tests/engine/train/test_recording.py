"""Training on recorded groups: no buffer, no servers."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.bandit_run import FAST, Setup
from outloop.buffer.codec.jsonl import format_line
from outloop.buffer.errors import RecordError
from outloop.buffer.records import Trajectory, Turn
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.train.debug.recorded_groups import NoServers, Recording, read_groups
from outloop.engine.train.loop import RlLoop
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.sft import run_sft

MakeRun = Callable[..., Setup]
MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]


@pytest.fixture
def recorded(setup: MakeRun, tmp_path: Path) -> tuple[Setup, Path]:
    """A run of two steps, and the file of what it took: four groups of eight episodes a step."""
    made = setup(trainer=FAST | {"num_steps": 2, "groups_per_step": 4})
    made.train()
    taken = [one for lease in made.buffer.taken for one in lease.group.trajectories]
    path = tmp_path / "recorded.jsonl"
    path.write_bytes(b"".join(format_line(one).rstrip(b"\n") + b"\n" for one in taken))
    return made, path


def train(made: Setup, path: Path) -> list[dict[str, Any]]:
    """Run the loop on the file; the rows of the steps it made."""
    stop = threading.Event()
    before = len((made.run.dir / "metrics.jsonl").read_text().splitlines())
    recording = Recording(read_groups(path), stop)
    with MetricsWriter(made.run.dir) as metrics:
        RlLoop(
            made.run,
            made.ranks,
            reader=recording,
            leases=recording,
            publisher=NoServers(),
            metrics=metrics,
            stop=stop,
        ).run()
    lines = (made.run.dir / "metrics.jsonl").read_text().splitlines()[before:]
    return [json.loads(line) for line in lines]


@pytest.mark.medium
def test_a_recording_gives_the_weights_of_the_run(
    recorded: tuple[Setup, Path], setup: MakeRun
) -> None:
    """The same groups in the same order, without any server, end in the same bits."""
    run, path = recorded
    again = setup(
        trainer=FAST | {"num_steps": 2, "groups_per_step": 4, "resume": False},
        buffer={"max_staleness": 100},
    )
    rows = train(again, path)
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    pairs = zip(run.policy.model.parameters(), again.policy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.medium
def test_the_end_of_the_file_ends_the_run_with_a_checkpoint(
    recorded: tuple[Setup, Path], setup: MakeRun
) -> None:
    """Eight groups by three: three steps, the last of two groups; a resume finds nothing more."""
    _, path = recorded
    chosen = FAST | {"num_steps": 9, "groups_per_step": 3, "advantage": "reinforce_pp"}
    again = setup(trainer=chosen | {"resume": False}, buffer={"max_staleness": 100})
    rows = train(again, path)
    assert [row["train/episodes"] for row in rows] == [24, 24, 16]
    assert (again.run.dir / "checkpoints/step_3/COMPLETE").is_file()
    resumed = setup(trainer=chosen, buffer={"max_staleness": 100})
    assert train(resumed, path) == []


@pytest.mark.medium
@pytest.mark.parametrize("min_reward", [None, 1.0])
def test_recorded_episodes_are_imitated(
    recorded: tuple[Setup, Path],
    make_ranks: Callable[..., RankController],
    tmp_path: Path,
    min_reward: float | None,
) -> None:
    """All of them, or the best: their ids as they were sampled, by cross-entropy."""
    made, path = recorded
    settings = Settings(
        model=dict(made.run.settings.model),
        trainer=FAST | {"mode": "sft", "num_steps": 8, "num_epochs": 4, "min_reward": min_reward},
    )
    run = create_run(settings, tmp_path / "imitated", "unix:///nowhere")
    ranks, stop = make_ranks(run), threading.Event()
    recording = Recording(read_groups(path), stop)
    with MetricsWriter(run.dir) as metrics:
        run_sft(run, ranks, reader=recording, metrics=metrics, stop=stop)
    scores = ranks.score_prompts([[1, 2, token] for token in range(200)])
    share = float(np.exp([score[-1] for score in scores]).sum())
    assert (share > 0.9) == (min_reward == 1.0)


def test_bad_lines_and_files_without_episodes_are_refused(
    tmp_path: Path, make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> None:
    """Named by number; evaluations are no training episodes."""
    path = tmp_path / "bad.jsonl"
    good = format_line(make_trajectory([make_turn("a")]))
    path.write_bytes(good.rstrip(b"\n") + b"\n{}\nnot json\n")
    with pytest.raises(RecordError, match=r"2 bad lines.*line 2: .*line 3: "):
        read_groups(path)
    evaluation = make_trajectory([make_turn("a")], purpose="eval", group_id=None)
    path.write_bytes(format_line(evaluation).rstrip(b"\n") + b"\n")
    with pytest.raises(RecordError, match="holds no training episode"):
        read_groups(path)


@pytest.mark.slow
def test_the_command_trains_in_a_process_of_its_own(
    recorded: tuple[Setup, Path], tmp_path: Path
) -> None:
    """`train-recorded CONFIG FILE`, with nothing else running."""
    made, path = recorded
    config = tmp_path / "run.toml"
    config.write_text(
        f'[run]\nname = "alone"\ndir = "{tmp_path}"\n'
        f'[model]\npath = "{made.run.settings.model.path}"\n'
        "[trainer]\nnum_steps = 2\ngroups_per_step = 4\nlearning_rate = 1e-2\n"
    )
    answer = subprocess.run(
        [sys.executable, "-m", "outloop.cli", "train-recorded", str(config), str(path)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "trained 2 steps" in answer.stdout
    assert (tmp_path / "alone/checkpoints/step_2/COMPLETE").is_file()
