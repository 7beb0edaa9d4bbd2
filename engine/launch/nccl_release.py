"""Whether trainer and servers have the same release of NCCL.

NCCL refuses members of another release when a communicator is made, which would be in the middle of
the first publish, after all servers were paused.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.serve.sglang.cpu_environment import find_python

_ASK = "import torch; print('NCCL', *(torch.cuda.nccl.version() if torch.version.cuda else ()))"
_ASK_TIMEOUT_S = 120.0


def nccl_release(python: Path) -> str | None:
    """What torch loads under an interpreter, as "2.30.7"; None: it has none, or cannot be asked."""
    try:
        answer = subprocess.run(
            [str(python), "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in answer.stdout.splitlines():
        word, *numbers = line.split()
        if word == "NCCL" and numbers:
            return ".".join(numbers)
    return None


def uses_nccl(settings: Settings) -> bool:
    """Whether weights go to servers that this run starts in an environment of their own by NCCL."""
    server = settings.server
    is_there = server.kind == "sglang" and server.num_servers > 0
    is_chosen = settings.publish.transport == "collective" and server.device.startswith("cuda")
    return is_there and is_chosen


def check_nccl(settings: Settings, *, trainer_python: Path | None = None) -> None:
    """Refuse servers that could not join the trainer's group.

    Args:
        trainer_python: the trainer's interpreter; None: this process's own.

    Raises:
        SettingsError: their release of NCCL is another one.
    """
    if not uses_nccl(settings):
        return
    python = find_python(settings.server.sglang_python)
    ours, theirs = nccl_release(trainer_python or Path(sys.executable)), nccl_release(python)
    if ours is not None and theirs is not None and ours != theirs:
        raise SettingsError(
            f'publish.transport="collective": the trainer has NCCL {ours} and {str(python)!r} has '
            f"NCCL {theirs}, which refuse each other. Install the same in both, for example pip "
            f"install --no-deps nvidia-nccl-cu13=={theirs} in the trainer's environment, or set "
            'publish.transport = "shared_memory" on one machine, "disk" on several'
        )
