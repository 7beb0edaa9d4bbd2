"""Second part of `make test-chaos`: real parts, killed at named moments, and an audit. Many seeds.

Each seed is a run with a tiny policy: Redis, router, torch server, runner and Megatron-core trainer
as they are, forked from a process that has imported them, so that a start costs no imports. The
seed decides who dies before or after which call (taps), and when Redis and the server die besides;
of every third seed the wires to Redis, router and server are bad for a while (wires). Whoever ended
is started again at once. The auditor compares the checkpoints of the surviving
lineage with what a witness saw each version trained on, and with what Redis holds. Exit code 0 if
all seeds pass.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import nursery
import psutil
from audit import account_of, is_sound
from taps import (
    MOMENTS,
    OnCall,
    Tap,
    append_line,
    check_moments,
    points_of,
    put_on,
    watch,
    witness_steps,
)
from tiny import ROLLOUTS, make_model
from wires import Wire, forward

from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings, build_settings

VICTIMS = ("trainer", "trainer", "trainer", "redis", "server")
"""Of the trainer's moments."""
HOST = "127.0.0.1"
PORTS = range(10_000, 30_000)
"""Not of those that the system gives to connections, which would take a port while its owner is
dead. A seed begins at its own process id, two ports from its neighbour's."""
WIRE_HOSTS = {"router": "127.0.0.3", "server": "127.0.0.2"}
"""Where the wires listen, on the port of what they lead to."""
RARE = ("recover", "checkpoint", "checkpoint_rename", "checkpoint_cleanup", "acknowledge")
"""Moments that a trainer may meet only once."""


def settings_of(choices: random.Random, folder: Path, model: Path, num_steps: int) -> Settings:
    """Of one seed."""
    fsync: Literal["always", "everysec"] = choices.choice(["always", "everysec"])
    return build_settings(
        {
            "run": {"name": "forked", "dir": str(folder / "runs"), "seed": choices.randrange(99)},
            "model": {
                "path": str(model),
                "renderer": "qwen3",
                "renderer_options": {"enable_thinking": False},
                "max_context_tokens": 256,
            },
            "env": {
                "rollout_function_path": "rollouts:play",
                "tasks": "rollouts:tasks",
                "import_dir": str(folder),
                "num_workers": 0,
                "max_concurrent_episodes": 16,
                "episode_deadline_s": 2.0,
                "max_replacements": 50,
                "max_replaced_share": 1.0,
            },
            "router": {"port": free_port(PORTS.start + 2 * os.getpid() % (len(PORTS) - 100))},
            "sampling": {"max_new_tokens": 8},
            "buffer": {
                "redis_url": f"unix://{folder / 'redis.sock'}",
                "fsync": fsync,
                "group_size": 3,
                "max_staleness": choices.randrange(3),
                "pipeline_depth": choices.choice(["auto", 0.5, 2]),
                "over_provision": choices.choice([1.0, 1.0, 1.5]),
                "lease_s": 30.0,
                "group_deadline_s": 60.0,
            },
            "trainer": {
                "num_steps": num_steps,
                "groups_per_step": 3,
                "learning_rate": 1e-3,
                "checkpoint_every": choices.choice([1, 2, 3, num_steps]),
                "keep_checkpoints": 1000,
                "take_timeout_s": 90.0,
            },
        },
        source="forked",
    )


def free_port(first: int) -> int:
    """The first free one from `first` on: a router that is started again comes back to its address.

    Raises:
        AssertionError: none is left.
    """
    for port in range(first, PORTS.stop):
        with socket.socket() as listener, suppress(OSError):
            listener.bind((HOST, port))
            return port
    raise AssertionError(f"no port of {PORTS} is free from {first} on")


