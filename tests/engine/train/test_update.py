"""One update: what the gradient depends on, and what it does not."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outloop.buffer.settings import TrainerSettings
from outloop.engine.train.data.microbatch import build_microbatch
from outloop.engine.train.data.packing import deal
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import Policy
from outloop.engine.train.step.policy_update import UpdateReport, rl_update, sft_update
from outloop.engine.train.step.update_metrics import policy_logprobs

MakePolicy = Callable[..., Policy]
MakeSamples = Callable[..., list[Sample]]


def gradient_of(policy: Policy, samples: list[Sample], **settings: object) -> torch.Tensor:
    """The gradient of one RL update, flat, before clipping."""
    trainer = TrainerSettings(max_grad_norm=1e9, **settings)
    update(policy, samples, trainer)
    grads = [p.main_grad.flatten() for p in policy.model.parameters()]
    return torch.cat(grads).clone()


def update(
    policy: Policy, samples: list[Sample], settings: TrainerSettings, policy_version: int = 0
) -> UpdateReport:
    """One RL update."""
    return rl_update(
        policy,
        TrainBatch.of(samples),
        settings,
        policy_version=policy_version,
        on_microbatch=lambda: None,
    )


DENOMINATORS = {
    "tokens": {},
    "episodes": {},
    "episode_means": {},
    "budget": {"token_budget": 50},
    "constant": {"denominator_constant": 7.0},
}


ONE_DENOMINATOR = {"denominator": "constant", "denominator_constant": 7.0}


@pytest.mark.medium
@pytest.mark.parametrize("kind", DENOMINATORS)
def test_splitting_and_permuting_leave_the_gradient_unchanged(
    kind: str, make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """One microbatch, many, and any order of the same samples: one gradient."""
    samples = make_samples(13)
    settings = {"denominator": kind, **DENOMINATORS[kind]}
    whole = gradient_of(make_policy(max_grad_norm=1e9), samples, **settings)
    split = gradient_of(
        make_policy(max_grad_norm=1e9), samples, max_microbatch_tokens=40, **settings
    )
    order = np.random.default_rng(1).permutation(len(samples))
    shuffled = [samples[index] for index in order]
    permuted = gradient_of(
        make_policy(max_grad_norm=1e9), shuffled, max_microbatch_tokens=64, **settings
    )
    scale = whole.abs().max()
    assert scale > 0
    assert (whole - split).abs().max() <= 1e-5 * scale
    assert (whole - permuted).abs().max() <= 1e-5 * scale


@pytest.mark.medium
@given(num_ranks=st.integers(1, 5), budget=st.sampled_from([40, 64, 200]), seed=st.integers(0, 99))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_dealing_over_ranks_leaves_the_gradient_unchanged(
    num_ranks: int,
    budget: int,
    seed: int,
    make_policy: MakePolicy,
    make_samples: MakeSamples,
    whole_gradient: torch.Tensor,
) -> None:
    """The sum of the ranks' gradients is the gradient of one microbatch, in any order.

    One process does the work of every rank: that ranks add up is what test_parity holds.
    """
    samples = make_samples(13)
    order = np.random.default_rng(seed).permutation(len(samples))
    shuffled = [samples[index] for index in order]
    ranks = deal(
        [len(sample.token_ids) for sample in shuffled],
        max_tokens=budget,
        num_ranks=num_ranks,
        hidden_size=64,
    )
    assert len(ranks) == num_ranks
    dealt = torch.zeros_like(whole_gradient)
    for microbatches in ranks:
        rows = list(chain.from_iterable(microbatches))
        dealt += gradient_of(
            make_policy(max_grad_norm=1e9),
            [shuffled[row] for row in rows],
            max_microbatch_tokens=budget,
            **ONE_DENOMINATOR,
        )
    assert (whole_gradient - dealt).abs().max() <= 1e-5 * whole_gradient.abs().max()


@pytest.fixture(scope="module")
def gradients() -> dict[str, torch.Tensor]:
    """What `whole_gradient` found, for all examples."""
    return {}


@pytest.fixture
def whole_gradient(
    gradients: dict[str, torch.Tensor], make_policy: MakePolicy, make_samples: MakeSamples
) -> torch.Tensor:
    """The gradient of thirteen samples in one microbatch."""
    if not gradients:
        gradients["whole"] = gradient_of(
            make_policy(max_grad_norm=1e9), make_samples(13), **ONE_DENOMINATOR
        )
    return gradients["whole"]


@pytest.mark.medium
def test_the_gradient_is_the_sum_over_the_denominator(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Against plain autograd on unpacked samples, for each denominator (6.1 rule 7)."""
    samples = make_samples(6)
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    policy = make_policy(max_grad_norm=1e9)
    model = policy.model
    total = torch.zeros(())
    for batch in (
        build_microbatch(TrainBatch.of([sample]), [0], torch.device("cpu")) for sample in samples
    ):
        logits = model.logits(model(batch.token_ids_T, batch.row, batch.predictors_N)).double()
        logprobs = torch.log_softmax(logits, -1).gather(1, batch.targets.token_ids_N[:, None])[:, 0]
        assert batch.targets.behavior_logprobs_N is not None
        ratio = (logprobs - batch.targets.behavior_logprobs_N).exp()
        advantage = batch.targets.advantages_N
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
    wanted = torch.autograd.grad(total, list(model.parameters()))
    flat = torch.cat([grad.flatten() for grad in wanted]).float()
    scales = {"tokens": num_tokens, "episodes": 3, "budget": 3 * 50, "constant": 7.0}
    for kind, scale in scales.items():
        fresh = make_policy(max_grad_norm=1e9)
        got = gradient_of(fresh, samples, denominator=kind, **DENOMINATORS[kind])
        assert (got - flat / scale).abs().max() <= 1e-5 * (flat / scale).abs().max()


