"""Checkpoints: a resumed update equals an uninterrupted one, and partial ones are skipped."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog.testing
import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import CheckpointMark
from outloop.buffer.settings import TrainerSettings
from outloop.engine.train.checkpoint.async_writer import save_checkpoint
from outloop.engine.train.checkpoint.checkpoint_format import (
    check_model,
    latest_checkpoint,
    load_checkpoint,
)
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron import model_and_optimizer
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.policy_update import rl_update

MakePolicy = Callable[..., Policy]
MakeSamples = Callable[..., list[Sample]]


def mark(version: int) -> CheckpointMark:
    """A mark with two groups."""
    return CheckpointMark(fence=3, group_ids=("g1", "g2"), next_slot=5, policy_version=version)


def update(policy: Policy, samples: list[Sample]) -> tuple[float, float]:
    """One update; its loss and learning rate."""
    report = rl_update(
        policy,
        TrainBatch.of(samples),
        TrainerSettings(),
        policy_version=0,
        on_microbatch=lambda: None,
    )
    return report.loss, report.learning_rate


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_save_load_step_equals_an_uninterrupted_step(
    optimizer: str, make_policy: MakePolicy, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """After a resume the next two updates are bit-equal: Adam's step counts once. Moments of the
    other optimizer are refused."""
    schedule = {"lr_decay": "linear", "num_updates": 10, "weight_decay": 0.1}
    schedule["optimizer"] = optimizer
    first = make_policy(**schedule)
    for seed in range(3):
        update(first, make_samples(4, seed=seed))
    save_checkpoint(first, tmp_path, step=3, mark=mark(4), keep=1)
    second = make_policy(**schedule)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 3
    assert found.mark == mark(4)
    load_checkpoint(second, found)
    for seed in (7, 8):
        samples = make_samples(5, seed=seed)
        assert update(first, samples) == update(second, samples)
        pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    other = make_policy(optimizer="muon" if optimizer == "adam" else "adam")
    with pytest.raises(SettingsError, match=f'moments of trainer.optimizer="{optimizer}"'):
        load_checkpoint(other, found)


@pytest.mark.medium
def test_a_checkpoint_before_the_first_update_resumes_too(
    make_policy: MakePolicy, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """A run stopped before any signal leaves a checkpoint whose first update is the first."""
    first, second = make_policy(), make_policy()
    save_checkpoint(first, tmp_path, step=1, mark=mark(1), keep=1)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    load_checkpoint(second, found)
    plain = make_policy()
    samples = make_samples(5)
    assert update(plain, samples) == update(second, samples)
    pairs = zip(plain.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_random_states_come_back(make_policy: MakePolicy, tmp_path: Path) -> None:
    """Random numbers after loading are those after saving."""
    policy = make_policy()
    save_checkpoint(policy, tmp_path, step=0, mark=mark(0), keep=1)
    numbers = torch.rand(3)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    load_checkpoint(policy, found)
    assert torch.equal(torch.rand(3), numbers)


@pytest.mark.parametrize("damage", ["no_marker", "cut_off", "missing_file"])
def test_a_partial_checkpoint_is_skipped_with_a_sentence(
    damage: str, make_policy: MakePolicy, tmp_path: Path
) -> None:
    """The one before it is used."""
    policy = make_policy()
    save_checkpoint(policy, tmp_path, step=1, mark=mark(1), keep=5)
    newer = save_checkpoint(policy, tmp_path, step=2, mark=mark(2), keep=5)
    shard = next((newer / "shards").glob("*.distcp"))
    if damage == "no_marker":
        (newer / "COMPLETE").unlink()
    elif damage == "cut_off":
        shard.write_bytes(shard.read_bytes()[:-10])
    else:
        shard.unlink()
    (tmp_path / ".step_3.writing").mkdir()
    with structlog.testing.capture_logs() as logs:
        found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "incomplete" in logs[0]["sentence"]


@pytest.mark.medium
def test_only_the_newest_remain(make_policy: MakePolicy, tmp_path: Path) -> None:
    """keep = 2 leaves two, and no half-written folder."""
    policy = make_policy()
    for step in (1, 2, 10):
        save_checkpoint(policy, tmp_path, step=step, mark=mark(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_2"]


@pytest.mark.medium
def test_another_models_checkpoint_is_refused(make_policy: MakePolicy, tmp_path: Path) -> None:
    """The differing fields are named before anything is loaded."""
    save_checkpoint(make_policy("qwen3"), tmp_path, step=1, mark=mark(1), keep=1)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    with pytest.raises(SettingsError, match="qk_layernorm"):
        load_checkpoint(make_policy("llama"), found)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"rope_theta": 5e5}, "rope"),
        ({"rms_norm_eps": 1e-5}, "layernorm_epsilon"),
        ({"num_experts_per_tok": 3}, "moe_router_topk"),
        ({"norm_topk_prob": False}, "moe_router_pre_softmax"),
    ],
)
def test_a_checkpoint_of_equal_shapes_but_another_model_is_refused(
    changed: dict[str, float], name: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Every tensor would fit, and every answer would be wrong."""
    source, other = tiny_folder("qwen3_moe", tied=False), tmp_path / "other"
    shutil.copytree(source, other)
    described = json.loads((other / "config.json").read_text())
    described.pop("rope_parameters", None)
    (other / "config.json").write_text(json.dumps(described | changed))
    settings = TrainerSettings()
    policy = model_and_optimizer.build_policy(
        model_and_optimizer.read_config(source, {}), settings, num_updates=1
    )
    save_checkpoint(policy, tmp_path / "checkpoints", step=1, mark=mark(1), keep=1)
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    check_model(found, model_and_optimizer.read_config(source, {}))
    with pytest.raises(SettingsError, match=f"of another model .*{name}"):
        check_model(found, model_and_optimizer.read_config(other, {}))


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    """A fresh run starts from the model folder."""
    assert latest_checkpoint(tmp_path / "checkpoints") is None


