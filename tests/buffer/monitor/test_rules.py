"""Each alarm on made up numbers: it comes when it should, and not from noise."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outloop.buffer.monitor.rules import RULES, Seen
from outloop.buffer.settings.telemetry import AlarmSettings

Row = dict[str, Any]


def seen(rows: list[Row], **fields: Any) -> Seen:
    """What a monitor knows after these rows."""
    fields.setdefault("settings", AlarmSettings())
    made = Seen(max_replaced_share=0.02, **fields)
    for step, row in enumerate(rows, start=1):
        made.add({"step": step, **row})
    return made


def on(made: Seen) -> set[str]:
    """The alarms that are on."""
    return {name for name, rule in RULES.items() if rule(made) is not None}


def column(name: str, values: list[float]) -> list[Row]:
    """Rows of steps with one metric."""
    return [{"train/loss": 0.0, name: value} for value in values]


def gaps(values: list[float]) -> list[Row]:
    """Rows with a logprob gap of the trainer's version."""
    return column("train/logprob_gap_mean", values)


def rewards(*levels: float, noise: float = 0.05, seed: int = 0) -> list[Row]:
    """Thirty steps at each level."""
    generator = np.random.default_rng(seed)
    means = np.repeat(levels, 30) + noise * generator.standard_normal(30 * len(levels))
    return column("train/reward_mean", means.tolist())


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        (
            "reward_collapse",
            lambda: seen(rewards(0.2, 0.6, 0.9, 0.3)),
            lambda: seen(rewards(0.2, 0.6, 0.9, 0.8)),
        ),
        (
            "gap_rising",
            lambda: seen(gaps([0.005] * 20 + [0.06] * 20), dtype="bfloat16"),
            lambda: seen(gaps([0.005] * 20 + [0.04] * 20), dtype="bfloat16"),
        ),
        (
            "gap_rising",
            lambda: seen(gaps([2e-7] * 20 + [3e-6] * 20)),
            lambda: seen(gaps([2e-7] * 20 + [9e-7] * 20)),
        ),
        (
            "gap_rising",
            lambda: seen(column("train/logprob_gap_age_1", [0.005] * 20 + [0.06] * 20)),
            lambda: seen(column("train/logprob_gap_age_1", [1e-7] * 20 + [0.01] * 20)),
        ),
        (
            "gap_high",
            lambda: seen(gaps([0.11]), dtype="bfloat16"),
            lambda: seen(gaps([0.34, 0.01]), dtype="bfloat16"),
        ),
        ("gap_high", lambda: seen(gaps([2e-5])), lambda: seen(gaps([9e-6]))),
        (
            "wrong_weights",
            lambda: seen(column("publish/wrong_in_a_row", [0.0, 1.0, 1.0, 2.0, 2.0, 3.0])),
            lambda: seen(column("publish/wrong_in_a_row", [3.0, 3.0, 0.0, 1.0, 2.0])),
        ),
        (
            "throughput_halved",
            lambda: seen(column("train/tokens_per_s", [900.0] * 30 + [400.0] * 10)),
            lambda: seen(column("train/tokens_per_s", [900.0] * 30 + [500.0] * 10)),
        ),
        (
            "all_stale",
            lambda: seen(
                [],
                stats={"buffer/dropped/stale": 30.0, "buffer/trained_groups": 11.0},
                old_stats={"buffer/dropped/stale": 10.0, "buffer/trained_groups": 10.0},
            ),
            lambda: seen(
                [],
                stats={"buffer/dropped/stale": 30.0, "buffer/trained_groups": 40.0},
                old_stats={"buffer/dropped/stale": 10.0, "buffer/trained_groups": 10.0},
            ),
        ),
        ("disk_low", lambda: seen([], free_bytes=1e9), lambda: seen([], free_bytes=1e10)),
        (
            "many_replaced",
            lambda: seen([], stats={"buffer/replaced_share": 0.015, "buffer/train_attempts": 99.0}),
            lambda: seen([], stats={"buffer/replaced_share": 0.5, "buffer/train_attempts": 3.0}),
        ),
        ("silence", lambda: seen([], silent_s=4000.0), lambda: seen([], silent_s=60.0)),
    ],
)
def test_an_alarm_comes_when_it_should(
    name: str, bad: Callable[[], Seen], good: Callable[[], Seen]
) -> None:
    """It is on in the bad case, alone, and off in the good one."""
    assert on(bad()) == {name}
    assert on(good()) == set()


@pytest.mark.medium
@given(seed=st.integers(0, 2**31), level=st.floats(0.0, 1.0), noise=st.floats(0.001, 0.3))
def test_noise_around_one_level_is_no_collapse(seed: int, level: float, noise: float) -> None:
    """A reward that does not move at all raises nothing, whatever its noise."""
    assert "reward_collapse" not in on(seen(rewards(level, level, noise=noise, seed=seed)))


