"""`make test-faults`: every part x every fault x phases of a step, and what each cost.

Runs of each part, as `outloop train` starts them with a tiny policy and a sandbox for each answer;
the faults hit the part one after the other, in each run MAX_ENDS that end it. A kill hits in every
phase; a fault that lasts (HOLD_S seconds) passes through all of them, so it begins in one phase,
another for each part, or in all with --all-phases. With root, each part has a host of its own
(network namespaces), and can be partitioned. Figures go into docs/reliability.md cell by cell. Exit
code 0 if training went on after every fault, within --bound-s of a kill, and every audit is clean.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import starvation
from faults import FAULTS, LASTING, LIMITED, ON_HOSTS, STARVED, fault
from hosts import Host, hosts, why_not
from reliability_page import record_audit, record_cell
from stack import PARTS, PHASES, Stack
from tiny import make_model

from outloop.buffer.events import read_events

HOLD_S = 8.0
LOOK_S = 0.1
ALL_PARTS = (*PARTS, "rank")
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    # Two ranks that publish beside training.
    "rank": {"trainer": {"num_ranks": 2}, "buffer": {"max_staleness": 1}},
}
"""Of the settings, for the row of a part."""
USUAL = ("short_episodes", "no_signal", "alarm", "alarm_over")
"""Warnings of a policy that is not worth training, and of many steps, among them those before."""
NOTICE_S = 2.0
SHOWN = ("warning from ", "Redis cannot write")
"""How lines of the terminal begin that name a trouble."""
USUAL_SHOWN = ("trained episodes are shorter", "all rewards were equal", "warning from monitor")
START_S = 240.0
PHASE_S = 25.0
"""For how long a phase is waited for; without it the fault comes in another one."""
ON_A_HOST = ("redis", "router", "server", "trainer", "runner")
ENDING = ("killed", "asked to stop", STARVED)
MAX_ENDS = 3
"""Of one part in one run: the launcher waits 0, 1 and 2 s until it starts it again, and later so
long that the wait would be measured; after six it gives the part up."""
COUNTED = {
    "attempts replaced": "buffer/replaced_attempts",
    "attempts resumed": "buffer/resumed_attempts",
    "groups dropped": "buffer/dropped_groups",
}


class Signs:
    """What the run shows of a fault: an event, a warning in a log, a server put aside."""

    def __init__(self, stack: Stack, victim: str) -> None:
        self._stack, self._victim = stack, victim
        self._began_at = time.time()
        self._sizes = {path: path.stat().st_size for path in self._logs()}
        self._look_at = 0.0
        self.first: tuple[float, str] | None = None

    def _logs(self) -> list[Path]:
        logs = (self._stack.run_dir / "logs").glob("*.log")
        return [*sorted(logs), self._stack.folder / "launcher.log"]

    def look(self) -> None:
        """Keep the first sign, and when it was seen, in seconds since the fault began."""
        if self.first is None and time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            sign = self._sign()
            if sign:
                self.first = time.time() - self._began_at, sign

    def _sign(self) -> str:
        events = read_events(self._stack.run_dir)
        for event in events[-5:]:
            if event["time"] >= self._began_at and event["kind"].startswith(
                ("part_", "redis_", "launcher_")
            ):
                return f"{event['kind']} {event.get('part', '')}".strip()
        for path in self._logs():
            with suppress(OSError):
                if path.stat().st_size <= self._sizes.get(path, 0):
                    continue
                with path.open("rb") as file:
                    file.seek(self._sizes.get(path, 0))
                    lines = file.read().decode(errors="replace").splitlines()
                for line in lines:
                    if line.startswith(SHOWN) and not any(words in line for words in USUAL_SHOWN):
                        sentence, _, _ = line.partition(". ")
                        return f"terminal: {sentence.replace(f'{self._stack.run_dir}/', '')}"
                    with suppress(json.JSONDecodeError):
                        row = json.loads(line)
                        if not isinstance(row, dict) or row.get("event") in USUAL:
                            continue
                        if row.get("level") in ("warning", "error"):
                            return f"{path.stem}: {row.get('event', '')}"
        if self._victim == "redis":
            # Asking it would take as long as the fault.
            return ""
        servers = self._stack.read(lambda reader: reader.registry.servers())
        if servers and any(server.is_quarantined for server in servers):
            return "server quarantined"
        return ""


class Cell:
    """One fault of one part in one phase."""

    def __init__(self, stack: Stack, part: str, kind: str, phase: str, patience_s: float) -> None:
        self.stack, self.part, self.kind, self.phase = stack, part, kind, phase
        self.patience_s = patience_s

    @property
    def name(self) -> str:
        """In the figures."""
        return f"{self.part}/{self.kind}/{self.phase}"

    def play(self) -> dict[str, Any]:
        """Strike, wait until it trains again; the figures.

        Raises:
            AssertionError: it does not train again.
        """
        stack = self.stack
        in_phase = stack.wait_until(lambda: self._is_there(self.phase), PHASE_S)
        if not in_phase:
            assert stack.wait_until(lambda: self._is_there(""), self.patience_s), f"no {self.part}"
        victims = stack.processes(self.part)
        counted, steps = self._counted(), stack.steps()
        signs, num_ended, began_at = Signs(stack, self.part), len(stack.ended), time.time()

        was_killed = self.kind == "killed"
        with self._strike(victims) as num_killed:
            if self.kind in (*LASTING, *ON_HOSTS):
                end = time.monotonic() + HOLD_S

                def is_over() -> bool:
                    signs.look()
                    return time.monotonic() > end or num_killed() > 0

                stack.wait_until(is_over, HOLD_S + 5)
                was_killed = num_killed() > 0
        ended_at = time.time()
        meanwhile = [step for step, at in stack.steps() if began_at < at < ended_at]

        def is_back() -> bool:
            signs.look()
            return len([1 for _, at in stack.steps() if at > ended_at]) >= 2

        assert stack.wait_until(is_back, self.patience_s), (
            f"no step within {self.patience_s:.0f} s; ended {stack.ended}; {stack.log()[-1500:]}"
        )
        back_s = [at for _, at in stack.steps() if at > ended_at][1] - ended_at

        def is_noticed() -> bool:
            signs.look()
            return signs.first is not None

        # The run may be faster than what is said of it.
        stack.wait_until(is_noticed, NOTICE_S)
        # A launcher that gave the run up is only seen when it has ended.
        after, rows = self._counted(), stack.steps()
        highest = max((step for step, _ in steps), default=0)
        lost = {name: int(after[name] - counted[name]) for name in COUNTED}
        lost["steps trained again"] = len({s for s, at in rows if at > began_at and s <= highest})
        return {
            "phase": self.phase if in_phase else "any",
            "was_killed": was_killed,
            "noticed_s": None if signs.first is None else round(signs.first[0], 1),
            "sign": "" if signs.first is None else signs.first[1],
            "steps_meanwhile": len(meanwhile),
            "back_s": round(back_s, 1),
            "lost": {name: number for name, number in lost.items() if number},
            "run_ended": stack.ended[num_ended:],
        }

    def _is_there(self, phase: str) -> bool:
        now = self.stack.phase()
        if phase and now != phase:
            return False
        return bool(self.stack.processes(self.part))

    def _strike(self, victims: Sequence[psutil.Process]) -> Any:
        if self.kind == "partitioned":
            return _partitioned(self.stack.hosts[self.part])
        return fault(self.kind, victims)

    def _counted(self) -> dict[str, float]:
        found: dict[str, float] = {}

        def is_read() -> bool:
            stats = self.stack.read(lambda reader: reader.stats())
            if stats is not None:
                found.update({name: stats[key] for name, key in COUNTED.items()})
                # This policy often gives groups without a signal: no cost of a fault.
                found["groups dropped"] -= stats.get("buffer/dropped/no_signal", 0)
            return stats is not None

        assert self.stack.wait_until(is_read, self.patience_s), "Redis stays away"
        return found


@contextmanager
def _partitioned(host: Host) -> Iterator[Callable[[], int]]:
    host.cut()
    try:
        yield lambda: 0
    finally:
        host.join()


def cells_of(
    part: str, kinds: Sequence[str], *, has_hosts: bool, all_phases: bool
) -> list[tuple[str, str]]:
    """(fault, phase) for one part."""
    cells = []
    for number, kind in enumerate((*FAULTS, *ON_HOSTS)):
        if kind not in kinds or (kind in ON_HOSTS and not (has_hosts and part in ON_A_HOST)):
            continue
        if part == "sandbox" and kind in LIMITED:
            continue
        phases = PHASES
        if kind != "killed" and not all_phases:
            phases = (PHASES[(number + ALL_PARTS.index(part)) % len(PHASES)],)
        cells += [(kind, phase) for phase in phases]
    return cells


def main() -> int:
    """Play the parts; print a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(ALL_PARTS))
    parser.add_argument("--faults", default=",".join((*FAULTS, *ON_HOSTS)))
    parser.add_argument("--all-phases", action="store_true")
    parser.add_argument("--only", default="", help="a pattern of names: part/fault/phase")
    parser.add_argument("--bound-s", type=float, default=30.0)
    parser.add_argument("--no-hosts", action="store_true")
    parser.add_argument("--patience-s", type=float, default=START_S, help="of starts and returns")
    words = parser.parse_args()
    # What was started ends with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reason = "not wanted" if words.no_hosts else why_not()
    if reason:
        print(f"partitions are left out: {reason}")
    kinds = words.faults.split(",")
    if STARVED in kinds and (no_groups := starvation.why_not()):
        print(f"{STARVED!r} is left out: {no_groups}")
        kinds.remove(STARVED)
    num_failed = 0
    with tempfile.TemporaryDirectory() as model:
        make_model(Path(model))
        for part in words.parts.split(","):
            cells = [
                (kind, phase)
                for kind, phase in cells_of(
                    part,
                    kinds,
                    has_hosts=not reason,
                    all_phases=words.all_phases,
                )
                if re.search(words.only, f"{part}/{kind}/{phase}")
            ]
            while cells:
                num_failed += play_cells(part, cells, Path(model), not reason, words)
    return 1 if num_failed else 0


