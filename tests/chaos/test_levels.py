"""A short part of `make test-levels`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_trained_token_is_too_old_and_nothing_is_lost_whoever_comes_and_goes() -> None:
    """Servers and runners are killed, stopped and added in the middle of a run; the audit of every
    trained token, every slot and every attempt is clean."""
    words = ("--levels", "2 partial", "--timeout-s", "240")
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("levels.py")), *words],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "slots trained once" in answer.stdout
