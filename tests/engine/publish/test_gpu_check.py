"""`make gpu-check` on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def rehearse(*names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Rows of it, as without a GPU."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/check.py"), *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
    )


@pytest.mark.slow
def test_a_row_that_cannot_run_says_what_it_needs() -> None:
    """And is no failure: this is a rehearsal, and says so."""
    result = rehearse("setting", "checksum", "exported", "bench-publish")
    assert result.returncode == 0, result.stdout
    assert "a rehearsal of what a CPU can show" in result.stdout
    assert result.stdout.count("NEEDS") == 3
    assert "--- setting: ok" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_a_cpu_can_show_is_shown() -> None:
    """A member that never takes part in a broadcast, over gloo."""
    result = rehearse("group, member absent")
    assert result.returncode == 0, result.stdout
    assert "PASS nobody took part in the first broadcast: ended after 5" in result.stdout


@pytest.mark.slow
def test_a_row_that_fails_fails_the_whole(tmp_path: Path) -> None:
    """Here for files of SGLang that are none."""
    for name in ("common.py", "patch_torch.py", "tensor_bucket.py"):
        (tmp_path / name).write_text("raise RuntimeError('not SGLang')\n")
    result = rehearse("buckets", OUTLOOP_SGLANG_FILES=str(tmp_path))
    assert result.returncode == 1
    assert "--- buckets into SGLang: exit code 1" in result.stdout
