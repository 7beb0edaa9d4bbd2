"""Whether trainer and servers have the same release of NCCL, asked before either is started.

Publishing compares again what each server tells when it registers
(engine/publish/nccl_compatibility.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.machine.gpu_libraries import libraries_of, nccl_difference
from outloop.engine.serve.sglang.cpu_environment import find_python


def uses_nccl(settings: Settings) -> bool:
    """Whether weights go to servers that this run starts in an environment of their own by NCCL."""
    server = settings.server
    return server.kind == "sglang" and server.num_servers > 0 and settings.joins_by_nccl


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
    ours = libraries_of(trainer_python or Path(sys.executable))
    difference = nccl_difference(ours, libraries_of(python), repr(str(python)))
    if difference is not None:
        raise SettingsError(difference)
