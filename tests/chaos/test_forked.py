"""A short part of the second part of `make test-chaos`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_slot_is_trained_once_whichever_call_a_real_part_dies_in() -> None:
    """Real parts die before and after an acknowledgement and elsewhere, over wires that are cut,
    slow and lose answers; the audit is clean."""
    words = ("--first-seed", "22", "--seeds", "3", "--steps", "3", "--timeout-s", "120")
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("forked.py")), *words],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for moment in ("trainer before acknowledge", "trainer after acknowledge", " wire: "):
        assert moment in answer.stdout
