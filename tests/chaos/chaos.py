"""`make test-chaos`: kill -9 of Redis, the trainer and the runner at random moments, and an audit.

Each seed is a run of its own with real processes: kills at moments that the seed decides, then
peace until the trainer has trained enough. The auditor reads the last checkpoint and Redis: every
slot is in the surviving weights at most once, and every slot below the cursor is in them, held by
one live group, to be played again, or was dropped with a reason. Exit code 0 if all seeds pass.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Literal

from audit import check_slots, is_sound, read_held

from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import build_settings

PARTS = Path(__file__).with_name("parts.py")
TIMEOUT_S = 90.0


class Chaos:
    """One seed: the processes, who kills them and who starts them again."""

    def __init__(self, seed: int, folder: Path, num_slots: int) -> None:
        self.choices = random.Random(seed)
        self.num_slots = num_slots
        fsync: Literal["always", "everysec"] = "always" if seed % 2 else "everysec"
        self.settings = build_settings(
            {
                "run": {"name": "chaos", "dir": str(folder), "seed": seed},
                "model": {"path": str(folder)},
                "env": {
                    "episode_deadline_s": 0.5,
                    "max_replacements": 50,
                    "max_replaced_share": 1.0,
                },
                "buffer": {
                    "fsync": fsync,
                    "group_size": 3,
                    "max_staleness": seed % 3,
                    "pipeline_depth": ("auto", 0.5, 2)[seed % 5 % 3],
                    "over_provision": 1.5 if seed % 4 == 1 else 1.0,
                    "group_deadline_s": 2.0,
                    "lease_s": 30.0,
                },
                "trainer": {"groups_per_step": 2},
            },
            source="chaos",
        )
        self.dir = folder / "chaos"
        self.redis = EmbeddedRedis(self.dir / "redis", fsync=fsync, max_memory_mb=64)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.kills: Counter[str] = Counter()
        self.run = self._start_redis()
        init_run(self.run)

    def _start_redis(self) -> Run:
        return create_run(self.settings, self.dir, self.redis.start())

    def _start(self, part: str) -> None:
        number = self.num_slots if part == "trainer" else self.choices.randrange(10**6)
        command = [sys.executable, str(PARTS), part, str(self.dir), str(number)]
        with (self.dir / f"{part}.log").open("ab") as log:
            self.processes[part] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, victim: str) -> None:
        """kill -9; Redis comes back at once, the others when they are missed."""
        self.kills[victim] += 1
        if victim == "redis":
            os.kill(self.redis.pid, signal.SIGKILL)
            self.redis.stop()
            self.run = self._start_redis()
        elif victim in self.processes:
            self.processes[victim].kill()
            self.processes[victim].wait()

    def play(self, num_kills: int) -> None:
        """Kill and restart until the trainer has finished."""
        deadline = time.monotonic() + TIMEOUT_S
        next_kill = time.monotonic() + self.choices.uniform(0.2, 2.0)
        while True:
            for part in ("runner", "trainer"):
                if part not in self.processes:
                    self._start(part)
                code = self.processes[part].poll()
                if code == 0 and part == "trainer":
                    return
                if code in (3, 2):
                    raise AssertionError(f"{part} found something wrong: {self._log(part)}")
                if code is not None:
                    self._start(part)
            if num_kills and time.monotonic() > next_kill:
                num_kills -= 1
                self.kill(self.choices.choice(["redis", "trainer", "trainer", "runner"]))
                next_kill = time.monotonic() + self.choices.uniform(0.05, 1.5)
            assert time.monotonic() < deadline, f"stuck: {self._log('trainer')}"
            time.sleep(0.01)

    def audit(self) -> str:
        """What the checkpoint and Redis prove; one line.

        Raises:
            AssertionError: a slot was trained twice, or lost.
        """
        slots = json.loads((self.dir / "checkpoint.json").read_text())["slots"]
        assert len(slots) >= self.num_slots
        reader = BufferReader.connect(self.run)
        num_missing = check_slots(slots, read_held(reader, self.run))
        reader.close()
        return f"{len(slots)} slots trained, {num_missing} dropped, {self.suffered()}"

    def suffered(self) -> str:
        """Who was killed."""
        return f"kills {dict(self.kills)}"

    def stop(self) -> None:
        """End what is left."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.redis.stop()

    def _log(self, part: str) -> str:
        return (self.dir / f"{part}.log").read_text(errors="replace")[-2000:]


def main() -> int:
    """Play the seeds; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--slots", type=int, default=120)
    parser.add_argument("--kills", type=int, default=8)
    words = parser.parse_args()
    failed = 0
    for seed in range(words.first_seed, words.first_seed + words.seeds):
        with tempfile.TemporaryDirectory() as folder:
            chaos = Chaos(seed, Path(folder), words.slots)
            failed += not is_sound(f"seed {seed}", chaos, partial(chaos.play, words.kills))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
