"""Children that end with the process which started them."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """For a new child, before it becomes its program: end by `number` when its starter ends.

    Linux only; elsewhere the child lives on. The starter is the thread that started it; one that
    ends early takes the child with it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
