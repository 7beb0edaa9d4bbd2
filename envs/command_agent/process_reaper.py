"""`python -I -S process_reaper.py LIMITS COMMAND...`: runs a program and ends all of its processes.

It limits the time, memory and output of the program's process tree. It imports the standard library
only, because one is started for each episode. It is the reaper of all descendants: when it ends,
none of them is alive, whichever session they moved to. When its runner ends, it ends them at once.

LIMITS is JSON: control (a socket to the runner), time_s, memory_mb, output_bytes, kept_bytes,
disk_mb (of all files below folder, which the Python file tree_module counts), groups (files to join
control groups by), files (COMMAND begins with bubblewrap, which reports on descriptor 3, and takes
descriptors of these files after these options).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import selectors
import signal
import stat
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TERM_GRACE_S = 1.0
_DRAIN_S = 0.5
_KILL_S = 5.0
_POLL_S = 0.5
_MAX_PROCESSES = 2048
_MAX_TERMINALS = 64
"""Pseudo-terminals, of which the machine has some thousands (kernel.pty.max)."""
_MAX_SIGNALS = 1024
"""Queued signals and timers of the program's user."""
_DISK_S = 1.0
_DISK_SHARE = 0.2
"""Of the time at most, files are counted."""
Limits = dict[str, Any]
_PAGE_MB = resource.getpagesize() / 2**20


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class StreamTail:
    """The end of a stream, and how long it was."""

    def __init__(self, limit: int) -> None:
        self.data = bytearray()
        self.total = 0
        self._limit = limit

    def add(self, data: bytes) -> None:
        """Append data; only the end is kept."""
        self.total += len(data)
        self.data += data
        if len(self.data) > 2 * self._limit:
            del self.data[: -self._limit]

    def text(self) -> str:
        """The end of the stream as text."""
        left_out = self.total - min(len(self.data), self._limit)
        text = bytes(self.data[-self._limit :]).decode(errors="replace")
        return f"[{left_out} bytes left out]\n{text}" if left_out else text


def start(command: list[str], limits: Limits, outputs: dict[int, int]) -> int:
    """Start the program in a process group of its own; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        memory = int(limits["memory_mb"] * 2**20)
        # Data, not address space: node reserves far more of the latter than it touches.
        lower(resource.RLIMIT_DATA, memory)
        lower(resource.RLIMIT_MSGQUEUE, 0)
        lower(resource.RLIMIT_SIGPENDING, _MAX_SIGNALS)
        if limits["disk_mb"]:
            lower(resource.RLIMIT_FSIZE, int(limits["disk_mb"] * 2**20))
        for target, source in outputs.items():
            os.dup2(source, target)
        for group in limits.get("groups", ()):
            with open(group, "w") as file:
                file.write("0")
        for option, path in limits.get("files", {}).items():
            descriptor = os.open(path, os.O_RDONLY)
            os.set_inheritable(descriptor, True)
            command[1:1] = [option, str(descriptor)]
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"outloop: {command[0]!r} cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def lower(kind: int, value: int) -> None:
    """Set a resource limit, to no more than what it is."""
    ceiling = resource.getrlimit(kind)[1]
    value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
    resource.setrlimit(kind, (value, value))


def children(pid: int) -> list[int]:
    """Pids of the children of all threads of a process."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
        except OSError:
            continue
    return found


def descendants() -> list[int]:
    """Pids of every process below this one."""
    found: list[int] = []
    frontier = children(os.getpid())
    while frontier:
        found += frontier
        frontier = [child for pid in frontier for child in children(pid)]
    return found


def resident_mb(pids: list[int]) -> float:
    """Memory of the processes together."""
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                pages += int(file.read().split()[1])
        except (OSError, IndexError):
            continue
    return pages * _PAGE_MB


