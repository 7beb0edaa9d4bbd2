"""Off-policy weights against references written token by token."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outloop.engine.train.algorithms.importance_weights import correct, correction_metrics

KINDS = [
    "none",
    "token_tis",
    "sequence_tis",
    "geometric_tis",
    "token_mis",
    "sequence_mis",
    "geometric_mis",
]
CAP, FLOOR = 1.5, 0.6


def reference(ratios: list[float], kind: str, veto: float) -> list[float]:
    """Each token's weight from the ratios of its sequence."""
    if veto > 0 and min(ratios, default=1.0) < veto:
        return [0.0] * len(ratios)
    if kind == "none":
        return [1.0] * len(ratios)
    if kind.startswith("sequence"):
        ratios = [math.prod(ratios)] * len(ratios)
    if kind.startswith("geometric"):
        ratios = [math.prod(ratios) ** (1 / max(1, len(ratios)))] * len(ratios)
    if kind.endswith("tis"):
        return [min(ratio, CAP) for ratio in ratios]
    return [ratio if FLOOR <= ratio <= CAP else 0.0 for ratio in ratios]


@given(
    gaps=st.lists(st.floats(-3, 3), min_size=0, max_size=8),
    kind=st.sampled_from(KINDS),
    veto=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_weights_agree_with_their_definition(gaps: list[float], kind: str, veto: float) -> None:
    """Sequences of any length, empty too."""
    behavior = np.full(len(gaps), -2.0)
    got = correct(behavior + gaps, behavior, kind=kind, cap=CAP, floor=FLOOR, veto=veto)
    ratios = [math.exp((-2.0 + gap) - -2.0) for gap in gaps]
    assert np.allclose(got.weights, reference(ratios, kind, veto), rtol=1e-6)
    assert got.is_vetoed == (veto > 0 and min(ratios, default=1.0) < veto)


def test_on_policy_every_weight_is_one() -> None:
    """Whatever the kind, equal logprobs correct nothing."""
    logprobs = np.array([-1.0, -3.0, -0.1])
    for kind in KINDS:
        got = correct(logprobs, logprobs, kind=kind, cap=2.0, floor=0.5, veto=0.1)
        assert (got.weights == 1.0).all()


def test_a_long_sequence_stays_finite() -> None:
    """Ten thousand tokens that all grew likelier give the cap, not infinity."""
    behavior = np.full(10_000, -2.0)
    got = correct(behavior + 1.0, behavior, kind="sequence_tis", cap=2.0, floor=0.0, veto=0.0)
    assert (got.weights == 2.0).all()
    assert np.isfinite(got.ratios).all()
    masked = correct(behavior + 1.0, behavior, kind="sequence_mis", cap=2.0, floor=0.0, veto=0.0)
    assert (masked.weights == 0.0).all()


def test_what_was_cut_masked_and_vetoed_is_reported() -> None:
    """Shares go over tokens, the veto over sequences."""
    behavior = np.full(4, -2.0)
    log_ratios = [np.log([0.5, 1.0, 3.0, 4.0]), np.log([0.001, 1.0, 1.0, 1.0])]
    tis, vetoed = (
        correct(behavior + x, behavior, kind="token_tis", cap=2.0, floor=0.0, veto=0.01)
        for x in log_ratios
    )
    metrics = correction_metrics([tis, vetoed])
    assert metrics["train/correction_truncated_share"] == pytest.approx(2 / 8)
    assert metrics["train/correction_masked_share"] == pytest.approx(4 / 8)
    assert metrics["train/correction_vetoed_share"] == pytest.approx(1 / 2)
    assert metrics["train/correction_ratio_max"] == pytest.approx(4.0)
    assert correction_metrics([]) == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_no_gap_overflows_a_weight(kind: str, gap: float) -> None:
    """Whatever the servers recorded: every log-ratio is cut to +-20 before it is exponentiated."""
    behavior = np.full(3, -2.0)
    got = correct(behavior + gap, behavior, kind=kind, cap=1e12, floor=0.0, veto=0.0)
    assert (got.weights <= math.exp(20) * (1 + 1e-9)).all()
    assert (got.ratios >= math.exp(-20) * (1 - 1e-9)).all()


def test_why_tokens_were_masked_is_reported_by_their_age() -> None:
    """Below the floor, above the cap, or with a vetoed sequence: each token has one reason."""
    gaps = np.log([0.2, 1.0, 1.5, 4.0])
    ages = np.array([0, 0, 1, 1])
    mis = correct(gaps, np.zeros(4), kind="token_mis", cap=2.0, floor=0.5, veto=0.0, ages=ages)
    vetoed = correct(
        gaps, np.zeros(4), kind="token_mis", cap=2.0, floor=0.5, veto=0.3, ages=ages + 9
    )
    metrics = correction_metrics([mis, vetoed])
    shares = {why: metrics[f"train/masked_{why}_share"] for why in ("low", "high", "veto")}
    assert shares == {"low": 1 / 8, "high": 1 / 8, "veto": 4 / 8}
    assert sum(shares.values()) == metrics["train/correction_masked_share"]
    assert metrics["train/masked_low_share_age_0"] == 0.5
    assert metrics["train/masked_high_share_age_0"] == 0.0
    assert metrics["train/masked_high_share_age_1"] == 0.5
    assert metrics["train/masked_veto_share_age_9_up"] == 1.0
    assert metrics["train/masked_low_share_age_9_up"] == 0.0
    assert "train/masked_low_share_age_2" not in metrics
    # Weights 0, 1, 1.5, 0 and four zeros: (2.5)^2 / (8 * 3.25).
    assert metrics["train/correction_effective_share"] == pytest.approx(6.25 / 26.0)


@pytest.mark.parametrize("length", [1, 10, 10_000])
def test_a_geometric_mean_does_not_depend_on_length(length: int) -> None:
    """The same gap at every token: weight exp(gap), kept by the mask, however long the answer.

    The product of the same ratios leaves the mask's range as the answer grows.
    """
    behavior = np.full(length, -2.0)
    limits = {"cap": 1.02, "floor": 0.99, "veto": 0.0}
    for kind in ("geometric_tis", "geometric_mis"):
        got = correct(behavior + 0.01, behavior, kind=kind, **limits)
        assert got.weights == pytest.approx(np.full(length, math.exp(0.01)))
        assert len(got.ratios) == 1
    by_product = correct(behavior + 0.01, behavior, kind="sequence_mis", **limits)
    assert bool(by_product.weights.all()) == (length == 1)
