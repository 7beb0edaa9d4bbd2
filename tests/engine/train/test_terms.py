"""The terms of an update through the model: ratios, KL, entropy, weights, whatever the split."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.data.microbatch import build_microbatch
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.supports import Supports
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.policy_update import rl_update
from outloop.engine.train.step.recompute_logprobs import (
    score,
    with_proximal,
)
from outloop.engine.train.step.reference_model import content_hash, load_reference
from outloop.engine.train.step.update_metrics import UpdateReport

MakePolicy = Callable[..., Policy]
MakeSamples = Callable[..., list[Sample]]
CPU = torch.device("cpu")
EVERYTHING = {
    "proximal": "recompute",
    "correction": "token_tis",
    "correction_cap": 1.2,
    "kl": "k3",
    "kl_coefficient": 0.3,
    "entropy_coefficient": 0.2,
}


def scored(policy: Policy, samples: list[Sample], trainer: TrainerSettings) -> list[Sample]:
    """The samples with what the loop gives them before the first update."""

    batch = TrainBatch.of(samples)
    column = score(policy.model, batch, max_tokens=64, on_microbatch=lambda: None)
    noise = np.random.default_rng(5)
    if trainer.kl != "none":
        offset = {s.episode_id: float(noise.normal(0, 0.4)) for s in samples}
        offsets = np.concatenate([offset[s.episode_id] * s.loss_mask for s in samples])
        batch = batch.with_columns(reference_logprobs=(column + offsets).astype(np.float32))
    if trainer.proximal == "recompute":
        batch, _ = with_proximal(batch, column, trainer, rows=range(len(batch)))
    return list(batch)


def update(
    policy: Policy, samples: list[Sample], trainer: TrainerSettings, **options: Any
) -> UpdateReport:
    """One RL update at version 0."""
    batch = TrainBatch.of(samples)
    return rl_update(
        policy, batch, trainer, policy_version=0, on_microbatch=lambda: None, **options
    )


def gradient(policy: Policy) -> torch.Tensor:
    """The gradient that the last update left, flat."""
    return torch.cat([p.main_grad.flatten() for p in policy.model.parameters()]).clone()


def is_left(sample: Sample) -> torch.Tensor:
    """[N, 400] bool: among which ids each trained token was sampled."""
    assert sample.supports is not None
    rows = []
    for place in np.flatnonzero(sample.loss_mask):
        ids = sample.supports[place : place + 1].ids
        rows.append(np.isin(np.arange(400), ids) if len(ids) else np.ones(400, np.bool_))
    return torch.from_numpy(np.stack(rows))


def cut(samples: list[Sample]) -> list[Sample]:
    """Every second sample, with some of its tokens sampled among few ids or one."""
    generator = np.random.default_rng(3)
    found = []
    for index, sample in enumerate(samples):
        counts = np.where(sample.loss_mask, generator.integers(0, 9, sample.num_tokens), 0)
        counts[::3] = 0
        ids = [
            np.concatenate([[token], generator.choice(np.delete(np.arange(400), token), n - 1)])
            for token, n in zip(sample.token_ids, counts, strict=True)
            if n
        ]
        supports = Supports.of(counts, np.concatenate([np.zeros(0), *ids]).astype(np.int32))
        assert sample.behavior_logprobs is not None
        # The model is nearly uniform, so that ratios are near 1.
        near = -np.log(np.maximum(counts, 1)) + generator.normal(0, 0.1, len(counts))
        behavior = np.where(counts > 0, near, sample.behavior_logprobs).astype(np.float32)
        changed = dataclasses.replace(sample, supports=supports, behavior_logprobs=behavior)
        found.append(changed if index % 2 else sample)
    return found


def surrogate(
    trainer: TrainerSettings,
    advantage: float,
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """The policy's term of one sequence, summed."""
    low, high = 1 - trainer.clip_low, 1 + trainer.clip_high
    if trainer.loss == "gspo":
        ratio = (logprobs - proximal).mean().exp()
        term = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        loss = (term * weight * torch.ones_like(logprobs)).sum()
    elif trainer.loss == "reinforce":
        loss = -(advantage * logprobs * weight).sum()
    elif trainer.loss == "cispo":
        ratio = (logprobs - proximal).exp().detach().clamp(low, high)
        loss = -(ratio * advantage * logprobs * weight).sum()
    else:
        ratio = (logprobs - proximal).exp() * advantage
        cut = (logprobs - proximal).exp().clamp(low, high) * advantage
        loss = -(torch.minimum(ratio, cut) * weight).sum()
    return loss