def play_cells(
    part: str,
    cells: list[tuple[str, str]],
    model: Path,
    has_hosts: bool,
    words: argparse.Namespace,
) -> int:
    """A run, and cells of one part in it until one fails or the part has ended too often; takes
    them from `cells`. How many failed."""
    with ExitStack() as context:
        folder = Path(context.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        places = context.enter_context(hosts(ON_A_HOST) if has_hosts else nullcontext({}))
        stack = Stack(folder, model, CHANGES.get(part, {}), places)
        context.callback(stack.stop)
        num_failed, num_ends, played = 0, 0, list[str]()
        if not stack.wait_until(lambda: len(stack.steps()) >= 2, words.patience_s):
            print(f"{part}: the run did not start: {stack.log()}", flush=True)
            cells.clear()
            return 1
        while cells:
            num_ends += cells[0][0] in ENDING
            if num_ends > MAX_ENDS:
                break
            kind, phase = cells.pop(0)
            cell = Cell(stack, part, kind, phase, words.patience_s)
            try:
                figures = cell.play()
            except AssertionError as error:
                figures = {"failed": str(error)}
            if figures.get("was_killed") and figures["back_s"] > words.bound_s:
                bound = f"{words.bound_s:.0f} s are allowed"
                figures["failed"] = f"back after {figures['back_s']} s, {bound}"
            record_cell(cell.name, figures)
            played.append(cell.name)
            print(f"{cell.name}: {figures}", flush=True)
            if "failed" in figures:
                num_failed += 1
                break
        verdict = "clean"
        try:
            assert stack.end_training(120), "it does not stop"
            print(f"{part}: {stack.audit()}, starts {dict(stack.starts)}", flush=True)
        except AssertionError as error:
            num_failed += 1
            verdict = f"**failed**: {error}"
            print(f"{part}: audit FAILED: {error}", flush=True)
        record_audit(played, verdict)
        return num_failed


if __name__ == "__main__":
    sys.exit(main())
