"""`make bench-fleet`, made small: one router in front of many servers, one publish to several."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """tests/bench/fleet.py; what it imports from its folder is forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    import fleet

    yield fleet
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


@pytest.mark.medium
async def test_every_turn_is_answered_whatever_servers_come_and_go(
    bench: ModuleType, model_folder: Path, tmp_path: Path
) -> None:
    """With one server, with eight, and with one again: nobody gets another's answer."""
    stage = bench.FleetStage(
        tmp_path, model_folder, num_servers=8, num_episodes=64, latency_s=0.01, max_in_flight=64
    )
    try:
        figures = await bench.measure_router(
            stage, fleets=(1, 8), num_episodes=64, num_repeats=2, num_turns=12, num_in_flight=12
        )
    finally:
        stage.close()
    assert figures["open_episodes"] == 64
    assert figures["episodes_mixed"] == 0
    assert figures["router_cpu_8_vs_1"] > 0


@pytest.mark.medium
def test_a_publish_to_a_group_is_a_tree(tmp_path: Path) -> None:
    """The publisher sends ceil(log2(n + 1)) copies and no receiver more, whatever n is; in a
    process of its own, which forks."""
    program = (
        "import json, fleet_publish as bench\n"
        "print(json.dumps(bench.measure((1, 2, 4), num_repeats=1, link_bytes_per_s=10**9)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(BENCH), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=100,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert [figures[f"copies_root_{number}"] for number in (1, 2, 4)] == [1, 2, 3]
    assert [figures[f"copies_most_{number}"] for number in (1, 2, 4)] == [0, 0, 1]
