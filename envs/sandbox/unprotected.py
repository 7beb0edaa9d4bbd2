"""Programs that run with the rights of the runner: for code that you wrote yourself."""

from __future__ import annotations

import sys
from pathlib import Path

import structlog

from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.guest_bundle import boot_argv
from outloop.envs.sandbox.supervised import SupervisedSandbox
from outloop.envs.sandbox.supervisor_process import Launch

_log = structlog.get_logger()


class SubprocessSandbox(SupervisedSandbox):
    """No protection: programs run with the runner's rights."""

    enforcement = "resource limits bound each process; nothing protects this machine"

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._bounds = "each"
        _log.warning("sandbox", backend="subprocess", enforcement=self.enforcement)

    def _launch(self, limits: Limits, base: Path | None, events: int = -1) -> Launch:
        folder = str(self.bundle.path)
        return Launch(
            argv=boot_argv(sys.executable, folder, "plain", limits, base=str(base) if base else "")
        )
