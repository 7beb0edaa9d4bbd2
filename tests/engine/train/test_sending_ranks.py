"""Four real ranks in two stages: weights leave from those that hold them, by each transport."""

import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fakes.rank_processes import errors_of, rank_processes
from fakes.torch_server_process import ServerProcess
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings

PROGRAM = Path(__file__).with_name("sending_ranks.py")
NUM_RANKS = 4
TRANSPORTS = ["disk", "shared_memory", "collective"]


@pytest.fixture(scope="module")
def results(
    tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the program's rank 0 left behind, and how the ranks ended."""
    folder, model = tmp_path_factory.mktemp("ranks"), tiny_folder(tied=False)
    for name in TRANSPORTS:
        settings = Settings(
            model={"path": model, "max_context_tokens": 64},
            trainer={
                "num_ranks": NUM_RANKS,
                "rank_timeout_s": 120.0,
                "max_microbatch_tokens": 64,
                "megatron": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            },
            publish={"transport": name, "fallback": "none", "bucket_mb": 0.02},
        )
        create_run(settings, folder / name, "unix:///nowhere")
    server = ServerProcess(model)
    words = (server.url, str(model))
    variables = {"PYTHONPATH": str(PROGRAM.parents[2])}
    try:
        with rank_processes(
            PROGRAM, folder, *words, num_ranks=NUM_RANKS, variables=variables
        ) as ranks:
            codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        server.kill()
    errors = errors_of(folder, NUM_RANKS)
    assert (folder / "results.json").exists(), "\n".join(errors)[-6000:]
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert found.keys() == set(TRANSPORTS), "\n".join(errors)[-6000:]
    return found | {
        "codes": codes,
        "sizes": {name: t.nbytes for name, t in load_file(model / "model.safetensors").items()},
    }


def _sizes_of_stages(sizes: dict[str, int]) -> tuple[int, int]:
    first = sum(size for name, size in sizes.items() if ".embed_" in name or ".layers.0." in name)
    return first, sum(sizes.values()) - first


@pytest.mark.slow
@pytest.mark.timeout(300)
# What happens beside training does not depend on the transport.
@pytest.mark.parametrize(
    ("transport", "how"),
    [*itertools.product(TRANSPORTS, ("within", "within_again")), ("collective", "beside")],
)
def test_each_stage_sends_its_own_weights(
    results: dict[str, Any], transport: str, how: str
) -> None:
    """All of them send, the server then holds the model, and what a rank received is less than its
    own stage's weights: nothing of the other stage came to it, rank 0 neither."""
    found = results[transport][how]
    assert found["quarantined"] == []
    assert found["holds_the_model"]
    assert found["peak_extra_buckets"] <= 2
    sent = [rank["sent_bytes"] for rank in found["ranks"]]
    received = [rank["received_bytes"] for rank in found["ranks"]]
    first, second = _sizes_of_stages(results["sizes"])
    assert (sent[0] + sent[1], sent[2] + sent[3]) == (first, second)
    assert min(sent) > 0
    assert found["num_bytes"] == first + second
    # A rank has about half of what it sends, and norms whole.
    assert all(0 < came <= went / 2 for came, went in zip(received, sent, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sending_rank_that_is_killed_fails_the_publish(results: dict[str, Any]) -> None:
    """SIGKILL before its broadcast: rank 0 says that a rank is lost, and the server that had the
    other ranks' buckets is quarantined."""
    death = results["collective"]["death"]
    assert "lost another rank in phase='carry out'" in death["sentence"]
    assert death["is_quarantined"]
    assert results["codes"][3] == -signal.SIGKILL
