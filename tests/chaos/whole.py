"""Last part of `make test-chaos`: kill -9 of every part of a real run, and an audit.

Each seed is `outloop train` with a tiny policy: launcher, Redis, router, torch server, runner and
Megatron-core trainer as they are, killed at random moments; whoever is not started again by the
launcher is started again from outside, as a user would. The auditor reads every checkpoint and
Redis: in the surviving lineage of weights each slot was trained at most once, and each slot below
the cursor was trained, is held by one live group, is to be played again, or was dropped with a
reason. Exit code 0 if all seeds pass. `--ledger` is one seed whose ledger is written into
docs/reliability.md (`make test-ledger KILLS=50`).
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from audit import account_of, is_sound, read_held, read_marks, slot_of, surviving_groups
from reliability_page import record_ledger
from tiny import ROLLOUTS, make_model

from outloop.buffer.open_run import redis_of
from outloop.buffer.reader import BufferReader
from outloop.buffer.run import load_run

PARTS = ("redis", "router", "runner", "server", "trainer", "trainer", "trainer", "launcher")
"""Who may be killed; the trainer more often, since most can go wrong there."""
CONFIG = """
[run]
name = "whole"
dir = "runs"
seed = {seed}

[model]
path = "model"
renderer = "qwen3"
renderer_options = {{ enable_thinking = false }}
max_context_tokens = 256

[env]
rollout_function_path = "rollouts:play"
tasks = "rollouts:tasks"
max_concurrent_episodes = 16
episode_deadline_s = 300
max_runner_silence_s = 4
max_replacements = 50
max_replaced_share = 1.0

[sampling]
max_new_tokens = 8

[buffer]
fsync = "{fsync}"
group_size = 3
max_staleness = {staleness}
lease_s = 60
group_deadline_s = 400

