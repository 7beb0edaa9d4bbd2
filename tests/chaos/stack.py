"""A whole run that is made to suffer: its Redis, its launcher and what they start.

Owns: the run's folder, starting Redis and the launcher again when they end, as a service manager
would; which process is which part; what phase of a step the trainer is in; reading how far it is.
Does not own: faults (faults), verdicts (matrix, soak, several_hosts). Invariant: `stop` leaves no
process of it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from audit import account_of
from hosts import Host

from outloop.buffer.errors import BufferUnavailable
from outloop.buffer.open_run import redis_of
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.keys import prefix
from outloop.buffer.run import Run, load_run
from outloop.buffer.telemetry import read_metrics
from outloop.engine.launch.launcher_process import find_launcher

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.ports import free_ports

PHASES = ("generating", "taking", "training", "publishing", "checkpointing", "evaluating")
PARTS = ("redis", "launcher", "router", "server", "trainer", "runner", "archiver", "sandbox")
ROLLOUTS = '''
import functools

from outloop.buffer.errors import EnvironmentFailure
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.backends import open_sandbox


@functools.cache
def sandbox():
    """Finding out what works here takes a while, once for each process."""
    return open_sandbox("bubblewrap", Limits(wall_s=30))


VERIFIER = """
import time
time.sleep(0.1)
print(len(open("answer.txt", errors="replace").read()))
"""


def tasks():
    return [{"question": f"say {i}"} for i in range(64)]


def eval_tasks():
    return [{"question": f"hold {i}"} for i in range(8)]


async def play(task, episode):
    """Length scores, counted in a sandbox: a random policy differs within a group."""
    answer = await episode.client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task.payload["question"]}]
    )
    text = answer.choices[0].message.content or ""
    if int(task.payload["question"].split()[1]) % 8:
        return float(len(text))
    result = await sandbox().run(
        {"main.py": VERIFIER, "answer.txt": text}, ("python", "main.py"), Limits(wall_s=30)
    )
    if result.ended != "exited":
        raise EnvironmentFailure(f"{result.ended}: {result.stderr[-200:]!r}")
    return float(result.stdout or b"0")
'''
_POLL_S = 0.01


class Stack:
    """One run; `hosts` gives parts, and Redis, a host of their own."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        changes: Mapping[str, Mapping[str, Any]],
        hosts: Mapping[str, Host] | None = None,
    ) -> None:
        self.folder = folder
        self.hosts = hosts or {}
        self.run_dir = folder / "runs/stack"
        self.starts: Counter[str] = Counter()
        self.ended: list[str] = []
        """What the launcher said when it ended by itself."""
        (folder / "model").symlink_to(model)
        self._redis_address = self._address_of("redis"), free_ports(1)[0]
        write_config(folder, self._redis_address, self.hosts, changes)
        places = {
            name: (host.command([]), host.address)
            for name, host in self.hosts.items()
            if name != "redis"
        }
        (folder / "hosts.json").write_text(json.dumps(places))
        self._leases = 0
        self._looked_at = -math.inf
        self._staying: Counter[str] = Counter()
        self.redis = self._start_redis()
        self.launcher = self._start_launcher()
        self._reader: BufferReader | None = None
        self._client: Any = None

    def _address_of(self, part: str) -> str:
        return self.hosts[part].address if part in self.hosts else "127.0.0.1"

    def _log(self, name: str) -> Any:
        return (self.folder / f"{name}.log").open("ab")

    def _start_redis(self) -> subprocess.Popen[bytes]:
        self.starts["redis"] += 1
        host, port = self._redis_address
        words = [
            *(sys.executable, "-m", "outloop.cli", "redis", "--dir", str(self.folder / "redis")),
            *("--host", host, "--port", str(port)),
            *("--password-file", str(self.folder / "password")),
        ]
        if "redis" in self.hosts:
            words = self.hosts["redis"].command(words)
        with self._log("redis") as log:
            return subprocess.Popen(words, cwd=self.folder, stdout=log, stderr=log)

    def _start_launcher(self) -> subprocess.Popen[bytes]:
        self.starts["launcher"] += 1
        words = ["-m", "outloop.cli", "train", "run.toml"]
        if self.hosts:
            words = [str(Path(__file__).with_name("placed.py")), "run.toml", "hosts.json"]
        with self._log("launcher") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def tend(self) -> None:
        """Start Redis and the launcher again if they ended."""
        if self.redis.poll() is not None:
            self.redis = self._start_redis()
        if self.launcher.poll() is not None:
            if self.launcher.returncode > 0:
                self.ended.append(self.log().strip().splitlines()[-1])
            self.launcher = self._start_launcher()

    def wait_until(self, is_true: Callable[[], bool], timeout_s: float) -> bool:
        """Tend until it is true; False if it was not in time."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > deadline:
                return False
            self.tend()
            time.sleep(_POLL_S)
        return True

    def steps(self) -> list[tuple[int, float]]:
        """As `steps_of`."""
        return steps_of(self.run_dir)

    def processes(self, part: str) -> list[psutil.Process]:
        """Those of a part, its main one first; none while it is being started."""
        if part in ("redis", "launcher"):
            process = self.redis if part == "redis" else self.launcher
            return alive([psutil.Process(process.pid)]) if process.poll() is None else []
        found = []
        for process in self._parts():
            with suppress(psutil.Error):
                words = process.cmdline()
                if part == "sandbox":
                    if words and Path(words[0]).name == "bwrap":
                        found.append(process)
                elif part == "rank":
                    if "-u" in words[1:3] and "trainer" in words:
                        found.append(process)
                elif "outloop.cli" in words and words[words.index("outloop.cli") + 1] == part:
                    found.append(process)
        if part == "rank":
            return found[-1:]
        with suppress(psutil.NoSuchProcess):
            # A sandbox may end while it is looked at.
            return alive([one for first in found[:1] for one in (first, *self._below(first.pid))])
        return []

    def _parts(self) -> list[psutil.Process]:
        """Return the launcher's children."""
        return self._below(self.launcher.pid)

    @staticmethod
    def _below(pid: int) -> list[psutil.Process]:
        try:
            return psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def run(self) -> Run:
        """Its handle."""
        return load_run(self.run_dir)

    def read(self, what: Callable[[BufferReader], Any]) -> Any:
        """What a reader of its buffer says; None while Redis is away."""
        try:
            if self._reader is None:
                self._reader = BufferReader.connect(self.run())
            return what(self._reader)
        except (BufferUnavailable, OSError):
            self._reader = None
            return None

    def phase(self) -> str:
        """Which part of a step the run is in; empty while it cannot be known."""
        writing = self.run_dir / "checkpoints"
        if writing.is_dir() and any(writing.glob(".step_*.writing")):
            return "checkpointing"
        try:
            if self._client is None:
                run = self.run()
                self._client, self._prefix = connect_sync(run.redis_url), prefix(run.run_id)
            pipeline = self._client.pipeline(transaction=False)
            pipeline.hmget(f"{self._prefix}state", "announced", "acknowledged")
            pipeline.zcard(f"{self._prefix}leases")
            pipeline.hkeys(f"{self._prefix}attempts")
            pipeline.llen(f"{self._prefix}eval_queue")
            (announced, acknowledged), leases, attempts, waiting = pipeline.execute()
        except Exception:  # noqa: BLE001 (whatever a Redis that is being hurt makes of it)
            self._client = None
            return ""
        is_taking, self._leases = leases > self._leases, leases
        if announced != acknowledged:
            return "publishing"
        if is_taking:
            return "taking"
        if waiting or any(name.startswith(b"eval") for name in attempts):
            return "evaluating"
        return "generating" if attempts else "training"

    def num_keys(self) -> tuple[int, int] | None:
        """(keys that stay, keys that expire) in Redis; None while it is away."""
        try:
            if self._client is None:
                run = self.run()
                self._client, self._prefix = connect_sync(run.redis_url), prefix(run.run_id)
            found = self._client.info("keyspace").get("db0", {"keys": 0, "expires": 0})
            return found["keys"] - found["expires"], found["expires"]
        except Exception:  # noqa: BLE001 (as in `phase`)
            self._client = None
            return None

    def bytes_that_stay(self, pause_s: float) -> int | None:
        """What the keys of Redis take that do not expire; None while it is away, or less than
        `pause_s` after the last look."""
        if time.monotonic() < self._looked_at + pause_s:
            return None
        try:
            client = connect_sync(self.run().redis_url)
            names = list(client.scan_iter(f"{prefix(self.run().run_id)}*", count=1000))
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.pttl(name)
            staying = [n for n, ttl in zip(names, pipeline.execute(), strict=True) if ttl == -1]
            for name in staying:
                pipeline.memory_usage(name, samples=0)
            sizes = pipeline.execute()
            client.close()
        except Exception:  # noqa: BLE001 (as in `phase`)
            return None
        self._looked_at = time.monotonic()
        self._staying.clear()
        for name, size in zip(staying, sizes, strict=True):
            words = name.decode().split(":", 2)[2].split(":")
            kind = ":".join([words[0], *(words[-1:] if len(words) > 2 else ())])
            self._staying[kind] += size or 0
        return self._staying.total()

    def staying(self) -> dict[str, int]:
        """Bytes by kind of key at the last look of `bytes_that_stay`, the largest first."""
        return dict(self._staying.most_common(8))

    def ledger_closes(self) -> bool:
        """Every attempt that started is in one column."""
        with redis_of(self.run()) as run:
            reader = BufferReader.connect(run)
            ledger = reader.ledger()
            reader.close()
        numbers = sum(column.num_attempts for column in ledger.columns.values())
        return numbers == ledger.num_started

    def audit(self) -> str:
        """As `audit_of`."""
        return audit_of(self.run_dir)

    def end_training(self, timeout_s: float) -> bool:
        """SIGTERM to the launcher, once it leads: the trainer writes a checkpoint and all ends;
        Redis stays. True if it did."""

        def leads() -> bool:
            leader = find_launcher(self.run_dir)
            return leader is not None and leader.pid == self.launcher.pid

        if not self.wait_until(leads, timeout_s):
            return False
        self.launcher.terminate()
        try:
            self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """End what is left, each by its id."""
        left = self._parts()
        for process in (self.launcher, self.redis):
            process.kill()
            process.wait()
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=10)

    def log(self) -> str:
        """The end of what the launcher said."""
        return (self.folder / "launcher.log").read_text(errors="replace")[-3000:]


