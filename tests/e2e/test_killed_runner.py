"""A runner killed in the middle of long episodes costs no turn that was generated before."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes import long_conversation
from fakes.tap import Tap
from fakes.torch_server_process import ServerProcess
from outloop.buffer.open_run import joined
from outloop.buffer.records import Trajectory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NUM_TURNS = 6
NUM_BEFORE = 4
ROLLOUTS = f'''
import asyncio
import os

from long_conversation import converse


def tasks():
    return [{{"question": f"say {{i}}"}} for i in range(8)]


def eval_tasks():
    return [{{"question": "hold"}}]


async def play(task, episode):
    """A long conversation that, the first time, stops in the middle until it is killed."""

    async def stop(number, answer):
        with open("turns.log", "a") as log:
            log.write(f"{{answer.id}} {{number}}\\n")
        if number == {NUM_BEFORE - 1} and not os.path.exists("killed"):
            await asyncio.sleep(3600)

    return await converse(task, episode, {NUM_TURNS}, stop)
'''


class CountingTap(Tap):
    """Counts the calls of a server."""

    def __init__(self, url: str) -> None:
        self.num_calls: Counter[str] = Counter()
        """By path."""
        super().__init__(url)

    def on_call(self, path: str) -> None:
        """One more."""
        self.num_calls[path] += 1


@contextlib.contextmanager
def started(workspace: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command of outloop, killed at the end."""
    with (workspace / "parts.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "outloop.cli", *arguments],
            cwd=workspace,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until(is_true: Callable[[], bool], what: str, process: subprocess.Popen[str]) -> None:
    """Wait for something that `process` does."""
    deadline = time.monotonic() + 90
    while not is_true():
        assert process.poll() is None, f"the process ended before {what}"
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.1)


def lines_of(workspace: Path) -> list[list[str]]:
    """What the agents wrote: the answer's id and the number of the turn."""
    path = workspace / "turns.log"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_killed_runner_s_turns_are_not_generated_again(
    workspace: Path, write_config: Callable[..., Path]
) -> None:
    """kill -9 in the middle: the next runner's agents get the recorded turns, the server makes the
    rest, and the record has each turn once, under the id that the first agent got."""
    write_config(staleness=0, steps=1)
    (workspace / "rollouts.py").write_text(ROLLOUTS)
    long_conversation.install(workspace)
    server = ServerProcess(workspace / "model", max_context_tokens=256)
    tap = CountingTap(server.url)
    values = {
        "server.num_servers": 0,
        "server.urls": [tap.url],
        "buffer.group_size": 2,
        "trainer.groups_per_step": 1,
        "trainer.num_steps": 1,
        "env.episode_deadline_s": 12,
    }
    options = [f"--set={name}={json.dumps(value)}" for name, value in values.items()]
    try:
        with started(workspace, "serve", "run.toml", *options) as serving:
            assert serving.stdout is not None
            assert "keys_file" in serving.stdout.readline()
            num_probes = tap.num_calls["/generate"]
            with started(workspace, "runner", "--run", "runs/tiny") as runner:
                until(lambda: len(lines_of(workspace)) == 2 * NUM_BEFORE, "the first turns", runner)
                runner.kill()
                runner.wait()
            (workspace / "killed").touch()
            assert tap.num_calls["/generate"] - num_probes == 2 * NUM_BEFORE
            with (
                started(workspace, "runner", "--run", "runs/tiny") as runner,
                joined(workspace / "runs/tiny") as reader,
            ):
                until(lambda: reader.stats()["buffer/ready_groups"] == 1, "the group", runner)
                stats = reader.stats()
                found = [t for t in reader.archive.trajectories() if isinstance(t, Trajectory)]
            assert tap.num_calls["/generate"] - num_probes == 2 * NUM_TURNS
    finally:
        tap.close()
        server.kill()
    assert len(found) == 2
    lines = lines_of(workspace)
    before, after = lines[: 2 * NUM_BEFORE], lines[2 * NUM_BEFORE :]
    assert sorted(before) == sorted(x for x in after if int(x[1]) < NUM_BEFORE)
    told = {answer_id.removeprefix("chatcmpl-") for answer_id, _ in after}
    assert told == {turn.turn_id for t in found for turn in t.turns}
    for trajectory in found:
        (branch,) = trajectory.branches()
        assert len(branch) == NUM_TURNS
    assert stats["buffer/resumed_attempts"] == 2
    assert stats["buffer/replayed_turns"] == 2 * NUM_BEFORE
    assert stats["buffer/turns"] == 2 * NUM_TURNS
    assert stats["buffer/replaced_attempts"] == stats["buffer/turns_not_replayed"] == 0