def test_logits_are_scaled_by_the_recorded_temperature(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """At T = 0.5 the ratio compares log_softmax(2 * logits) with the recorded logprobs."""
    policy = make_policy()
    samples = make_samples(5, temperature=0.5)
    batch = build_microbatch(TrainBatch.of(samples), range(5), torch.device("cpu"))
    with torch.no_grad():
        logits = policy.model.logits(policy.model(batch.token_ids_T, batch.row, batch.predictors_N))
    logprobs = torch.log_softmax(2 * logits, -1).gather(1, batch.targets.token_ids_N[:, None])[:, 0]
    assert batch.targets.behavior_logprobs_N is not None
    want = (logprobs - batch.targets.behavior_logprobs_N).exp().mean()
    report = update(policy, samples, TrainerSettings())
    assert report.policy_metrics()["train/ratio_mean"] == pytest.approx(float(want), rel=1e-5)


def test_on_policy_the_first_ratio_is_one(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """With the policy's own logprobs the gap is rounding and the ratio 1 (6.1 rule 12)."""
    policy = make_policy()
    samples = [with_own_logprobs(policy, sample) for sample in make_samples(7)]
    metrics = update(policy, samples, TrainerSettings()).policy_metrics()
    assert metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/logprob_gap_max"] < 1e-5
    assert metrics["train/clip_share"] == 0.0


def test_the_logprob_gap_is_measured_by_age(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Also where no token is of the current version; each token counts under its own age."""
    policy = make_policy()
    samples = [with_own_logprobs(policy, sample) for sample in make_samples(3)]
    old = [_aged(samples[0], 3, 0.25), _aged(samples[1], 0, 0.5), _aged(samples[2], -5, 0.75)]
    metrics = update(policy, old, TrainerSettings(), policy_version=4).policy_metrics()
    assert metrics["train/logprob_gap_age_1"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["train/logprob_gap_age_3_4"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["train/logprob_gap_age_9_up"] == pytest.approx(0.75, abs=1e-5)
    assert "train/logprob_gap_age_0" not in metrics
    assert np.isnan(metrics["train/logprob_gap_mean"])


def test_the_mismatch_is_measured_by_age(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Ratio, effective sample size, what was clipped and what was masked, against float64."""
    policy = make_policy()
    samples = [with_own_logprobs(policy, sample) for sample in make_samples(3)]
    aged = [_aged(samples[0], 3, 0.5), _aged(samples[1], 4, 0.0), _aged(samples[2], 0, -0.1)]
    rows = [
        replace(row, correction=np.full(row.num_tokens, index != 2, np.float32))
        for index, row in enumerate(aged)
    ]
    for row in rows:
        row.advantages[:] = -1.0
    metrics = update(policy, rows, TrainerSettings(), policy_version=4).policy_metrics()
    weights = np.repeat(np.exp([-0.5, 0.0, 0.1]), [row.num_trained_tokens for row in rows])
    wanted = weights.sum() ** 2 / (len(weights) * np.square(weights).sum())
    assert metrics["train/effective_share"] == pytest.approx(wanted, abs=1e-5)
    for name, ratio, clipped, masked in (
        ("age_1", math.exp(-0.5), 1.0, 0.0),
        ("age_0", 1.0, 0.0, 0.0),
        ("age_3_4", math.exp(0.1), 0.0, 1.0),
    ):
        assert metrics[f"train/ratio_p99_{name}"] == pytest.approx(ratio, abs=1e-4)
        assert metrics[f"train/effective_share_{name}"] == pytest.approx(1.0, abs=1e-6)
        assert metrics[f"train/clip_share_{name}"] == clipped
        assert metrics[f"train/masked_share_{name}"] == masked


def _aged(sample: Sample, version: int, gap: float) -> Sample:
    """As if `version` had sampled it, with logprobs higher by `gap`."""
    return replace(
        sample,
        policy_versions=np.where(sample.loss_mask, version, -1).astype(np.int32),
        behavior_logprobs=np.where(sample.loss_mask, sample.behavior_logprobs + gap, 0).astype(
            np.float32
        ),
    )


def with_own_logprobs(policy: Policy, sample: Sample) -> Sample:
    """The sample as if `policy` had sampled it."""
    batch = build_microbatch(TrainBatch.of([sample]), [0], torch.device("cpu"))
    with torch.no_grad():
        logits = policy.model.logits(policy.model(batch.token_ids_T, batch.row, batch.predictors_N))
    own = torch.log_softmax(logits, -1).gather(1, batch.targets.token_ids_N[:, None])[:, 0]
    logprobs = np.zeros(sample.num_tokens, np.float32)
    logprobs[sample.loss_mask] = own.numpy()
    return replace(sample, behavior_logprobs=logprobs)


def test_a_context_token_has_no_gradient(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """What the mask leaves out changes neither loss nor gradient, whatever was recorded for it."""
    (sample,) = make_samples(1)
    assert sample.behavior_logprobs is not None
    noisy = sample.behavior_logprobs.copy()
    noisy[~sample.loss_mask] = -77.0
    other = replace(sample, behavior_logprobs=noisy)
    first, second = (gradient_of(make_policy(), [one]) for one in (sample, other))
    assert torch.equal(first, second)


def test_a_gradient_that_is_not_finite_stops_the_run(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """The weights stay what they were and the error says where to look."""
    policy = make_policy()
    (sample,) = make_samples(1)
    broken = replace(sample, advantages=np.full(sample.num_tokens, np.inf, np.float32))
    before = [parameter.clone() for parameter in policy.model.parameters()]
    with pytest.raises(FloatingPointError, match="grad_norm"):
        update(policy, [broken], TrainerSettings())
    after = policy.model.parameters()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.medium
def test_sft_lowers_the_loss(make_policy: MakePolicy, make_samples: MakeSamples) -> None:
    """Repeated cross-entropy updates on the same rows fit them."""
    policy = make_policy(learning_rate=1e-2, num_updates=30)
    samples = make_samples(8)
    settings = TrainerSettings(mode="sft")
    losses = [sft_update(policy, TrainBatch.of(samples), settings).loss for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


def test_the_learning_rate_follows_its_schedule(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Warm-up starts above zero; linear decay ends at the floor."""
    policy = make_policy(
        learning_rate=1e-2, warmup_steps=2, lr_decay="linear", min_lr_ratio=0.1, num_updates=6
    )
    settings = TrainerSettings()
    rates = [update(policy, make_samples(2), settings).learning_rate for _ in range(7)]
    assert rates[0] > 0
    assert max(rates) == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(1e-3)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_a_stable_learning_rate_falls_at_the_end(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Warm-up, stable, decay: linearly to the floor over the last updates."""
    policy = make_policy(
        learning_rate=1e-2,
        warmup_steps=2,
        lr_decay="wsd",
        wsd_decay_updates=4,
        min_lr_ratio=0.1,
        num_updates=10,
    )
    settings = TrainerSettings()
    rates = [update(policy, make_samples(2), settings).learning_rate for _ in range(11)]
    assert rates[:6] == pytest.approx([5e-3] + [1e-2] * 5)
    assert rates[6:10] == pytest.approx([7.75e-3, 5.5e-3, 3.25e-3, 1e-3])
    assert rates[10] == pytest.approx(1e-3)


def test_clipped_tokens_are_counted_at_the_side_where_they_were_clipped(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Below the range with a negative advantage, above it with a positive one; elsewhere nothing
    is clipped."""
    policy = make_policy()
    samples = [with_own_logprobs(policy, sample) for sample in make_samples(4)]
    rows = [
        _aged(sample, 0, gap) for sample, gap in zip(samples, (0.5, 0.5, -0.5, -0.5), strict=True)
    ]
    for row, advantage in zip(rows, (-1.0, 1.0, -1.0, 1.0), strict=True):
        row.advantages[:] = advantage
    metrics = update(policy, rows, TrainerSettings()).policy_metrics()
    counts = np.array([row.num_trained_tokens for row in rows])
    low, _, _, high = (counts / counts.sum()).tolist()
    assert metrics["train/clip_low_share"] == pytest.approx(low)
    assert metrics["train/clip_high_share"] == pytest.approx(high)
    assert metrics["train/clip_share"] == pytest.approx(low + high)


def test_kept_logprobs_are_those_of_the_update_that_trained_a_token_first() -> None:
    """A later pass over the same token, by weights that it moved itself, changes nothing."""

    def report(places: list[int], logprobs: list[float]) -> UpdateReport:
        return UpdateReport(places=[torch.tensor(places)], logprobs=[torch.tensor(logprobs)])

    reports = [report([0, 2], [-1.0, -2.0]), report([4], [-3.0]), report([2, 4], [-8.0, -9.0])]
    column = policy_logprobs(reports, 5)
    assert column.dtype == np.float32
    assert column[[0, 2, 4]].tolist() == [-1.0, -2.0, -3.0]
    assert np.isnan(column[[1, 3]]).all()
    assert np.isnan(policy_logprobs([], 2)).all()


def test_shares_of_an_update_are_of_the_tokens_that_are_compared(
    make_policy: MakePolicy, make_samples: MakeSamples
) -> None:
    """Imitated tokens have no ratio: they are in no numerator, and in no denominator either."""
    policy = make_policy()
    samples = [with_own_logprobs(policy, sample) for sample in make_samples(2)]
    rows = [_aged(samples[0], 0, 0.5), replace(samples[1], is_imitated=True)]
    for row in rows:
        row.advantages[:] = -1.0
    metrics = update(policy, rows, TrainerSettings()).policy_metrics()
    assert metrics["train/clip_low_share"] == 1.0
    assert metrics["train/ratio_mean"] == pytest.approx(math.exp(-0.5), abs=1e-4)
    counts = [row.num_trained_tokens for row in rows]
    assert metrics["train/imitated_share"] == pytest.approx(counts[1] / sum(counts))
