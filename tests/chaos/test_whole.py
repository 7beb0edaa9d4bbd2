"""A short part of the last part of `make test-chaos`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_each_slot_is_trained_once_whoever_of_a_real_run_is_killed() -> None:
    """kill -9 of a real launcher, Redis, router, server, runner or trainer; the audit is clean."""
    words = ("--first-seed", "7", "--seeds", "1", "--steps", "5", "--kills", "3")
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("whole.py")), *words],
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
