"""What can happen to a process.

Owns: beginning and ending a fault. Does not own: whom it hits and what follows (matrix, soak).
Invariant: after the block nothing of a fault is left, whether or not its victims live.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil
from starvation import starved

STARVED = "out of memory"
LASTING = ("stopped", "slowed", "disk full", "memory limit", STARVED)
FAULTS = ("killed", "asked to stop", *LASTING)
LIMITED = ("disk full", "memory limit")
"""Those that set a limit of a process, which the system refuses for sandboxes: they are another
user's, in a user namespace."""
ON_HOSTS = ("partitioned",)
"""Those that need a host for each part."""
SLOW_CYCLE_S = 0.2
SLOW_SHARE = 0.1
"""A slowed process runs for this share of its time."""
SPARE_BYTES = 0
"""Address space that a process may still take under a memory limit."""


@contextmanager
def fault(kind: str, victims: Sequence[psutil.Process]) -> Iterator[Callable[[], int]]:
    """While it lasts, the victims suffer; the first is the part's own process. Gives how many of
    them the system has killed for want of memory."""
    if kind in ("killed", "asked to stop"):
        _send(victims[:1], signal.SIGKILL if kind == "killed" else signal.SIGTERM)
        yield _none
    elif kind == "stopped":
        _send(victims, signal.SIGSTOP)
        try:
            yield _none
        finally:
            _send(victims, signal.SIGCONT)
    elif kind == "slowed":
        with _slowed(victims):
            yield _none
    elif kind == "disk full":
        # Writing to any file fails, as on a disk without room; sockets and pipes are no files.
        with _limited(victims, resource.RLIMIT_FSIZE, lambda process: 0):
            yield _none
    elif kind == STARVED:
        with starved(victims) as num_killed:
            yield num_killed
    else:
        assert kind == "memory limit", kind
        with _limited(victims, resource.RLIMIT_AS, lambda p: p.memory_info().vms + SPARE_BYTES):
            yield _none


def _none() -> int:
    return 0


def _send(victims: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in victims:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextmanager
def _slowed(victims: Sequence[psutil.Process]) -> Iterator[None]:
    done = threading.Event()

    def slow() -> None:
        while not done.is_set():
            _send(victims, signal.SIGSTOP)
            done.wait(SLOW_CYCLE_S * (1 - SLOW_SHARE))
            _send(victims, signal.SIGCONT)
            done.wait(SLOW_CYCLE_S * SLOW_SHARE)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _send(victims, signal.SIGCONT)


@contextmanager
def _limited(victims, which, limit_of) -> Iterator[None]:  # type: ignore[no-untyped-def]
    before = {}
    # A runner's child may be a sandbox by now: another user's, whose limits cannot be changed.
    beyond_reach = (psutil.NoSuchProcess, psutil.AccessDenied)
    for process in victims:
        with suppress(*beyond_reach):
            before[process] = process.rlimit(which)
            process.rlimit(which, (limit_of(process), before[process][1]))
    try:
        yield
    finally:
        for process, limits in before.items():
            with suppress(*beyond_reach):
                process.rlimit(which, limits)
