"""What `make bench-async` counts: the waits that all levels share, and the figures it writes."""

import importlib.util
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCH, CALCULATOR = ROOT / "tests" / "bench", ROOT / "examples" / "calculator"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tests/bench/asynchrony.py; what it imports from its folder and the example is forgotten."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(BENCH), str(CALCULATOR), *sys.path])
    spec = importlib.util.spec_from_file_location("asynchrony", BENCH / "asynchrony.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "asynchrony", module)
    spec.loader.exec_module(module)
    yield module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(
            (str(BENCH), str(CALCULATOR))
        ):
            del sys.modules[name]


def result(bench: ModuleType, level: str, step_s: float, *, seed: int = 0, reward: float = 0.8):
    """A made-up run."""
    return bench.Result(
        level=level,
        seed=seed,
        step_s=step_s,
        wait_share=0.5,
        evaluation_share=0.1,
        update_s=0.2,
        publish_s=0.1,
        transfer_s=0.1,
        pause_s=0.02,
        publish_wait_share=0.05,
        overhead_s=0.3,
        staleness_mean=1.0,
        staleness_max=1.0,
        slow_share_ratio=0.99,
        discarded_time_share=0.01,
        gap_by_age={"age_0": 1e-4, "age_1": 1e-2},
        eval_steps=[0, 6],
        eval_seconds=[0.0, 6 * step_s],
        eval_rewards=[0.3, reward],
        eval_errors=[0.03, 0.02],
        bare_step_s=0.9 * step_s,
    )


def test_waits_are_the_tail_that_is_promised(bench: ModuleType) -> None:
    """40% short, 50% medium, 10% long up to 200 times the median; a function of its arguments."""
    import waiting_calculator as agent

    waits = [agent.wait_s(f"{i}*7", attempt) for i in range(2000) for attempt in range(4)]
    assert waits[0] == agent.wait_s("0*7", 0)
    median = statistics.median(waits)
    assert max(waits) == pytest.approx(200 * median, rel=0.1)
    assert sum(wait <= 0.02 for wait in waits) / len(waits) == pytest.approx(0.4, abs=0.02)
    assert sum(wait >= 1.0 for wait in waits) / len(waits) == pytest.approx(0.1, abs=0.01)


def test_the_bare_loop_is_given_what_the_agents_wait(bench: ModuleType) -> None:
    """The first slots' waits by the rollout function, and by ranks."""
    import waiting_calculator as agent

    table = bench.waits("heavy")
    for slot in range(3):
        question = bench.questions()[bench.task_index(slot, len(bench.questions()), 5)]
        waited = [
            bench.SCALE * agent.wait_s(question, attempt) for attempt in range(bench.GROUP_SIZE)
        ]
        index = (bench.ranks(5, slot) * len(table.values)).astype(int)
        assert list(table.values[index]) == pytest.approx(waited)


def test_a_longer_age_is_faster_in_the_bare_loop(bench: ModuleType) -> None:
    """The levels in the order of their speed, an update of 0.2 s."""
    seconds = {
        level.name: bench.bare_step_s(level, 0, 0.2)
        for level in bench.LEVELS
        if level.tail == "heavy"
    }
    assert seconds["heavy/sync"] > 1.25 * seconds["heavy/partial"]
    assert seconds["heavy/sync"] > 1.5 * seconds["heavy/k1"]
    assert seconds["heavy/k1"] > seconds["heavy/k4"] > 0.2


def test_the_bare_loop_of_equal_waits_is_solved_by_hand(bench: ModuleType) -> None:
    """Waits of 5 s and updates of 1 s: 6 s a step, 3 s with one batch in advance, 5 + 1 over 3."""

    def step_s(max_age: int) -> float:
        return bench.seconds_per_step(
            lambda slot: 5.0, update_s=1.0, groups_per_step=2, max_age=max_age, num_steps=61
        )

    assert step_s(0) == pytest.approx(6.0)
    assert step_s(1) == pytest.approx(3.0, rel=0.05)
    assert step_s(2) == pytest.approx(2.0, rel=0.05)


def test_figures_are_ratios_of_the_runs(bench: ModuleType) -> None:
    """Level 1 twice as fast as synchronous, level 4 four times; a difference of rewards of 0.05."""
    results = [
        result(bench, "heavy/sync", 8.0),
        result(bench, "heavy/partial", 5.0),
        result(bench, "heavy/k1", 4.0, reward=0.85),
        replace(result(bench, "heavy/k4", 2.0), slow_share_ratio=0.7, wait_share=0.4),
        replace(result(bench, "trainer/beside", 2.0), wait_share=0.2),
    ]
    figures = bench.figures_of(results)
    assert figures["level1_vs_sync"] == pytest.approx(2.0)
    assert figures["best_vs_sync"] == pytest.approx(4.0)
    assert figures["partial_vs_plain"] == pytest.approx(1.6)
    assert figures["best_vs_bare"] == pytest.approx(0.9)
    assert figures["reward_gap"] == pytest.approx(0.05)
    # 2.8 standard errors of the difference of two means.
    assert figures["reward_detectable"] == pytest.approx(2.8 * 0.02 * 2**0.5)
    assert figures["slow_share_ratio"] == 0.7
    assert figures["discarded_time_share"] == pytest.approx(0.01)
    assert figures["best_trainer_wait_share"] == 0.4
    assert figures["trainer_wait_share"] == 0.2


def test_several_seeds_are_compared_by_their_spread(bench: ModuleType) -> None:
    """Two pairs that differ by 0 and 0.1, whatever the seeds do: a standard error of 0.05."""
    results = [
        result(bench, level, 2.0, seed=seed, reward=0.5 + gain * seed)
        for level, gain in (("heavy/sync", 0.3), ("heavy/k1", 0.4))
        for seed in (0, 1)
    ]
    figures = bench.figures_of(results)
    assert figures["reward_gap"] == pytest.approx(0.05)
    assert figures["reward_detectable"] == pytest.approx(2.8 * 0.05)


@pytest.mark.medium
def test_the_plot_shows_what_was_run(bench: ModuleType, tmp_path: Path) -> None:
    """Two levels of nine."""
    from asynchrony_plots import draw

    draw([result(bench, "heavy/sync", 8.0), result(bench, "heavy/k1", 4.0)], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
