"""Ctrl-C, SIGTERM and a closed terminal as an event."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_STDOUT, _STDERR = 1, 2


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a process to stop; SIGHUP is none for a process under nohup."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hang_up)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and SIGHUP set; the second Ctrl-C or SIGTERM interrupts at
    once."""
    stop = threading.Event()
    # A terminal that was closed is none any more.
    on_terminal = [number for number in (_STDOUT, _STDERR) if os.isatty(number)]

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            _leave(on_terminal)
        elif stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in ending_signals()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(terminal: Sequence[int]) -> None:
    """Write to nowhere in place of the closed terminal, where each write would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in terminal:
        os.dup2(nowhere, number)
    os.close(nowhere)
