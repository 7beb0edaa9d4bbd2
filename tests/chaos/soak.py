"""`make soak MINUTES=60`: a small run under random faults, and whether anything grows.

One run as `make test-faults` has it; every few seconds a part, chosen by the seed, is killed, asked
to stop, stopped or slowed for a while. Memory and open files of every part, keys of Redis and the
run's folder are sampled; what a life of minutes lets grow is seen in parts that are never hit
(--spared). While no step is made, something must say why: what the trainer waits for, a part that
is not there, or one that was started again. Each series gets its slope by hour over the last half
of the time, when caches are full, with an interval of 95 %. Exit code 0 if steps were made in every
tenth of the time, or every minute of a short one, no series grows (judged from JUDGED_MINUTES on),
nothing waits without a name, the ledger closes, and tokens were sampled with the weights of their
version. One grows whose whole interval is above its bound (`BOUNDS`); what fills for an hour is
judged where the first half is longer than that.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean, linear_regression

import psutil
from audit import check_gaps
from faults import fault
from hosts import hosts, why_not
from matrix import ON_A_HOST, START_S
from reliability_page import record_soak
from stack import Stack
from tiny import make_model

from outloop.buffer.events import read_events

KINDS = ("killed", "asked to stop", "stopped", "slowed")
PARTS = ("router", "server", "trainer", "runner", "archiver", "sandbox")
SAMPLE_S = 5.0
HOLD_S = 3.0
MB = 2**20
KEPT = "metrics, logs and archive, MB"
EXPIRING = "keys in Redis that expire within the hour"
STAYING = "bytes in Redis that stay, MB"
LOG = "file of Redis, MB"
REWRITTEN_MB = 64.0
"""From there on Redis rewrites its file when that has doubled."""
REDIS = "memory of redis, MB"
FILLS = (EXPIRING, REDIS, LOG)
"""For an hour: keys of ended episodes stay for repeated calls, in memory and in the file."""
FILLED_S = 3600.0
BOUNDS = {
    # Half a GB a day.
    "memory of ": 20.0,
    "open files of ": 10.0,
    # The last 256 dead letters and 64 failed episodes come with faults, not with time.
    "keys in Redis that stay": 300.0,
    # 94 bytes for each of the last 10,000 versions, and some hundred for each dead letter.
    STAYING: 1.0,
    EXPIRING: 1000.0,
    "checkpoints, MB": 10.0,
    LOG: 100.0,
}
"""By hour, for series that begin so. What a run keeps of its steps (KEPT) has none."""
JUDGED_MINUTES = 10.0
"""A shorter soak is mostly the run's start, in which everything grows."""
SILENCE_S = 10.0
"""Without a step; an idle machine makes one in half a second."""
STARTED_S = 30.0
"""A part that was started again is why nothing goes on for so long."""
STAYING_S = 30.0
"""Between two looks at every key of Redis."""
WINDOW_S = 60.0
"""A part of the time in which a step must be made, if a tenth of it is shorter."""
NUM_BLOCKS = 10
FINE = "Nothing grew, nothing waited without a name, and the ledger closes."
STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
"""Student's t at 97.5 %, for four to ten blocks."""


def sample(stack: Stack) -> dict[str, float]:
    """Of every part that is there, and of Redis and the folder."""
    found: dict[str, float] = {}
    for part in ("redis", "launcher", "router", "server", "trainer", "runner", "archiver"):
        with suppress(psutil.Error):
            processes = stack.processes(part)
            if processes:
                found[f"memory of {part}, MB"] = processes[0].memory_info().rss / MB
                found[f"open files of {part}"] = float(processes[0].num_fds())
    looked = stack.bytes_that_stay(STAYING_S)
    if looked is not None:
        found[STAYING] = looked / MB
    keys = stack.num_keys()
    if keys is not None:
        found["keys in Redis that stay"], found[EXPIRING] = map(float, keys)
    found["checkpoints, MB"] = folder_bytes(stack.run_dir / "checkpoints") / MB
    found[LOG] = folder_bytes(stack.folder / "redis") / MB
    found[KEPT] = folder_bytes(stack.run_dir) / MB - found["checkpoints, MB"]
    return found