KILLED = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from outloop.buffer.records import CheckpointMark
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.checkpoint import async_writer
from outloop.engine.train.megatron import model_and_optimizer as megatron

model, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
megatron.join_process_group(seed=1)
policy = megatron.build_policy(megatron.read_config(model, {}), TrainerSettings(), num_updates=1)
mark = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=1)
async_writer.save_checkpoint(policy, folder, step=1, mark=mark, keep=1)
original, calls = os.fsync, []

def fsync(descriptor):
    calls.append(descriptor)
    if len(calls) > count:
        os.kill(os.getpid(), signal.SIGKILL)
    original(descriptor)

os.fsync = fsync
if sys.argv[4] == "waiting":
    async_writer.save_checkpoint(policy, folder, step=2, mark=mark, keep=1)
else:
    begun = async_writer.begin_save(policy, folder, step=2, mark=mark, keep=1)
    begun.start()
    begun.wait(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_syncs", "how"), [(0, "waiting"), (0, "training"), (2, "training"), (5, "training")]
)
def test_after_kill_9_during_a_save_the_one_before_is_used(
    num_syncs: int, how: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Wherever the process dies between the first byte and the rename."""
    folder = tmp_path / "checkpoints"
    answer = subprocess.run(
        [sys.executable, "-c", KILLED, str(tiny_folder()), str(folder), str(num_syncs), how],
        check=False,
        timeout=110,
    )
    assert answer.returncode == -signal.SIGKILL
    found = latest_checkpoint(folder)
    assert found is not None
    assert found.step == 1


def test_a_checkpoint_of_another_release_is_refused(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    """Not skipped: an older one would silently undo the newer release's training."""
    path = save_checkpoint(make_policy(), tmp_path, step=1, mark=mark(1), keep=1)
    state = json.loads((path / "state.json").read_text())
    text = json.dumps(state | {"schema": 9}, indent=1)
    (path / "state.json").write_text(text)
    sizes = json.loads((path / "COMPLETE").read_text())
    (path / "COMPLETE").write_text(json.dumps(sizes | {"state.json": len(text)}))
    with pytest.raises(SettingsError, match="schema=9; this release reads 3"):
        latest_checkpoint(tmp_path)