def test_a_step_made_again_replaces_what_came_after_it() -> None:
    """After a resume from an older checkpoint the abandoned steps count no more."""
    made = seen(rewards(0.2, 0.9, 0.1))
    assert on(made) == {"reward_collapse"}
    for step in range(60, 70):
        made.add({"step": step, "train/reward_mean": 0.9})
    assert len(made.rows) == 69
    assert on(made) == set()


def test_a_row_of_an_evaluation_is_not_a_step() -> None:
    """It has no numbers of training."""
    made = seen([{"eval/sampled_reward": 0.3}])
    assert made.rows == []


def test_a_slow_drift_is_seen_before_it_is_a_jump() -> None:
    """Servers that drift a little with every version: in float32 within a few steps of the first
    ten times, in bfloat16 below every level, by the trend."""
    steps = np.arange(100)
    drift = gaps((1.7e-7 + 1.7e-5 * steps).tolist())
    first = next(n for n in range(1, 101) if on(seen(drift[:n])))
    assert first == 2
    generator = np.random.default_rng(0)
    noisy = 0.012 * np.exp(0.02 * steps + 0.15 * generator.standard_normal(100))
    slow = gaps(noisy[:60].tolist())
    assert noisy[:60].max() < 0.1
    made = seen(slow, dtype="bfloat16")
    assert on(made) == {"gap_rising"}
    assert "grows steadily" in (RULES["gap_rising"](made) or "")


@given(
    seed=st.integers(0, 2**31),
    level=st.floats(1e-8, 9e-7),
    noise=st.floats(0.001, 0.3),
    scale=st.sampled_from([1.0, 1e4]),
)
def test_noise_around_one_gap_is_no_rise(
    seed: int, level: float, noise: float, scale: float
) -> None:
    """Whatever its level below the limits, and however much of it there is."""
    values = level * np.exp(noise * np.random.default_rng(seed).standard_normal(80))
    made = seen(gaps((scale * values).tolist()), dtype="float32" if scale == 1.0 else "bfloat16")
    assert on(made) == set()


def test_limits_that_are_set_hold_whatever_the_dtype() -> None:
    """Servers with quantized weights, for example."""
    settings = AlarmSettings(min_gap=0.5, max_gap=0.7)
    for dtype in ("float32", "bfloat16"):
        wide = gaps([0.05] * 20 + [0.6] * 20)
        assert on(seen(wide, settings=settings, dtype=dtype)) == {"gap_rising"}
        assert on(seen(gaps([0.69]), settings=settings, dtype=dtype)) == set()
        assert on(seen(gaps([0.71]), settings=settings, dtype=dtype)) == {"gap_high"}


@pytest.mark.parametrize(
    ("name", "at", "off"),
    [
        (
            "throughput_halved",
            lambda x: seen(column("train/tokens_per_s", [900.0] * 30 + [450.0 / x] * 10)),
            0.55,
        ),
        ("gap_high", lambda x: seen(gaps([1e-5 * x])), 0.55),
        ("gap_rising", lambda x: seen(gaps([5e-7] * 20 + [5e-6 * x] * 20)), 0.55),
        (
            "reward_collapse",
            lambda x: seen(rewards(0.0, 1.0, 1.0 - 0.5 * x, noise=1e-3)),
            0.5,
        ),
        ("disk_low", lambda x: seen([], free_bytes=2e9 / x), 0.55),
        (
            "many_replaced",
            lambda x: seen(
                [], stats={"buffer/replaced_share": 0.01 * x, "buffer/train_attempts": 99.0}
            ),
            0.55,
        ),
        (
            "all_stale",
            lambda x: seen(
                [],
                stats={"buffer/dropped/stale": 90.0 * x, "buffer/trained_groups": 100 - 90.0 * x},
                old_stats={"buffer/dropped/stale": 0.0, "buffer/trained_groups": 0.0},
            ),
            0.55,
        ),
        ("silence", lambda x: seen([], silent_s=3600.0 * x), 0.55),
    ],
)
def test_an_alarm_near_its_limit_does_not_come_and_go(
    name: str, at: Callable[[float], Seen], off: float
) -> None:
    """One that is on stays on until its number is well below the limit; one that is off stays off
    until it is above."""
    for share, was_on, is_on in (
        (1.05, False, True),
        (0.95, True, True),
        (0.95, False, False),
        (0.7, True, True),
        (off, True, False),
    ):
        made = at(share)
        made.on = {name} if was_on else set()
        assert (name in on(made)) == is_on, (share, was_on)
