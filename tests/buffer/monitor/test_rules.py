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
    made = Seen(settings=AlarmSettings(), max_replaced_share=0.02, **fields)
    for step, row in enumerate(rows, start=1):
        made.add({"step": step, **row})
    return made


def on(made: Seen) -> set[str]:
    """The alarms that are on."""
    return {name for name, rule in RULES.items() if rule(made) is not None}


def column(name: str, values: list[float]) -> list[Row]:
    """Rows with one metric."""
    return [{name: value} for value in values]


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
            lambda: seen(column("train/logprob_gap_mean", [0.005] * 20 + [0.05] * 20)),
            lambda: seen(column("train/logprob_gap_mean", [1e-7] * 20 + [1e-3] * 20)),
        ),
        (
            "gap_high",
            lambda: seen(column("train/logprob_gap_mean", [0.34])),
            lambda: seen(column("train/logprob_gap_mean", [0.34, 0.01])),
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
