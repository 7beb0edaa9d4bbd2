"""A limit on memory that the system keeps by killing: a cgroup, of version 1 or 2.

Owns: making a group that grants no further page, moving processes into it and back. Does not own:
whom it hits (faults). Invariant: after the block nothing is left of the group. Needs root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
REMOVE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Version:
    parent: Path
    """The group that this process is in, or the root of version 2, where groups that hold both
    processes and groups are refused."""
    limit_file: str
    no_limit: str
    events_file: str
    """Has a line `oom_kill NUMBER`."""


def _version() -> _Version:
    """How groups are made here.

    Raises:
        OSError: there is no controller of memory.
    """
    if (ROOT / "cgroup.controllers").exists():
        return _Version(ROOT, "memory.max", "max", "memory.events")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group = ROOT / f"memory{path}"
            return _Version(group, "memory.limit_in_bytes", "-1", "memory.oom_control")
    raise OSError("the system has no controller of memory")


@contextmanager
def starved(victims: Sequence[psutil.Process]) -> Iterator[Callable[[], int]]:
    """While it lasts, the system grants the victims no further page, and kills who needs one; gives
    how many it has killed."""
    version = _version()
    group = version.parent / f"outloop-{os.getpid()}"
    group.mkdir()
    limit, members = group / version.limit_file, group / "cgroup.procs"
    try:
        # What a process has taken before stays with its old group.
        limit.write_text("0")
        for process in victims:
            with suppress(ProcessLookupError):
                members.write_text(str(process.pid))
        yield lambda: _num_killed(group / version.events_file)
    finally:
        limit.write_text(version.no_limit)
        for pid in members.read_text().split():
            with suppress(ProcessLookupError):
                (version.parent / "cgroup.procs").write_text(pid)
        _remove(group)


def _num_killed(events: Path) -> int:
    rows = dict(line.split() for line in events.read_text().splitlines())
    return int(rows["oom_kill"])


def _remove(group: Path) -> None:
    """A process that is being killed stays in its group for a moment."""
    deadline = time.monotonic() + REMOVE_S
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def why_not() -> str:
    """Why nothing can be starved here; empty where it can."""
    if os.getuid() != 0:
        return "cgroups need root"
    try:
        with starved(()):
            return ""
    except OSError as error:
        return f"no cgroup with a limit on memory can be made here: {error}"