def wanted_gradient(
    policy: Policy, samples: list[Sample], trainer: TrainerSettings
) -> torch.Tensor:
    """Every term written out per sequence in float64 logprobs, by plain autograd."""
    model, total = policy.model, torch.zeros((), dtype=torch.float64)
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.episode_id] = counts.get(sample.episode_id, 0) + sample.num_trained_tokens
    for sample in samples:
        batch = build_microbatch(TrainBatch.of([sample]), [0], CPU)
        hidden = model(batch.token_ids_T, batch.row, batch.predictors_N)
        logits = model.logits(hidden).double()
        whole = table = torch.log_softmax(logits, -1)
        if sample.supports is not None:
            table = torch.log_softmax(logits.masked_fill(~is_left(sample), -torch.inf), -1)
        logprobs = table.gather(1, batch.targets.token_ids_N[:, None])[:, 0]
        mask = sample.loss_mask
        behavior = torch.tensor(sample.behavior_logprobs[mask]).double()
        proximal, weight = behavior, torch.ones(())
        if trainer.proximal == "recompute":
            proximal = logprobs.detach()
            weight = (proximal - behavior).exp().clamp(max=trainer.correction_cap)
        loss = surrogate(trainer, sample.advantage, logprobs, proximal, weight)
        drift = (behavior - logprobs.detach()).mean()
        if trainer.opsm_delta and sample.advantage < 0 and drift > trainer.opsm_delta:
            loss = loss * 0
        if trainer.kl == "k3" and not sample.is_imitated:
            distance = logprobs - torch.tensor(sample.reference_logprobs[mask]).double()
            rho = (logprobs - behavior).exp().clamp(max=trainer.kl_ratio_cap)
            kl = (rho * ((-distance).exp() + distance - 1)).sum()
            loss = loss + trainer.kl_coefficient * kl
        if sample.is_imitated:
            loss = -(sample.advantage * logprobs).sum()
        elif trainer.entropy_coefficient:
            entropy = -(whole.exp() * whole).sum()
            loss = loss - trainer.entropy_coefficient * entropy
        if trainer.denominator == "episode_means":
            loss = loss / counts[sample.episode_id]
        total = total + loss
    scale = sum(counts.values()) if trainer.denominator == "tokens" else len(counts)
    grads = torch.autograd.grad(total / scale, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads]).float()


GSPO = {"loss": "gspo", "clip_low": 0.01, "clip_high": 0.02}