[trainer]
num_steps = {steps}
learning_rate = 1e-3
groups_per_step = 3
checkpoint_every = {checkpoint_every}
keep_checkpoints = 1000
take_timeout_s = 120
"""


class Whole:
    """One seed: a run, who of it is killed when, and what is left of it."""

    def __init__(self, seed: int, folder: Path, model: Path, num_steps: int) -> None:
        self.choices = random.Random(seed)
        self.folder = folder
        self.run_dir = folder / "runs" / "whole"
        self.kills: Counter[str] = Counter()
        self.num_starts = 0
        (folder / "rollouts.py").write_text(ROLLOUTS)
        (folder / "model").symlink_to(model)
        text = CONFIG.format(
            seed=seed,
            fsync="always" if seed % 2 else "everysec",
            staleness=seed % 3,
            steps=num_steps,
            checkpoint_every=self.choices.choice([1, 2, 3]),
        )
        (folder / "run.toml").write_text(text)
        self.launcher = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.num_starts += 1
        with (self.folder / "launcher.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "outloop.cli", "train", "run.toml"],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    def play(self, num_kills: int, timeout_s: float, *, until_s: float = math.inf) -> None:
        """Kill and start again until the run has ended by itself.

        Args:
            until_s: nobody is killed any more after so many seconds; once nobody is, the run is
                stopped two steps later. Infinite: kills also come by the clock, and it goes on to
                its last step.

        Raises:
            AssertionError: it did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        next_kill = time.monotonic() + self.choices.uniform(5.0, 15.0)
        # A fast machine takes all its steps before the first of those moments.
        next_step = self.choices.randint(1, 2)
        last_kill_at, last_row = time.monotonic() + until_s, sys.maxsize
        while True:
            if math.isfinite(until_s):
                if time.monotonic() > last_kill_at:
                    num_kills = 0
                if num_kills == 0 and last_row == sys.maxsize:
                    last_row = self._num_rows() + 2
                if self._num_rows() >= last_row and self.launcher.poll() is None:
                    self.launcher.terminate()
                    self.launcher.wait(timeout_s)
                    return
            code = self.launcher.poll()
            if code == 0:
                assert self.kills, "the run ended before anybody was killed"
                return
            if code is not None:
                self.launcher = self._start()
            # In a ledger every kill hits a run that trains, however long it takes to start.
            is_time = time.monotonic() > next_kill and math.isinf(until_s)
            if num_kills and (is_time or self._num_rows() >= next_step):
                victim = self.choices.choice(PARTS)
                if self._kill(victim):
                    num_kills -= 1
                    self.kills[victim] += 1
                    rows = self._num_rows()
                    print(f"kill {self.kills.total()}, {rows} steps: {victim}", flush=True)
                    next_step = rows + self.choices.randint(1, 2)
                next_kill = time.monotonic() + self.choices.uniform(0.5, 10.0)
            assert time.monotonic() < deadline, f"stuck after {dict(self.kills)}: {self.log()}"
            time.sleep(0.05)

    def _num_rows(self) -> int:
        """Steps recorded so far, those trained again included."""
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def _kill(self, victim: str) -> bool:
        if victim == "launcher":
            self.launcher.kill()
            self.launcher.wait()
            return True
        for process in self._processes():
            try:
                words = process.cmdline()
                is_redis = any(word.startswith("--unixsocket") for word in words)
                if (is_redis and victim == "redis") or f"outloop.cli {victim}" in " ".join(words):
                    process.kill()
                    return True
            except psutil.Error:
                continue
        return False

    def _processes(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.launcher.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def audit(self) -> str:
        """What checkpoints and Redis prove; one line.

        Raises:
            AssertionError: a slot was trained twice, or lost.
        """
        with redis_of(load_run(self.run_dir)) as run:
            account = account_of(run)
        return f"{account}, {self.num_starts} starts, {self.suffered()}"

    def suffered(self) -> str:
        """Who was killed."""
        return f"kills {dict(self.kills)}"

    def ledger_rows(self) -> dict[str, Any]:
        """What became of every task slot and of every attempt, the latter by their duration."""
        marks = read_marks(self.run_dir)
        with redis_of(load_run(self.run_dir)) as run:
            reader = BufferReader.connect(run)
            held, ledger = read_held(reader, run), reader.ledger()
            reader.close()
        ledger.check()
        slots = [slot_of(group_id) for group_id in surviving_groups(marks, held.parents)]
        trained, waiting = set(slots), held.replay | held.window
        return {
            "kills": dict(self.kills),
            "starts": self.num_starts,
            "checkpoints": len(marks),
            "reached": held.cursor,
            "trained": len(trained),
            "duplicated": len(slots) - len(trained),
            "to_play_or_open": len((waiting | set(held.live)) - trained),
            "dropped": len(set(range(held.cursor)) - trained - set(held.live) - waiting),
            "attempts_started": ledger.num_started,
            "columns": {
                name: {
                    "num_attempts": column.num_attempts,
                    "by_duration": {str(b): n for b, n in sorted(column.by_duration.items()) if n},
                }
                for name, column in ledger.columns.items()
            },
        }

    def stop(self) -> None:
        """End what is left, each by its id."""
        left = self._processes()
        self.launcher.kill()
        self.launcher.wait()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=10)

    def log(self) -> str:
        """The end of what was said."""
        return (self.folder / "launcher.log").read_text(errors="replace")[-3000:]


def main() -> int:
    """Play the seeds; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--ledger", action="store_true")
    words = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as model:
        make_model(Path(model))
        for seed in range(words.first_seed, words.first_seed + words.seeds):
            with tempfile.TemporaryDirectory(dir="/tmp") as folder:
                whole = Whole(seed, Path(folder), Path(model), words.steps)

                def play(whole: Whole = whole) -> None:
                    if not words.ledger:
                        whole.play(words.kills, words.timeout_s)
                        return
                    whole.play(words.kills, words.timeout_s, until_s=0.8 * words.timeout_s)
                    record_ledger(whole.ledger_rows())

                failed += not is_sound(f"seed {seed}", whole, play)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
