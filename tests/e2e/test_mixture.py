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
    make_family(
        "qwen3_moe", workspace / "mixture", is_tied=False, **{name: dense[name] for name in names}
    )
    for path in model_folder.glob("*token*.json"):
        shutil.copy(path, workspace / "mixture")
    return workspace


def steps_of(workspace: Path, read_metrics: Callable[[Path], list[dict[str, float]]]) -> list:
    """Rows of the steps of the run."""
    return [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]


def test_a_mixture_is_replayed_and_trained(
    mixture: Path,
    write_config: Callable[..., Path],
    outloop: Outloop,
    read_metrics: Callable[[Path], list[dict[str, float]]],
) -> None:
    """Every trained token is computed by the experts that its server took."""
    write_config(steps=2)
    few = ("--set", "buffer.drop_zero_signal=false", "--set", "eval.every=0")
    answer = outloop("train", "run.toml", *few, "--set", "model.path=mixture")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = steps_of(mixture, read_metrics)
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    assert [row["train/replayed_routes_share"] for row in rows] == [1.0, 1.0]
    assert all(0 < row["train/logprob_gap_max"] < MAX_GAP for row in rows)
    assert (mixture / "runs/tiny/hf/model.safetensors").is_file()