def unlinked_bytes(pids: list[int]) -> int:
    """Size of the files that the processes hold open and that no folder has any more."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            with contextlib.suppress(OSError):
                file = os.stat(f"/proc/{pid}/fd/{name}")
                if stat.S_ISREG(file.st_mode) and file.st_nlink == 0:
                    found[file.st_dev, file.st_ino] = file.st_blocks * 512
    return sum(found.values())


def num_terminals(pids: list[int]) -> int:
    """How many pseudo-terminals programs in bubblewrap, which have a folder of these, hold."""
    for pid in reversed(pids):
        with contextlib.suppress(OSError):
            folder = f"/proc/{pid}/root/dev/pts"
            # Bubblewrap itself begins with the machine's own.
            if os.stat(folder).st_dev != os.stat("/dev/pts").st_dev:
                return len(os.listdir(folder))
    return 0


def module_of(path: str) -> Any:
    """Import a file by its path: this process has no import path to outloop."""
    spec = importlib.util.spec_from_file_location("untrusted_tree", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kill_all(pid: int) -> None:
    """Kill and reap until nothing is left below this process, or for _KILL_S."""
    deadline = time.monotonic() + _KILL_S
    if sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    while True:
        for victim in descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(victim, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)


class Reaper:
    """Watches one program until it ends or passes a limit."""

    def __init__(self, pid: int, limits: Limits, streams: dict[int, StreamTail], wake: int) -> None:
        self._pid = pid
        self._limits = limits
        self._is_confined = "files" in limits
        self._streams = streams
        self._selector = selectors.DefaultSelector()
        for descriptor, kept in streams.items():
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, kept)
        self._selector.register(int(limits["control"]), selectors.EVENT_READ, None)
        # The end of a child wakes the selector.
        self._selector.register(wake, selectors.EVENT_READ, StreamTail(1))
        self._is_abandoned = False
        self._tree: Any = None
        self.reason = ""
        self.memory_mb = 0.0
        self.status: int | None = None

    def watch(self) -> None:
        """Wait until the program ended, or until a limit (`reason`: time, memory, output)."""
        end = time.monotonic() + self._limits["time_s"]
        next_poll = 0.0
        next_count = time.monotonic() + _DISK_S
        while self.status is None and not self._is_abandoned:
            self._read(_POLL_S)
            now = time.monotonic()
            if now >= next_poll:
                next_poll = now + _POLL_S
                self._weigh()
            if self._limits["disk_mb"] and now >= next_count:
                self._count_files()
                taken_s = time.monotonic() - now
                next_count = time.monotonic() + max(_DISK_S, taken_s / _DISK_SHARE)
            total = sum(kept.total for kept in self._streams.values())
            if total > self._limits["output_bytes"]:
                self.reason = "output"
            if now > end:
                self.reason = "time"
                self._ask_to_end()
            if self.reason:
                return
            self._reap()

    def drain(self) -> None:
        """Read what is still in the pipes after the program has ended."""
        end = time.monotonic() + _DRAIN_S
        while time.monotonic() < end and self._read(0):
            pass

    def _weigh(self) -> None:
        pids = descendants()
        self.memory_mb = max(self.memory_mb, resident_mb(pids))
        if self.memory_mb > self._limits["memory_mb"]:
            self.reason = "memory"
        if len(pids) > _MAX_PROCESSES:
            self.reason = "processes"
        if self._is_confined and num_terminals(pids) > _MAX_TERMINALS:
            self.reason = "terminals"

    def _count_files(self) -> None:
        if self._tree is None:
            self._tree = module_of(self._limits["tree_module"])
        used = unlinked_bytes(descendants())
        with contextlib.suppress(OSError):
            used += self._tree.used_bytes(self._limits["folder"])
        if used > self._limits["disk_mb"] * 2**20:
            self.reason = "disk"

    def _ask_to_end(self) -> None:
        # A signal to bubblewrap itself would kill everything in it at once.
        targets = set(descendants()) - {self._pid} if self._is_confined else {-self._pid}
        for one in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGTERM)
        end = time.monotonic() + _TERM_GRACE_S
        while self.status is None and time.monotonic() < end and not self._is_abandoned:
            self._read(0.02)
            self._reap()

    def _reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self.status = status
        except ChildProcessError:
            return

    def _read(self, timeout_s: float) -> bool:
        events = self._selector.select(timeout_s)
        for key, _ in events:
            if key.data is None:
                self._is_abandoned = True
                self._selector.unregister(key.fd)
                continue
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            if data:
                key.data.add(data)
            else:
                self._selector.unregister(key.fd)
        return bool(events)


def main() -> None:
    limits = json.loads(sys.argv[1])
    command = sys.argv[2:]
    os.set_inheritable(int(limits["control"]), False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    wake, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    # Standard output, standard error, and what bubblewrap reports.
    pipes = {target: os.pipe() for target in ((1, 2, 3) if "files" in limits else (1, 2))}
    pid = start(command, limits, {target: ends[1] for target, ends in pipes.items()})

    def end_all(number: int, frame: object) -> None:
        kill_all(pid)
        os._exit(1)

    signal.signal(signal.SIGTERM, end_all)
    kept = {target: StreamTail(int(limits["kept_bytes"])) for target in pipes}
    for _, end in pipes.values():
        os.close(end)
    reaper = Reaper(pid, limits, {ends[0]: kept[target] for target, ends in pipes.items()}, wake)
    reaper.watch()
    kill_all(pid)
    reaper.drain()
    status = reaper.status
    result = {
        "exit_code": os.waitstatus_to_exitcode(status) if status is not None else None,
        "reason": reaper.reason,
        "stdout": kept[1].text(),
        "stderr": kept[2].text(),
        "memory_mb": reaper.memory_mb,
        "is_started": 3 not in kept or "exit-code" in kept[3].text(),
    }
    data = json.dumps(result).encode()
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(int(limits["control"]), data) :]


if __name__ == "__main__":
    main()
