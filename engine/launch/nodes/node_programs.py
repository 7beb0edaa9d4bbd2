"""Programs on nodes, one on each, and what they answer within a deadline."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import msgspec

from outloop.engine.launch.nodes.answers import Answer, read_line
from outloop.engine.machine.parent_death import die_with_parent

_STOP_TIMEOUT_S = 20.0
_NUM_LAST_LINES = 3
_MAX_LINE = 300


class NodePrograms:
    """Started by the commands of an engine; a context manager that stops what has not ended."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._answers: queue.SimpleQueue[tuple[str, Answer | None]] = queue.SimpleQueue()
        self._last_lines: dict[str, list[str]] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> NodePrograms:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for reader in self._readers:
            reader.join(_STOP_TIMEOUT_S)

    def start(self, node: str, command: Sequence[str]) -> None:
        """Start the command that runs a program on the node; of each node one."""
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._processes[node] = process
        self._last_lines[node] = []
        reader = threading.Thread(target=self._read, args=(node, process), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, node: str, process: subprocess.Popen[str]) -> None:
        """Until the program's output ends; None is its last answer."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                try:
                    answer = read_line(line)
                except msgspec.DecodeError as error:
                    answer, line = None, f"not an answer of this release of outloop: {error}"
                if answer is not None:
                    self._answers.put((node, answer))
                elif line.strip():
                    last = self._last_lines[node]
                    # An engine may print the whole command, settings included.
                    last.append(line.strip()[:_MAX_LINE])
                    del last[:-_NUM_LAST_LINES]
        self._answers.put((node, None))

    def wait_for(self, nodes: Sequence[str], deadline: float) -> dict[str, Answer]:
        """The next answer of each node, until all have given one or ended, or the time is up.

        Args:
            deadline: by the monotonic clock.

        Returns:
            In the order of `nodes`; those without an answer are left out.
        """
        found: dict[str, Answer] = {}
        while not set(nodes) <= found.keys() | self._ended:
            try:
                node, answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if answer is None:
                self._ended.add(node)
            else:
                found.setdefault(node, answer)
        return {node: found[node] for node in nodes if node in found}

    def silence(self, node: str, after_s: float) -> str:
        """Why there is no answer of a node, for a person."""
        lines = "; ".join(self._last_lines[node]) or "it printed nothing"
        if node not in self._ended:
            return f"no answer within {after_s:.0f} s: {lines}"
        code = self._processes[node].wait(_STOP_TIMEOUT_S)
        return f"its program ended with exit_code={code}: {lines}"
