"""`make gpu-check` on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_without_a_gpu_it_says_so_and_fails() -> None:
    """One sentence with what is missing, and an exit code that no script takes for success."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/check.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        # On a machine with a GPU too.
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 2
    assert "needs a CUDA device" in result.stdout
    assert len(result.stdout.strip().splitlines()) == 1
