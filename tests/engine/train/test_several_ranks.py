"""Three real ranks: what works on one works on several, and a stopped rank is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes.rank_processes import errors_of, rank_processes
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings
from outloop.engine.train.checkpoint.checkpoint_format import latest_checkpoint

PROGRAM = Path(__file__).with_name("several_ranks.py")
NUM_RANKS = 3
TIMEOUT_S = 15.0


@pytest.fixture(scope="module")
def results(
    tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the program's rank 0 left behind, and how the other ranks ended."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("stays", "travels"):
        trainer = {
            "num_ranks": NUM_RANKS,
            "rank_timeout_s": TIMEOUT_S,
            "hang_timeout_s": TIMEOUT_S / 2,
            "max_microbatch_tokens": 64,
            "learning_rate": 1e-3,
            "max_grad_spike": 50.0,
            "is_colocated": name == "travels",
        }
        settings = Settings(
            model={"path": tiny_folder(), "max_context_tokens": 64}, trainer=trainer
        )
        create_run(settings, folder / name, "unix:///nowhere")
    # Names alone: there is no GPU.
    variables = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}
    with rank_processes(PROGRAM, folder, num_ranks=NUM_RANKS, variables=variables) as ranks:
        codes = [ranks[rank].wait(timeout=240) for rank in (0, 2)]
        is_stopped = psutil.Process(ranks[1].pid).status() == psutil.STATUS_STOPPED
    errors = errors_of(folder, NUM_RANKS)
    assert (folder / "results.json").exists(), "\n".join(errors)[-6000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results | {
        "codes": codes, "is_stopped": is_stopped, "error_of_rank_2": errors[2], "folder": folder,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_colocated_trainer_of_several_ranks_is_bit_equal(results: dict[str, Any]) -> None:
    """Every rank's tensors leave after each update; the weights are those without journeys."""
    assert results["is_bit_equal"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_rank_stages_whole_buckets_for_the_servers_beside_it(
    results: dict[str, Any],
) -> None:
    """Three ranks, each on a GPU of its own by name; what is read is what rank 0 gathers."""
    assert results["gpus"] == ["GPU-a", "GPU-b", "GPU-c"]
    assert results["is_staged"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_update_that_several_ranks_refuse_names_its_episode(results: dict[str, Any]) -> None:
    """All ranks refuse alike: weights are unchanged, logprobs are computed."""
    not_finite, spike = results["steps"]["refusals"]
    assert f"Likeliest first: {results['steps']['episode']} (" in not_finite
    assert "max_grad_spike" in spike
    assert results["steps"]["is_unchanged"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rank_that_cannot_write_fails_the_checkpoint(results: dict[str, Any]) -> None:
    """Rank 0 raises its sentence, nothing appears under the name, and the next one is whole."""
    assert "rank 1 could not write its shards" in results["saves"]["full"]
    assert "No space left" in results["saves"]["full"]
    assert "the shards of trainer rank 1 are missing" in results["saves"]["held"]
    found = latest_checkpoint(results["folder"] / "travels" / "checkpoints")
    assert found is not None
    assert found.step == 6
    names = {path.name for path in found.path.parent.iterdir()}
    assert names == {"step_6"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_is_stopped_in_a_collective_is_named(results: dict[str, Any]) -> None:
    """SIGSTOP in an update: rank and phase within the deadline, and no other rank is left."""
    assert results["is_stopped"]
    sentence = results["hang"]["sentence"]
    assert "trainer rank 1 (no sign of life, in phase='train step')" in sentence
    assert "rank 2" not in sentence
    assert results["hang"]["waited_s"] < 3 * TIMEOUT_S
    assert results["codes"] == [0, 1]
    assert "rank 1 (no sign of life, in phase='train step')" in results["error_of_rank_2"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_rank_reports_a_hang_and_names_the_others(results: dict[str, Any]) -> None:
    """Ranks 0 and 2 stand in the collective that rank 1 does not join; both say who is silent."""
    for rank, other in ((0, 2), (2, 0)):
        report = (results["folder"] / f"travels/progress/hang_rank_{rank}.txt").read_text()
        assert f"trainer rank {rank} made no progress" in report
        assert "rank 1: phase='train step', no sign of life" in report
        assert f"rank {other}: phase='train step" in report
        assert "it is the only rank" not in report