@pytest.mark.medium
@pytest.mark.parametrize(
    "chosen",
    [
        GSPO,
        GSPO | {"kl": "k3", "kl_coefficient": 0.3, "entropy_coefficient": 0.2},
        {"loss": "cispo"},
        {"loss": "reinforce"},
        {"denominator": "episode_means", "kl": "k3", "kl_coefficient": 0.3},
        {"opsm_delta": 0.01, "kl": "k3", "kl_coefficient": 0.3, "entropy_coefficient": 0.2},
        {"loss": "cispo", "denominator": "episodes", **EVERYTHING},
        EVERYTHING,
        {"entropy_coefficient": 0.5},
    ],
)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_gradients_agree_with_the_formulas_however_they_are_split(
    chosen: dict[str, object],
    is_cut: bool,
    make_policy: MakePolicy,
    make_samples: MakeSamples,
) -> None:
    """Several branches an episode; one microbatch, or many with five tokens' logits at a time; the
    whole vocabulary, or with some tokens sampled among some ids."""
    trainer = TrainerSettings(max_grad_norm=1e9, **chosen)
    policy = make_policy(max_grad_norm=1e9)
    samples = make_samples(9)
    samples = scored(policy, cut(samples) if is_cut else samples, trainer)
    wanted = wanted_gradient(policy, samples, trainer)
    whole_report = update(policy, samples, trainer)
    assert wanted.abs().max() > 0
    assert (gradient(policy) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    split = make_policy(max_grad_norm=1e9)
    order = np.random.default_rng(1).permutation(len(samples))
    shuffled = [samples[index] for index in order]
    in_parts = trainer.model_copy(update={"max_microbatch_tokens": 40})
    split_report = update(split, shuffled, in_parts, max_chunk_logits=5 * 400)
    assert (gradient(split) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert split_report.loss == pytest.approx(whole_report.loss, rel=1e-4, abs=1e-6)
    assert split_report.policy_metrics() == pytest.approx(
        whole_report.policy_metrics(), rel=1e-4, abs=1e-6
    )


@pytest.mark.parametrize(
    "chosen", [EVERYTHING, GSPO, {"denominator": "episode_means", "loss": "reinforce"}]
)
def test_two_steps_of_a_mixture_follow_float64(
    chosen: dict[str, object],
    make_policy: MakePolicy,
    make_samples: MakeSamples,
) -> None:
    """Some episodes by policy gradient, some by cross-entropy with the weight of their source, far
    from what sampled them: gradients and, by Adam's own formula, the weights after each step."""
    trainer = TrainerSettings(max_grad_norm=1e9, learning_rate=1e-3, **chosen)
    policy = make_policy(max_grad_norm=1e9, learning_rate=1e-3)
    weights = torch.cat([p.detach().flatten() for p in policy.model.parameters()]).double()
    first = second = torch.zeros_like(weights)
    for step in (1, 2):
        samples = [
            dataclasses.replace(
                sample,
                is_imitated=True,
                advantages=np.full(sample.num_tokens, 0.5, np.float32),
                behavior_logprobs=(sample.behavior_logprobs + 5.0).astype(np.float32),
            )
            if index % 4 < 2
            else sample
            for index, sample in enumerate(make_samples(9, seed=step))
        ]
        samples = scored(policy, samples, trainer)
        wanted = wanted_gradient(policy, samples, trainer)
        report = update(policy, samples, trainer)
        assert (gradient(policy) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
        tokens = [sample.num_trained_tokens * sample.is_imitated for sample in samples]
        metrics = report.policy_metrics()
        num_trained = sum(sample.num_trained_tokens for sample in samples)
        assert metrics["train/imitated_share"] == pytest.approx(sum(tokens) / num_trained)
        assert metrics["train/imitated_nll"] == pytest.approx(np.log(400), abs=0.5)
        assert metrics["train/ratio_p01"] > 0.1, "tokens that are imitated have no ratio"
        exact = gradient(policy).double()
        first = 0.9 * first + 0.1 * exact
        second = 0.999 * second + 0.001 * exact**2
        moved = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        weights = weights - 1e-3 * moved
        found = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
        assert (found - weights).abs().max() <= 1e-5


@pytest.mark.medium
def test_before_the_first_update_the_proximal_ratio_is_one(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Scored and trained by one code path: no token's ratio leaves 1 (6.1 rule 12)."""
    policy = make_policy()
    trainer = TrainerSettings(proximal="recompute", max_microbatch_tokens=64)
    samples = scored(policy, make_samples(9, temperature=0.7), trainer)
    metrics = update(policy, samples, trainer).policy_metrics()
    assert metrics["train/proximal_ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["train/proximal_ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["train/clip_share"] == 0.0
    assert metrics["train/ratio_p01"] < 1.0 < metrics["train/ratio_p99"]
    again = update(policy, samples, trainer).policy_metrics()
    assert again["train/proximal_ratio_max"] > 1.0 + 1e-4


def test_a_masked_token_stays_in_the_denominator(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """A vetoed sample adds nothing to the gradient and keeps its tokens in the divisor (rule 7)."""
    first, second = (
        dataclasses.replace(s, advantages=np.ones_like(s.advantages), episode_id=str(i))
        for i, s in enumerate(make_samples(2))
    )
    vetoed = dataclasses.replace(second, correction=np.zeros(second.num_tokens, np.float32))
    # Neither its KL nor its entropy pulls: a masked token is no sample of the policy.
    kept = dataclasses.replace(first, correction=np.ones(first.num_tokens, np.float32))
    trainer = TrainerSettings(
        max_grad_norm=1e9, entropy_coefficient=0.3, kl="k3", kl_coefficient=0.5
    )
    first, second, kept, vetoed = (
        dataclasses.replace(s, reference_logprobs=s.behavior_logprobs - 0.5)
        for s in (first, second, kept, vetoed)
    )
    both, alone = make_policy(max_grad_norm=1e9), make_policy(max_grad_norm=1e9)
    update(both, [kept, vetoed], trainer)
    update(alone, [first], trainer)
    share = first.num_trained_tokens / (first.num_trained_tokens + second.num_trained_tokens)
    wanted = gradient(alone) * share
    assert (gradient(both) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.medium
def test_a_sample_without_trained_tokens_changes_nothing(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Fully masked rows are computed and ignored, alone in a microbatch too."""
    samples = make_samples(4)
    empty = dataclasses.replace(samples[0], loss_mask=np.zeros(samples[0].num_tokens, np.bool_))
    for chosen in ({}, GSPO):
        trainer = TrainerSettings(max_microbatch_tokens=40, **chosen)
        with_it, without = make_policy(), make_policy()
        update(with_it, [*samples[1:], empty], trainer)
        update(without, samples[1:], trainer)
        difference = (gradient(with_it) - gradient(without)).abs().max()
        assert difference <= 1e-5 * gradient(without).abs().max()


@pytest.mark.medium
def test_the_reference_is_the_model_folder_and_stays_as_it_is(
    make_policy: MakePolicy,
    make_samples: MakeSamples,
    tiny_folder: Callable[..., Path],
) -> None:
    """It scores as the policy did at the start, whatever the policy has become."""
    policy, samples = make_policy(learning_rate=1e-2), make_samples(5)
    before = torch.get_rng_state()
    reference = load_reference(policy.config, tiny_folder(), pinned_hash="", device=CPU)
    assert torch.equal(torch.get_rng_state(), before)

    def by(model: object) -> np.ndarray:
        batch = TrainBatch.of(samples)
        return score(model, batch, max_tokens=64, on_microbatch=lambda: None)

    start = by(policy.model)
    assert (by(reference.model) == start).all()
    update(policy, samples, TrainerSettings())
    assert (by(reference.model) == start).all()
    assert (by(policy.model) != start).any()
    assert not any(p.requires_grad for p in reference.model.parameters())


def test_another_reference_is_refused(
    make_policy: MakePolicy, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """One changed byte of the folder's weights is another content hash."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)
    assert content_hash(folder) == content_hash(tiny_folder())
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(SettingsError, match="pinned to the reference model"):
        load_reference(
            make_policy().config,
            folder,
            pinned_hash=content_hash(tiny_folder()),
            device=CPU,
        )
