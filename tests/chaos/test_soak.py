"""What the soak calls growth."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HOUR_S = 3600.0
SOAK = Path(__file__).with_name("soak.py")


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, which finds its neighbours where it lies."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("soak")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "by_hour", "filled_s", "hours", "is_growth"),
    [
        ("memory of archiver, MB", 60.0, HOUR_S / 2, 1, False),
        ("memory of archiver, MB", 60.0, HOUR_S, 1, True),
        ("memory of archiver, MB", 5.0, HOUR_S, 1, False),
        ("memory of redis, MB", 60.0, HOUR_S, 1, False),
        ("memory of redis, MB", 60.0, HOUR_S, 3, False),
        ("memory of redis, MB", 60.0, 3 * HOUR_S, 3, True),
        ("file of Redis, MB", 240.0, HOUR_S, 1, False),
        ("file of Redis, MB", 240.0, 3 * HOUR_S, 3, True),
        ("metrics, logs and archive, MB", 60.0, HOUR_S, 1, False),
    ],
    ids=[
        *("fills", "leaks", "slowly", "not yet full", "full", "leaks for long"),
        *("file not yet full", "file for long", "by design"),
    ],
)
def test_growth_is_a_slope_of_the_last_half_above_its_bound(
    soak: Any, name: str, by_hour: float, filled_s: float, hours: int, is_growth: bool
) -> None:
    """What fills in the first half does not grow, nor what is known to fill for an hour."""
    seconds = hours * HOUR_S
    values = [
        (at, 100.0 + by_hour * min(at, filled_s) / HOUR_S + (at // 5) % 2)
        for at in map(float, range(0, int(seconds), 5))
    ]
    slope = soak.slope_of(values, seconds / 2, seconds)
    assert soak.grows(name, slope, largest=200.0, seconds=seconds) is is_growth


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_half_a_minute_of_faults_leaves_a_run_that_goes_on() -> None:
    """A fault every four seconds or so: steps are made, every wait has a name, the ledger
    closes."""
    words = ("--minutes", "0.5", "--pause-s", "4", "--no-hosts", "--no-page")
    answer = subprocess.run(
        [sys.executable, SOAK, *words], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("minute 0.") > 2
