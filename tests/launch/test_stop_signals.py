"""A launcher in a terminal that closes stops as by Ctrl-C."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = """
import sys, time
from pathlib import Path
from outloop.engine.launch.stop_signals import stop_on_signals

with stop_on_signals() as stop:
    Path("ready").touch()
    if not stop.wait(30):
        sys.exit("no signal came")
    # Parts are stopped in order now, and what the launcher says of it fails nothing.
    for _ in range(3):
        print("stopping", flush=True)
        print("stopping", file=sys.stderr, flush=True)
        time.sleep(0.1)
    Path("checkpoint").touch()
"""


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_run_stop_in_order(number: signal.Signals, tmp_path: Path) -> None:
    """SIGHUP too."""
    # Whoever runs the tests may ignore the signal.
    usual = ["env", "--default-signal=HUP,INT,TERM", sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(usual, cwd=tmp_path) as process:
        wait_for(tmp_path / "ready")
        process.send_signal(number)
        assert process.wait(30) == 0
    assert (tmp_path / "checkpoint").exists()


def test_a_terminal_that_closes_lets_the_run_stop_in_order(tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and writing to the terminal fails from then on."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", LAUNCHER])
    wait_for(tmp_path / "ready")
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "checkpoint").exists()


def test_under_nohup_a_run_goes_on(tmp_path: Path) -> None:
    """SIGHUP stays ignored."""
    command = ["nohup", sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_for(tmp_path / "ready")
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.terminate()
        assert process.wait(30) == 0