def names_of_wait(stack: Stack) -> list[str]:
    """What says why no step is made: what the trainer waits for, parts that are not there, and
    those that were just started again."""
    statuses = stack.read(lambda reader: reader.registry.statuses())
    if statuses is None:
        return ["Redis is away"]
    waits = [fields["waiting_for"] for fields in statuses.values() if fields.get("waiting_for")]
    gone = [part for part in ("router", "server", "trainer", "runner") if not stack.processes(part)]
    since = time.time() - STARTED_S
    events = [event for event in read_events(stack.run_dir) if event["time"] > since]
    again = [f"{e['part']} was started again" for e in events if e["kind"] == "part_restarted"]
    return [*waits, *(f"{part} is not there" for part in gone), *again]


def folder_bytes(folder: Path) -> float:
    """Of all files below, those that go away meanwhile left out."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(Path(parent, name)).st_size
    return float(total)


def main() -> int:
    """Soak; print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=20.0, help="between faults, on average")
    parser.add_argument("--spared", default="router,launcher,redis,archiver")
    parser.add_argument("--no-hosts", action="store_true")
    parser.add_argument("--no-page", action="store_true", help="docs/reliability.md stays")
    words = parser.parse_args()
    # What was started ends with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    choices, spared = random.Random(words.seed), words.spared.split(",")
    victims = [part for part in PARTS if part not in spared]
    has_hosts = not words.no_hosts and not why_not()
    with (
        tempfile.TemporaryDirectory() as model,
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        hosts(ON_A_HOST) if has_hosts else nullcontext({}) as places,
    ):
        make_model(Path(model))
        changes = {"trainer": {"keep_checkpoints": 4}, "run": {"seed": words.seed}}
        stack = Stack(Path(folder), Path(model), changes, places)
        try:
            assert stack.wait_until(lambda: len(stack.steps()) >= 2, START_S), stack.log()
            return soak(stack, words, choices, victims)
        finally:
            stack.stop()


