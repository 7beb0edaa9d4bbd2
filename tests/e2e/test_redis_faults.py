"""A run whose Redis is killed, emptied, cut short or out of room."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.command_run import (
    assert_each_step_was_made_once,
    assert_nothing_is_left,
    read_rest,
    read_until,
    redis_of,
    times_of_steps,
    training,
)
from fakes.small_disk import can_mount, small_disk
from outloop.buffer.open_run import joined
from outloop.buffer.trajectories.steps import read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
Outloop = Callable[..., subprocess.CompletedProcess[str]]
WriteConfig = Callable[..., Path]
ReadMetrics = Callable[[Path], list[dict[str, float]]]
Allow = Callable[..., None]


@pytest.mark.slow
def test_a_run_goes_on_when_its_redis_is_killed(
    workspace: Path, write_config: WriteConfig, allow: Allow
) -> None:
    """Twice, in the middle: the launcher starts it again over its file, no other part ends, and
    every step is made once, by groups of which none is trained twice."""
    # Nothing that was acknowledged is lost, however busy the disk is.
    write_config(steps=8, held_s=100, fsync="always")
    allow(1)
    folder = workspace / "runs/tiny"
    with training(workspace) as process:
        redis_of(workspace).kill()
        killed_at = time.time()
        # Two more, and some that may be played again.
        allow(5)
        while len(made := [at for at in times_of_steps(folder) if at > killed_at]) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        # Long before the deadline of what was in flight.
        assert made[1] - killed_at < 60
        redis_of(workspace).kill()
        allow()
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    restarted = [line for line in output.splitlines() if "part_restarted" in line]
    assert len(restarted) == 2, output
    assert all("redis" in line for line in restarted)
    assert_each_step_was_made_once(8, folder)
    assert_nothing_is_left(workspace)


@pytest.mark.slow
def test_a_redis_whose_disk_is_full_holds_the_run_and_ends_nothing(
    workspace: Path,
    write_config: WriteConfig,
    outloop: Outloop,
    monkeypatch: pytest.MonkeyPatch,
    allow: Allow,
) -> None:
    """Terminal and `outloop status` name the folder; with room again the run goes on to its end, no
    part has ended, and nothing was made twice."""
    write_config(steps=6, held_s=100)
    allow(2)
    folder = workspace / "runs/tiny"
    with small_disk(folder / "redis", monkeypatch, mounts=can_mount()) as disk:
        with training(workspace) as process:
            disk.fill(redis_of(workspace).pid)
            allow()
            sentence = f"Redis cannot write: disk full at {disk.folder} ("
            read_until(sentence, process)
            assert sentence in outloop("status", "runs/tiny").stdout
            log = folder / "logs/trainer.log"
            while "redis_cannot_write" not in log.read_text():
                assert process.poll() is None
                time.sleep(0.05)
            disk.make_room()
            read_until("Redis writes again", process)
            output = read_rest(process)
        assert process.returncode == 0, output
        assert "part_restarted" not in output
        assert_each_step_was_made_once(6, folder)
    assert_nothing_is_left(workspace)


@pytest.mark.slow
def test_a_redis_without_its_last_writes_sends_the_trainer_back(
    workspace: Path, write_config: WriteConfig, read_metrics: ReadMetrics, allow: Allow
) -> None:
    """Killed, its file cut where it was a step ago, and started again: the trainer says so in the
    terminal, resumes from its checkpoint, and no version is given out twice."""
    # What was in flight when the file was as long as it is cut to is missed at its deadline.
    write_config(steps=8, held_s=20)
    allow(2)
    folder = workspace / "runs/tiny"
    with training(workspace) as process:
        (file,) = (folder / "redis").glob("appendonlydir/*.incr.aof")
        while not list((folder / "checkpoints").glob("step_2")):
            assert process.poll() is None
            time.sleep(0.05)
        size = file.stat().st_size
        allow(3)
        while len(times_of_steps(folder)) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        # Nobody starts it again before its file is cut.
        process.send_signal(signal.SIGSTOP)
        redis = redis_of(workspace)
        redis.kill()
        while redis.status() != "zombie":
            time.sleep(0.01)
        os.truncate(file, size)
        allow()
        process.send_signal(signal.SIGCONT)
        output = read_rest(process)
    assert process.returncode == 0, output
    (line,) = [line for line in output.splitlines() if "writes that it had acknowledged" in line]
    assert "part_restarted" in line
    assert "trainer" in line
    rows = [row for row in read_metrics(folder) if "train/loss" in row]
    assert {row["step"] for row in rows} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert len(rows) > 8
    versions = [row["train/policy_version"] for row in rows]
    assert len(set(versions)) == len(versions)
    steps = read_steps(folder)
    assert sorted(steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    groups = [group_id for one in steps.values() for take in one.takes for group_id in take]
    assert len(groups) == len(set(groups))
    with joined(folder) as reader:
        reader.ledger().check()
    assert_nothing_is_left(workspace)


@pytest.mark.slow
def test_a_redis_that_comes_back_empty_ends_the_run_with_a_sentence(
    workspace: Path,
    write_config: WriteConfig,
    outloop: Outloop,
    read_metrics: ReadMetrics,
    allow: Allow,
) -> None:
    """Nothing is trained on without the run's data; the next start resumes from the checkpoint."""
    write_config(steps=6, held_s=100)
    allow(2)
    folder = workspace / "runs/tiny"
    with training(workspace) as process:
        shutil.rmtree(folder / "redis/appendonlydir")
        redis_of(workspace).kill()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "Redis came back without this run" in output.strip().splitlines()[-1]
    assert "Traceback" not in output
    assert_nothing_is_left(workspace)
    allow()
    answer = outloop("train", "run.toml")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [row for row in read_metrics(folder) if "train/loss" in row]
    assert {row["step"] for row in rows} == {1, 2, 3, 4, 5, 6}
    versions = [row["train/policy_version"] for row in rows]
    assert len(set(versions)) == len(versions)
