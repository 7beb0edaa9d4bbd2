"""One part of a run as a child process with a log file.

A child ends when its parent does (PDEATHSIG on Linux). It has a process group of its own, so that
Ctrl-C reaches the launcher alone, which stops the parts in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outloop.engine.launch.last_sentence import LastSentence
from outloop.engine.machine.parent_death import die_with_parent


class PartProcess:
    """A running part; its stdout and stderr go to `log_path`."""

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._sentence = LastSentence()
        try:
            with log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, **self._sentence.environment},
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                    pass_fds=(self._sentence.descriptor,),
                )
        finally:
            self._sentence.close_part_side()

    @property
    def pid(self) -> int:
        """Process id, also of the part's process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM); returns at once."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self, timeout_s: float) -> None:
        """Ask it to stop, then kill its whole group when `timeout_s` has passed."""
        self.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_words(self, num_lines: int = 12) -> str:
        """The end of its log, for an error message; its last sentence even where the log has no
        room for it."""
        lines = []
        if self.log_path.exists():
            lines = self.log_path.read_text(errors="replace").splitlines()
        said = self._sentence.read().splitlines()
        if lines[len(lines) - len(said) :] != said:
            lines += said
        return "\n".join(lines[-num_lines:])


def part_command(part: str, run_dir: Path, *extra: str) -> list[str]:
    """The command line that runs `part` of the run in `run_dir` with this interpreter."""
    return [sys.executable, "-P", "-m", "outloop.cli", part, "--run", str(run_dir), *extra]