class Watch:
    """What is sampled while a run is hurt."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._began_at, self._began = time.monotonic(), time.time()
        self._next = self._began_at
        self.series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """(seconds since the beginning, value) of each."""
        self.nameless: list[int] = []
        """Seconds since the beginning at which no step was made and nothing said why."""

    def look(self) -> None:
        """Start again what must be; sample what is due."""
        self._stack.tend()
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_S
        for name, value in sample(self._stack).items():
            self.series[name].append((now - self._began_at, value))
        silent_s = time.time() - max((at for _, at in self._stack.steps()), default=self._began)
        if silent_s > SILENCE_S and not names_of_wait(self._stack):
            self.nameless.append(round(now - self._began_at))


def soak(
    stack: Stack, words: argparse.Namespace, choices: random.Random, victims: list[str]
) -> int:
    """Hurt and sample until the time is over; the exit code."""
    watch = Watch(stack)
    faults: Counter[str] = Counter()
    began_at, wall = time.monotonic(), time.time()
    end = began_at + 60 * words.minutes
    next_fault = began_at + words.pause_s
    while time.monotonic() < end:
        watch.look()
        if time.monotonic() > next_fault:
            part, kind = choices.choice(victims), choices.choice(KINDS)
            processes = stack.processes(part)
            if processes:
                faults[f"{kind} {part}"] += 1
                minute = (time.monotonic() - began_at) / 60
                of = f"minute {minute:.1f} of {words.minutes:g}, {len(stack.steps())} steps"
                print(f"{of}: {kind} {part}", flush=True)
                with fault(kind, processes):
                    held_until = time.monotonic() + HOLD_S * (kind in ("stopped", "slowed"))
                    while time.monotonic() < held_until:
                        watch.look()
                        time.sleep(0.05)
            next_fault = time.monotonic() + choices.uniform(0.5, 1.5) * words.pause_s
        time.sleep(0.05)
    steps = [at - wall for _, at in stack.steps() if at > wall]
    window_s = max(6 * words.minutes, WINDOW_S)
    windows = range(max(1, int(60 * words.minutes / window_s)))
    is_alive = [any(n * window_s <= at < (n + 1) * window_s for at in steps) for n in windows]
    seconds = 60 * words.minutes
    thirds = {name: _thirds(values, seconds) for name, values in watch.series.items()}
    slopes = {name: slope_of(values, seconds / 2, seconds) for name, values in watch.series.items()}
    problems = [
        f"{name} grows"
        for name, slope in slopes.items()
        if words.minutes >= JUDGED_MINUTES
        and grows(
            name, slope, largest=max(value for _, value in watch.series[name]), seconds=seconds
        )
    ]
    if watch.nameless:
        problems.append(f"no step, and nothing says why, at {watch.nameless} s")
    if not all(is_alive):
        problems.append(f"no step in {is_alive.count(False)} of {len(windows)} parts of the time")
    try:
        assert stack.end_training(120), "it does not stop"
        # Old checkpoints are gone, so slots that they trained are in no mark any more.
        assert stack.ledger_closes(), "the ledger does not close"
        check_gaps(stack.run_dir)
    except AssertionError as error:
        problems.append(str(error))
    figures = {
        "minutes": words.minutes,
        "num_steps": len(steps),
        "num_faults": faults.total(),
        "faults": dict(faults),
        "series": thirds,
        "slopes": slopes,
        "staying": stack.staying(),
        "silence_s": longest_silence(steps),
        "verdict": "; ".join(problems) or FINE,
    }
    if not words.no_page:
        record_soak(figures)
    print(figures, flush=True)
    return 1 if problems else 0


def longest_silence(steps: list[float]) -> float:
    """Seconds between two steps."""
    return round(max((b - a for a, b in pairwise(steps)), default=0.0), 1)


def grows(name: str, slope: tuple[float, float] | None, *, largest: float, seconds: float) -> bool:
    """Whether a series surely grows faster than its bound, in a soak of so many seconds."""
    if slope is None or (name in FILLS and seconds / 2 < FILLED_S):
        return False
    if name == LOG and largest < REWRITTEN_MB:
        return False
    bounds = [bound for beginning, bound in BOUNDS.items() if name.startswith(beginning)]
    return bool(bounds) and slope[0] - slope[1] > bounds[0]


def slope_of(
    values: list[tuple[float, float]], begin: float, end: float
) -> tuple[float, float] | None:
    """(slope by hour, half the width of its interval of 95 %) of the means of ten blocks of a time:
    samples that follow each other say nearly the same. None of less than four blocks."""
    blocks = []
    for number in range(NUM_BLOCKS):
        low, high = (begin + (end - begin) * n / NUM_BLOCKS for n in (number, number + 1))
        inside = [value for at, value in values if low <= at < high]
        if inside:
            blocks.append(((low + high) / 2 / 3600, fmean(inside)))
    if len(blocks) < 4:
        return None
    hours, means = zip(*blocks, strict=True)
    slope, intercept = linear_regression(hours, means)
    rest = sum((mean - intercept - slope * hour) ** 2 for hour, mean in blocks)
    spread = sum((hour - fmean(hours)) ** 2 for hour in hours)
    error = math.sqrt(rest / (len(blocks) - 2) / spread)
    return round(slope, 2), round(STUDENT[len(blocks) - 4] * error, 2)


def _thirds(values: list[tuple[float, float]], seconds: float) -> list[float]:
    """Means of the first, the second and the last third."""
    means = []
    for number in range(3):
        part = [v for at, v in values if seconds * number / 3 <= at < seconds * (number + 1) / 3]
        means.append(round(fmean(part), 1) if part else 0.0)
    return means


if __name__ == "__main__":
    sys.exit(main())
