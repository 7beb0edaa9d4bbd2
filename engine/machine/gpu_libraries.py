"""Releases of torch, CUDA and NCCL, of this process or of another environment; no GPU is touched.

NCCL refuses members of another release when a communicator is made.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec

from outloop.buffer.records import Libraries
from outloop.engine.machine import gpu_library_probe
from outloop.engine.machine.gpu_library_probe import MARK, releases

_ASK_TIMEOUT_S = 120.0


def own_libraries() -> Libraries:
    """What this process has loaded."""
    return Libraries(**releases())


def libraries_of(python: Path) -> Libraries:
    """What torch loads under an interpreter; nothing is known of one that cannot be asked."""
    try:
        answer = subprocess.run(
            [str(python), gpu_library_probe.__file__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Libraries()
    for line in answer.stdout.splitlines():
        if line.startswith(MARK):
            return msgspec.convert(json.loads(line.removeprefix(MARK)), Libraries)
    return Libraries()


def nccl_difference(ours: Libraries, theirs: Libraries, whose: str) -> str | None:
    """Why `whose` cannot join the trainer's group, and what to do; None: it can, or who knows."""
    if not ours.nccl or not theirs.nccl or ours.nccl == theirs.nccl:
        return None
    package = f"nvidia-nccl-cu{ours.cuda.partition('.')[0]}"
    return (
        f'publish.transport="collective": the trainer has {ours} and {whose} has {theirs}; two '
        f"releases of NCCL refuse each other. Install the same in both, for example pip install "
        f"--no-deps {package}=={theirs.nccl} in the trainer's environment, or set "
        'publish.transport = "shared_memory" on one machine, "disk" on several'
    )
