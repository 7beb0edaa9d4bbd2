"""Two real ranks, of which one is killed while the other waits for its part of a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.rank_processes import errors_of, rank_processes
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings

PROGRAM = Path(__file__).with_name("lost_rank.py")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_is_not_waited_for(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Rank 0 says that it is lost, and has ended long before torchrun would kill it (30 s)."""
    settings = Settings(
        model={"path": tiny_folder(), "max_context_tokens": 64}, trainer={"num_ranks": 2}
    )
    create_run(settings, tmp_path / "run", "unix:///nowhere")
    with rank_processes(PROGRAM, tmp_path, num_ranks=2) as ranks:
        code = ranks[0].wait(timeout=100)
    assert code == 0, errors_of(tmp_path, 2)
    results = json.loads((tmp_path / "results.json").read_text())
    assert "lost another rank" in results["sentence"]
    assert "trainer rank 1 (no sign of life" in results["sentence"]
    assert results["ended_s"] < 20
