"""A mixture of experts through the whole loop: served, recorded, replayed, trained, published."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.families import make_family

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
Outloop = Callable[..., subprocess.CompletedProcess[str]]
MAX_GAP = 1e-4


@pytest.fixture
def mixture(workspace: Path, model_folder: Path) -> Path:
    """The user's folder with a mixture of the tiny model's tokenizer in the model's place."""
    dense = json.loads((model_folder / "config.json").read_text())
    names = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id")
    sizes = {name: dense[name] for name in names}
    # On a CPU SGLang pads experts to 32 rows a rank.
    sizes["moe_intermediate_size"] = 64
    make_family("qwen3_moe", workspace / "mixture", is_tied=False, **sizes)
    for path in model_folder.glob("*token*.json"):
        shutil.copy(path, workspace / "mixture")
    return workspace


def steps_of(workspace: Path, read_metrics: Callable[[Path], list[dict[str, float]]]) -> list:
    """Rows of the steps of the run."""
    return [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]


@pytest.mark.slow
def test_a_mixture_is_replayed_and_trained(
    mixture: Path,
    write_config: Callable[..., Path],
    outloop: Outloop,
    read_metrics: Callable[[Path], list[dict[str, float]]],
) -> None:
    """Every trained token is computed by the experts that its server took."""
    write_config(staleness=0, steps=2)
    few = ("--set", "buffer.drop_zero_signal=false", "--set", "eval.every=0")
    answer = outloop("train", "run.toml", *few, "--set", "model.path=mixture")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = steps_of(mixture, read_metrics)
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    assert [row["train/replayed_routes_share"] for row in rows] == [1.0, 1.0]
    assert all(0 < row["train/logprob_gap_max"] < MAX_GAP for row in rows)
    assert (mixture / "runs/tiny/hf/model.safetensors").is_file()


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_tensor_pipeline_and_expert_ranks_feed_tensor_parallel_servers(
    mixture: Path,
    write_config: Callable[..., Path],
    outloop: Outloop,
    read_metrics: Callable[[Path], list[dict[str, float]]],
) -> None:
    """TP 2, PP 2, EP 2 of the trainer to an SGLang server of TP 2: checksums of fused and cut
    experts agree, logprobs too, and every token is replayed by the experts that SGLang took."""
    write_config(staleness=0, steps=2)
    layout = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    settings = {
        "model.path": "mixture",
        "buffer.drop_zero_signal": False,
        "buffer.group_size": 2,
        "eval.every": 0,
        "eval.num_episodes": 1,
        "eval.final_num_episodes": 1,
        "env.episode_deadline_s": 300,
        "server.kind": "sglang",
        "server.tensor_parallel_size": 2,
        "server.start_timeout_s": 300,
        "publish.verify": "checksum",
        "trainer.groups_per_step": 2,
        "trainer.num_ranks": 4,
        "trainer.take_timeout_s": 300,
        **{f"trainer.megatron.{name}": value for name, value in layout.items()},
    }
    words = [
        w for name, value in settings.items() for w in ("--set", f"{name}={json.dumps(value)}")
    ]
    answer = outloop("train", "run.toml", *words, timeout_s=800)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = steps_of(mixture, read_metrics)
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    assert [row["train/replayed_routes_share"] for row in rows] == [1.0, 1.0]
    assert all(0 < row["train/logprob_gap_max"] < MAX_GAP for row in rows)
