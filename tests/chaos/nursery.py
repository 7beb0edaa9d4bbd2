"""Processes of a real run, forked from one that has imported everything.

Owns: starting a part as `outloop PART ...` would in a process of its own, its log, its process id.
Does not own: who is started when (forked). Invariant: the parent has one thread and opened nothing
that a child would share; no child outlives it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_MAX_DESCRIPTORS = 4096
_MODULES = (
    "outloop.buffer.reader",
    "outloop.engine.launch.training",
    "outloop.engine.launch.torchrun",
    "outloop.engine.serve.main",
    "outloop.engine.serve.torch_server.app",
    "outloop.engine.train.main",
    "outloop.envs.runner.runner",
    "outloop.router.main",
)


def grow() -> None:
    """Import what the parts need; call it once, before the first fork."""
    warnings.filterwarnings("ignore", module="megatron")
    for module in _MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def fork(work: Callable[[], int], log: Path | None) -> int:
    """Run `work` in a child whose output goes to `log` (None: to the parent's); its process id.

    The child's exit code is what `work` returns, or that of the SystemExit that it raises.
    """
    assert threading.active_count() == 1, "a thread's locks would be copied as they stand"
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(code)
        os.setsid()
        # Such as the lock on the data folder of Redis, which a copy would hold.
        os.closerange(3, _MAX_DESCRIPTORS)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if log is not None:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 (the boundary of a process)
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def outloop(words: Sequence[str]) -> int:
    """What the command line `outloop WORDS` does in this process."""
    cli = importlib.import_module("outloop.cli")
    sys.argv = ["outloop", *words]
    cli.main()
    return 0


def wait_for_child(timeout_s: float) -> None:
    """Until a child of this process ends, at most `timeout_s`; one that ended before counts from
    the second call on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signal.sigtimedwait({signal.SIGCHLD}, timeout_s)


def exit_code(pid: int) -> int | None:
    """Of a child: None while it runs, negative for a signal; it is reaped."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def end(pid: int) -> None:
    """kill -9, and reap."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def run_all(works: Sequence[Callable[[], int]], jobs: int) -> int:
    """Run each in a child of its own, `jobs` at a time; how many did not end with 0."""
    waiting, running, num_failed = list(works), set[int](), 0
    while waiting or running:
        while waiting and len(running) < jobs:
            running.add(fork(waiting.pop(0), None))
        pid, status = os.wait()
        running.discard(pid)
        num_failed += os.waitstatus_to_exitcode(status) != 0
    return num_failed


def ends_of_logs(folder: Path) -> str:
    """The end of what each child wrote into a log there."""
    return "\n".join(
        f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
        for path in sorted(folder.glob("*.log"))
    )
