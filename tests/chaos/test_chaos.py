"""A short part of `make test-chaos`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_each_slot_is_trained_once_whoever_is_killed() -> None:
    """kill -9 of Redis, trainer and runner at random moments; the auditor finds nothing wrong."""
    words = ("--seeds", "2", "--slots", "16", "--kills", "4")
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("chaos.py")), *words],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("slots trained") == 2