def is_running(pid: int) -> bool:
    """False also for a child that ended and was not waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def plan_of(seed: int, choices: random.Random) -> list[Tap]:
    """Who dies at which moment; consecutive seeds go through every moment of every part."""

    def tap(part: str, number: int, victim: str, most: int) -> Tap:
        points = points_of(part)
        moment, side = points[number % len(points)]
        count = 1 if moment in RARE else choices.randint(1, most)
        return Tap(part, moment, side, count, victim)

    return [
        tap("trainer", seed, "trainer", 2),
        tap("trainer", choices.randrange(999), choices.choice(VICTIMS), 3),
        tap("router", seed, "router", 12),
        tap("runner", seed, "runner", 4),
    ]


class Forked:
    """One seed: the parts, who of them dies when, and what is left of it."""

    def __init__(self, seed: int, folder: Path, model: Path, num_steps: int) -> None:
        self.choices = random.Random(seed)
        self.folder = folder
        (folder / "pids").mkdir()
        (folder / "rollouts.py").write_text(ROLLOUTS)
        settings = settings_of(self.choices, folder, model, num_steps)
        self.plan = plan_of(seed, self.choices)
        self.run_dir = folder / "runs" / "forked"
        self.redis = EmbeddedRedis(self.run_dir / "redis", fsync=settings.buffer.fsync)
        self.pids: dict[str, int] = {}
        self.wires: int | None = None
        self.advertised: dict[str, str] = {}
        self.num_starts: Counter[str] = Counter()
        self._start_redis()
        assert settings.buffer.redis_url is not None
        run = create_run(settings, self.run_dir, settings.buffer.redis_url)
        self.run = replace(run, redis_url=f"unix://{folder / 'real.sock'}")
        init_run(self.run)
        self.server_port = free_port(self.run.settings.router.port + 1)
        self._lay_wires(seed, has_faults=seed % 3 == 0)
        now = time.monotonic()
        self.blows = sorted(
            (now + self.choices.uniform(1.0, 8.0), victim)
            for victim in ("redis", "server")
            if self.choices.random() < 0.5
        )

    def _start_redis(self) -> None:
        """The parts know it by a link, so that it comes back where it was."""
        path, link = self.redis.start().removeprefix("unix://"), self.folder / "real.sock"
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        self._note("redis", self.redis.pid)

    def _lay_wires(self, seed: int, *, has_faults: bool) -> None:
        """Parts find Redis, router and server at an end of a wire; without faults, themselves."""
        if not has_faults:
            (self.folder / "redis.sock").symlink_to(self.folder / "real.sock")
            return
        port = self.run.settings.router.port
        wires = {
            "redis": Wire(self.folder / "redis.sock", self.folder / "real.sock"),
            "router": Wire((WIRE_HOSTS["router"], port), (HOST, port)),
            "server": Wire((WIRE_HOSTS["server"], self.server_port), (HOST, self.server_port)),
        }
        tell = partial(append_line, self.folder / "fired")
        self.advertised = WIRE_HOSTS
        self.wires = nursery.fork(lambda: forward(wires, seed, tell), self.folder / "wires.log")

    def _note(self, part: str, pid: int) -> None:
        (self.folder / "pids" / part).write_text(str(pid))
        self.num_starts[part] += 1

    def _start(self, part: str) -> None:
        words = [part, "--run", str(self.run_dir)]
        if part in self.advertised:
            words += ["--advertise", self.advertised[part]]
        if part == "server":
            words += ["--port", str(self.server_port)]
        # One that something else forestalled is put on the part's next process.
        done = self.fired()
        tap = next((tap for tap in self.plan if tap.part == part and str(tap) not in done), None)

        def work() -> int:
            os.chdir(self.folder)
            watched: dict[str, list[OnCall]] = {}
            if part == "trainer":
                watched[MOMENTS["trainer"]["mark_trained"]] = [witness_steps(self.folder)]
            if tap is not None:
                watched.setdefault(MOMENTS[part][tap.moment], []).append(put_on(tap, self.folder))
            watch(watched)
            return nursery.outloop(words)

        self.pids[part] = nursery.fork(work, self.folder / f"{part}.log")
        self._note(part, self.pids[part])

    def play(self, timeout_s: float) -> None:
        """Start again whoever ended until the trainer has finished.

        Raises:
            AssertionError: it did not finish in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if not is_running(self.redis.pid):
                self.redis.stop()
                self._start_redis()
            for part in ("router", "server", "runner", "trainer"):
                code = nursery.exit_code(self.pids[part]) if part in self.pids else -1
                if code is not None:
                    was_started = self.pids.pop(part, None) is not None
                    if was_started and part == "trainer" and code == 0:
                        return
                    self._start(part)
            self._strike()
            assert time.monotonic() < deadline, f"stuck: {self.log()}"
            nursery.wait_for_child(min(0.25, deadline - time.monotonic()))

    def _strike(self) -> None:
        while self.blows and time.monotonic() > self.blows[0][0]:
            _, victim = self.blows.pop(0)
            os.kill(int((self.folder / "pids" / victim).read_text()), signal.SIGKILL)
            append_line(self.folder / "fired", f"{victim} at any moment")

    def audit(self) -> str:
        """What checkpoints, the witness and Redis prove; one line.

        Raises:
            AssertionError: a slot was trained twice or lost, a checkpoint does not say what its
                weights were trained on, or a lease was left behind.
        """
        account = account_of(self.run, self.folder / "witness")
        assert account.held.num_leased == 0, f"{account.held.num_leased} leases are left"
        return f"{account}, {self.num_starts['trainer']} trainers; {self.suffered()}"

    def suffered(self) -> str:
        """Who died at which moment."""
        return ", ".join(self.fired())

    def fired(self) -> list[str]:
        """Who died at which moment."""
        path = self.folder / "fired"
        return path.read_text().splitlines() if path.exists() else []

    def stop(self) -> None:
        """End what is left."""
        for pid in (*self.pids.values(), *filter(None, [self.wires])):
            nursery.end(pid)
        self.redis.stop()

    def log(self) -> str:
        """The end of what each part said."""
        return nursery.ends_of_logs(self.folder)


def play_seed(seed: int, model: Path, num_steps: int, timeout_s: float) -> int:
    """One seed in a process of its own; 0 if it passed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        forked = Forked(seed, Path(folder), model, num_steps)
        is_good = is_sound(f"seed {seed}", forked, partial(forked.play, timeout_s))
    return 0 if is_good else 1


def main() -> int:
    """Play the seeds, some at a time; a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=180.0)
    parser.add_argument("--model", type=Path, help="left out: made")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        model = words.model or Path(made)
        if words.model is None:
            make_model(model)
        nursery.grow()
        check_moments()
        seeds = range(words.first_seed, words.first_seed + words.seeds)
        works = [partial(play_seed, one, model, words.steps, words.timeout_s) for one in seeds]
        return 1 if nursery.run_all(works, words.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
