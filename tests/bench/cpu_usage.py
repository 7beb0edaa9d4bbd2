"""CPU time of each part of a run.

A part that has ended keeps its last sample; the times of restarts add up.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _below_cpu_s(process: psutil.Process) -> float:
    """CPU time of a part's own processes: those that have ended, and those that run."""
    times = process.cpu_times()
    total = float(getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0))
    try:
        # Cheap, where psutil's own way would read every process of the machine.
        words = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        return total
    for word in words:
        try:
            child = psutil.Process(int(word))
            total += _cpu_s(child) + _below_cpu_s(child)
        except psutil.Error:
            continue
    return total


class CpuUsage:
    """CPU seconds of named processes since they started, sampled when `sample` is called."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, int], psutil.Process] = {}
        self._last: dict[tuple[str, int], float] = {}
        self._marks: dict[str, dict[str, float]] = {}

    def sample(self, launcher: psutil.Process) -> None:
        """Read the CPU time of a launcher and of its parts, by their names."""
        pids = {"launcher": launcher.pid}
        try:
            for child in launcher.children():
                words = child.cmdline()
                is_part = "outloop.cli" in words
                pids[words[words.index("outloop.cli") + 1] if is_part else "redis"] = child.pid
        except psutil.Error:
            return
        for name, pid in pids.items():
            key = (name, pid)
            try:
                if key not in self._processes:
                    self._processes[key] = psutil.Process(pid)
                process = self._processes[key]
                below_s = 0.0 if name == "launcher" else _below_cpu_s(process)
                self._last[key] = _cpu_s(process) + below_s
            except psutil.Error:
                continue

    def totals(self) -> dict[str, float]:
        """CPU seconds by part name at the last sample."""
        totals: dict[str, float] = {}
        for (name, _), seconds in self._last.items():
            totals[name] = totals.get(name, 0.0) + seconds
        return totals

    def mark(self, name: str) -> None:
        """Keep the present totals under `name`; the first mark of a name stays."""
        self._marks.setdefault(name, {**self.totals(), "wall": time.monotonic()})

    def marks(self) -> dict[str, dict[str, float]]:
        """Return the totals at every mark, by its name."""
        return self._marks
