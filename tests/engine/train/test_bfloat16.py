"""Training with bfloat16 weights: what stays float32, and how far the two are apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outloop.buffer.records import CheckpointMark
from outloop.buffer.settings import TrainerSettings
from outloop.engine.train.checkpoint.async_writer import save_checkpoint
from outloop.engine.train.checkpoint.checkpoint_format import latest_checkpoint, load_checkpoint
from outloop.engine.train.checkpoint.convert import to_huggingface
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.export_weights import Exports
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.policy_update import rl_update
from outloop.engine.train.step.recompute_logprobs import score
from outloop.engine.train.step.update_metrics import UpdateReport

MakePolicy = Callable[..., Policy]
MakeSamples = Callable[..., list[Sample]]
MARK = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=1)
MAX_LOGPROB_GAP = 0.02
"""Nats, of the tiny models' logprobs of about -6."""
MAX_NORM_GAP = 0.02
MIN_COSINE = 0.995
"""Of the two gradients."""


def update(policy: Policy, samples: list[Sample], **settings: Any) -> UpdateReport:
    """One RL update at version 0."""
    trainer = TrainerSettings(max_grad_norm=1e9, **settings)
    batch = TrainBatch.of(samples)
    return rl_update(policy, batch, trainer, policy_version=0, on_microbatch=lambda: None)


def gradient(policy: Policy) -> Tensor:
    """Of the last update, flat."""
    grads = [p.main_grad for p in policy.model.parameters()]
    assert {grad.dtype for grad in grads} == {torch.float32}
    return torch.cat([grad.flatten() for grad in grads]).clone()


def main_weights(policy: Policy) -> list[Tensor]:
    """What the optimizer updates."""
    optimizers = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    return [p for each in optimizers for p in each.get_parameters()]


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_logprobs_and_gradients_are_those_of_float32(
    kind: str, make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """To what rounding weights and activations to 8 bits of mantissa makes of them."""
    samples = make_samples(9)
    plain, rounded = make_policy(kind), make_policy(kind, dtype="bfloat16")
    scores = []
    for policy in (plain, rounded):
        batch = TrainBatch.of(samples)
        scored = score(policy.model, batch, max_tokens=4096, on_microbatch=lambda: None)
        assert str(scored.dtype) == "float32"
        scores.append(torch.from_numpy(scored))
    assert (scores[0] - scores[1]).abs().mean() <= MAX_LOGPROB_GAP
    reports = [update(policy, samples) for policy in (plain, rounded)]
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=MAX_NORM_GAP)
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=0.02, abs=0.02)
    gradients = gradient(plain), gradient(rounded)
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) >= MIN_COSINE


@pytest.mark.medium
def test_updates_below_bfloat16_are_kept_by_the_main_weights(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Steps of 1e-6 on weights of about 0.02, whose spacing in bfloat16 is 1e-4."""
    policy = make_policy(dtype="bfloat16", learning_rate=1e-6)
    before = [weight.clone() for weight in main_weights(policy)]
    model_before = [weight.clone() for weight in policy.model.parameters()]
    for seed in range(3):
        update(policy, make_samples(4, seed=seed))
    after = main_weights(policy)
    assert {weight.dtype for weight in after} == {torch.float32}
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.bfloat16}
    moved = sum(int((a != b).sum()) for a, b in zip(after, before, strict=True))
    assert moved > 0.5 * sum(weight.numel() for weight in after)
    still = [
        torch.equal(a, b) for a, b in zip(policy.model.parameters(), model_before, strict=True)
    ]
    assert any(still)


# megatron-core 0.16.1 reduces by a function that torch 2.13 has deprecated.
@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_checkpoint_holds_the_main_weights(
    is_distributed: bool,
    make_policy: MakePolicy,
    make_samples: MakeSamples,
    tmp_path: Path,
) -> None:
    """After a resume the next updates are bit-equal; a float32 run goes on from them, and back."""
    chosen: dict[str, Any] = {"dtype": "bfloat16", "learning_rate": 1e-5}
    raw = {"use_distributed_optimizer": is_distributed}
    first = make_policy(raw=raw, **chosen)
    for seed in range(3):
        update(first, make_samples(4, seed=seed))
    save_checkpoint(first, tmp_path / "saved", step=3, mark=MARK, keep=1)
    found = latest_checkpoint(tmp_path / "saved")
    assert found is not None
    second, plain = make_policy(raw=raw, **chosen), make_policy(learning_rate=1e-5)
    load_checkpoint(second, found)
    load_checkpoint(plain, found)
    for main, weight in zip(sorted_weights(first), sorted_weights(plain), strict=True):
        assert torch.equal(main, weight)
    for seed in (7, 8):
        samples = make_samples(5, seed=seed)
        reports = [update(policy, samples) for policy in (first, second)]
        assert reports[0].loss == reports[1].loss
        for ours, theirs in zip(main_weights(first), main_weights(second), strict=True):
            assert torch.equal(ours, theirs)
    save_checkpoint(plain, tmp_path / "plain", step=3, mark=MARK, keep=1)
    back = latest_checkpoint(tmp_path / "plain")
    assert back is not None
    third = make_policy(raw=raw, **chosen)
    load_checkpoint(third, back)
    for main, weight in zip(sorted_weights(third), sorted_weights(plain), strict=True):
        assert torch.equal(main, weight)


def sorted_weights(policy: Policy) -> list[Tensor]:
    """Main weights, in an order that does not depend on the optimizer."""
    return sorted(
        (weight.detach().flatten() for weight in main_weights(policy)),
        key=lambda weight: (len(weight), float(weight.double().sum())),
    )


@pytest.mark.medium
def test_a_checkpoint_before_the_first_update_resumes_too(
    make_policy: MakePolicy, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """There are no moments yet, and the main weights are the folder's."""
    first, second = make_policy(dtype="bfloat16"), make_policy(dtype="bfloat16")
    save_checkpoint(first, tmp_path, step=1, mark=MARK, keep=1)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    load_checkpoint(second, found)
    samples = make_samples(5)
    assert update(first, samples).loss == update(second, samples).loss
    for ours, theirs in zip(main_weights(first), main_weights(second), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.medium
def test_what_is_published_and_converted_is_bfloat16_and_float32(
    make_policy: MakePolicy,
    make_samples: MakeSamples,
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Servers get the rounded weights without a cast; a converted checkpoint has the others."""
    policy = make_policy(dtype="bfloat16", learning_rate=1e-5)
    update(policy, make_samples(4))
    exports = Exports(policy.model)
    assert {spec.dtype for spec in exports.specs} == {torch.bfloat16}
    names = [spec.name for spec in exports.specs]
    published = {n: t.clone() for n, t in zip(names, exports.gather(names), strict=True)}
    save_checkpoint(policy, tmp_path / "saved", step=1, mark=MARK, keep=1)
    to_huggingface(tmp_path / "saved" / "step_1", tmp_path / "hf", config=tiny_folder())
    from safetensors.torch import load_file

    converted = load_file(tmp_path / "hf" / "model.safetensors")
    assert converted.keys() == published.keys()
    assert all(torch.equal(published[n], t.to(torch.bfloat16)) for n, t in converted.items())
    assert any(not torch.equal(published[n].float(), t.float()) for n, t in converted.items())
