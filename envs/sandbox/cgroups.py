"""Control groups for sessions, on machines that allow them.

Groups are made below this process's own group, so its limits bound its sessions too. Other groups
are not changed. Where there is a cpu controller, each session has the share of one group, however
many processes it starts: the kernel's default weight.
"""

from __future__ import annotations

import os
import select
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.guest.memory import EVENTS, num_oom_kills

_OVERHEAD_BYTES = 64 * 2**20
"""For the supervisor and the kernel's own records of a session."""
_OVERHEAD_PROCESSES = 8
_END_S = 2.0


class Cgroup:
    """The groups of one session: one folder (version 2), or one for each controller (version 1)."""

    def __init__(self, owner: Cgroups, folders: Mapping[str, Path]) -> None:
        self._owner = owner
        self.folders = folders
        """By controller: memory, pids, and cpu where there is one."""

    def add(self, pid: int) -> None:
        """Move a process and its descendants into the group; what they start later joins it."""
        for one in (pid, *_descendants(pid)):
            for folder in set(self.folders.values()):
                with suppress(ProcessLookupError):
                    (folder / "cgroup.procs").write_text(str(one))

    @contextmanager
    def events(self) -> Iterator[int]:
        """Open the file with the kernel's count of kills; yields its descriptor."""
        folder = self.folders["memory"]
        name = EVENTS[0] if (folder / EVENTS[0]).exists() else EVENTS[1]
        events = os.open(folder / name, os.O_RDONLY)
        try:
            yield events
        finally:
            os.close(events)

    def oom_kills(self) -> int:
        """How many processes of the group were killed for its memory limit."""
        with self.events() as events:
            return num_oom_kills(events)

    def remove(self) -> None:
        """Remove it when its last processes have ended; a busy one is removed later."""
        with suppress(OSError):
            _wait_for_all(self.folders["memory"])
        self._owner.discard(self.folders.values())


class Cgroups:
    """Makes groups below `parents`."""

    def __init__(self, parents: Mapping[str, Path], version: int) -> None:
        self._parents = parents
        self.version = version
        self.shares_cpu = "cpu" in parents
        self._left: list[Path] = []
        self._lock = threading.Lock()

    def create(self, limits: Limits) -> Cgroup:
        """Make a group with the session's limits; files in a sandbox count as memory.

        Raises:
            OSError: the kernel refuses.
        """
        name = f"outloop-{os.getpid()}-{uuid.uuid4().hex[:16]}"
        folders = {key: parent / name for key, parent in self._parents.items()}
        memory_bytes = limits.memory_bytes + limits.disk_bytes + _OVERHEAD_BYTES
        num_processes = limits.max_processes + _OVERHEAD_PROCESSES
        if self.version == 2:
            memory, swap = ("memory.max", memory_bytes), ("memory.swap.max", 0)
        else:
            memory = ("memory.limit_in_bytes", memory_bytes)
            swap = ("memory.memsw.limit_in_bytes", memory_bytes)
        try:
            for folder in set(folders.values()):
                folder.mkdir()
            _write(folders["memory"], *memory)
            _write(folders["pids"], "pids.max", 2 * num_processes)
            if (folders["memory"] / swap[0]).exists():  # a kernel that counts no swap has none
                _write(folders["memory"], *swap)
        except OSError:
            self.discard(folders.values())
            raise
        return Cgroup(self, folders)

    def sweep(self) -> None:
        """Remove groups of runners that were killed."""
        for parent in set(self._parents.values()):
            for folder in parent.glob("outloop-*-*"):
                owner = folder.name.split("-")[1]
                if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                    _removed(folder)

    def discard(self, folders: Iterable[Path]) -> None:
        """Remove folders of groups without processes."""
        with self._lock:
            self._left = [path for path in {*self._left, *folders} if not _removed(path)]


def find_cgroups(parent: Path | None = None) -> tuple[Cgroups | None, str]:
    """Find where groups can be made, or the reason why they cannot.

    `parent`: a version 2 group that was delegated to this user and holds no process.
    """
    parents, version = _parents(parent)
    if not parents:
        return None, "no memory and pids controllers are mounted"
    found = Cgroups(parents, version)
    try:
        if version == 2:
            _enable(parents["memory"], {"memory", "pids"} | parents.keys())
        found.sweep()
        found.create(Limits()).remove()
    except OSError as error:
        return None, f"{error.filename or parents['memory']}: {error.strerror}"
    return found, ""


def _parents(parent: Path | None) -> tuple[dict[str, Path], int]:
    if parent is not None:
        return _of_version_2(parent), 2
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}, 0
    own = {
        key: path
        for line in lines
        for keys, path in [line.split(":", 2)[1:]]
        for key in keys.split(",")
    }
    if (root / "cgroup.controllers").is_file():
        folder = root / own.get("", "/").lstrip("/")
        return (_of_version_2(folder) if folder.is_dir() else {}), 2
    places = {key: root / key / own.get(key, "/").lstrip("/") for key in ("memory", "pids", "cpu")}
    found = {key: path for key, path in places.items() if path.is_dir()}
    if "cpu" in found and not os.access(found["cpu"], os.W_OK):
        del found["cpu"]
    return (found if {"memory", "pids"} <= found.keys() else {}), 1


def _of_version_2(folder: Path) -> dict[str, Path]:
    try:
        offered = (folder / "cgroup.controllers").read_text().split()
    except OSError:
        offered = []
    names = ("memory", "pids", "cpu") if "cpu" in offered else ("memory", "pids")
    return dict.fromkeys(names, folder)


def _enable(folder: Path, wanted: Set[str]) -> None:
    if not wanted <= set((folder / "cgroup.subtree_control").read_text().split()):
        words = " ".join(f"+{name}" for name in sorted(wanted))
        (folder / "cgroup.subtree_control").write_text(words)


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        if Path(f"/proc/{pid}").exists():  # a kernel without this file: nothing would be moved
            raise
        return []
    return [one for child in map(int, children) for one in (child, *_descendants(child))]


def _wait_for_all(folder: Path) -> None:
    """Wait until the processes of a group that is being killed have ended."""
    deadline = time.monotonic() + _END_S
    for pid in (folder / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            ending = os.pidfd_open(int(pid))
            try:
                left_s = max(0.0, deadline - time.monotonic())
                select.select([ending], [], [], left_s)
            finally:
                os.close(ending)


def _write(folder: Path, file: str, value: int) -> None:
    (folder / file).write_text(str(value))


def _removed(path: Path) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