def write_config(
    folder: Path,
    redis_address: tuple[str, int],
    hosts: Mapping[str, Host],
    changes: Mapping[str, Mapping[str, Any]],
) -> None:
    """run.toml and rollouts.py of a run whose Redis is at that address."""
    host, port = redis_address
    (folder / "rollouts.py").write_text(ROLLOUTS)
    (folder / "password").write_text("stack")
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "stack", "dir": "runs"},
        "model": {
            "path": "model",
            "renderer": "qwen3",
            "renderer_options.enable_thinking": False,
            "max_context_tokens": 256,
        },
        "env": {
            "rollout_function_path": "rollouts:play",
            "tasks": "rollouts:tasks",
            "eval_tasks": "rollouts:eval_tasks",
            "max_concurrent_episodes": 16,
            "episode_deadline_s": 120,
            "max_runner_silence_s": 4,
            "max_replacements": 50,
            "max_replaced_share": 1.0,
        },
        "router": {"host": "0.0.0.0" if "router" in hosts else "127.0.0.1"},
        "server": {"host": "0.0.0.0" if "server" in hosts else "127.0.0.1"},
        "sampling": {"max_new_tokens": 8},
        "buffer": {
            "redis_url": f"redis://{host}:{port}",
            "redis_password_file": str(folder / "password"),
            "group_size": 3,
            "max_staleness": 0,
            "lease_s": 60,
            "group_deadline_s": 200,
        },
        "trainer": {
            "num_steps": 1_000_000,
            "learning_rate": 1e-3,
            "groups_per_step": 3,
            "checkpoint_every": 2,
            "keep_checkpoints": 1_000_000,
            "take_timeout_s": 200,
        },
        "eval": {"every": 5, "num_episodes": 4, "timeout_s": 120},
    }
    for section, values in changes.items():
        tree.setdefault(section, {}).update(values)
    (folder / "run.toml").write_text(_settings_text(tree))


def steps_of(run_dir: Path) -> list[tuple[int, float]]:
    """(step, Unix time) of each step that was recorded, those trained again included."""
    rows = read_metrics(run_dir)
    return [(row["step"], row["time"]) for row in rows if "train/loss" in row]


def audit_of(run_dir: Path) -> str:
    """What checkpoints and Redis prove; one line.

    Raises:
        AssertionError: a slot was trained twice, or lost.
    """
    with redis_of(load_run(run_dir)) as run:
        return str(account_of(run))


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that run; one that nobody has waited for does not."""
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def _settings_text(tree: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for section, values in tree.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(v)}" for name, v in values.items())]
    return "\n".join(lines) + "\n"
