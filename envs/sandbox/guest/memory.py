"""How much memory the programs of a call use, and whether the kernel killed one of them for it."""

from __future__ import annotations

import os

EVENTS = ("memory.events", "memory.oom_control")
"""Where the kernel counts its kills, with control groups of version 2 and of version 1."""
_IN_A_CONTAINER = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class Killed:
    """Counts processes that the kernel killed because the session's group was at its limit."""

    def __init__(self, fd: int, is_container: bool) -> None:
        """`fd`: of one of EVENTS, or -1; in a container the group may be seen from within."""
        self._fd = -1
        if fd >= 0:
            # A low number: programs close what they inherit up to a bound.
            self._fd = os.dup(fd)
            os.close(fd)
        for path in _IN_A_CONTAINER if is_container else ():
            if self._fd < 0 and os.path.exists(path):
                self._fd = os.open(path, os.O_RDONLY)

    def count(self) -> int:
        """Number of kills since the group was made; 0 without a group."""
        return num_oom_kills(self._fd) if self._fd >= 0 else 0


def num_oom_kills(fd: int) -> int:
    """Number of kills in an open file of EVENTS."""
    for line in os.pread(fd, 4096, 0).splitlines():
        key, _, count = line.partition(b" ")
        if key == b"oom_kill":
            return int(count)
    return 0


def resident_bytes() -> int:
    """Memory of all programs and their inits, without pages of files, which count as disk."""
    total = 0
    own = {1, os.getpid(), os.getppid()}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in own:
            try:
                with open(f"/proc/{name}/statm") as file:
                    _, resident, shared, *_ = file.read().split()
                    total += int(resident) - int(shared)
            except (OSError, ValueError):
                continue
    return total * os.sysconf("SC_PAGE_SIZE")
