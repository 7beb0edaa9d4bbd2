"""What `outloop plan` reads, refuses and prints; and a run's own records in its place."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, build_settings
from outloop.buffer.store.ledger import Ledger, LedgerColumn
from outloop.cli import cli
from outloop.engine.launch.plan.inputs import (
    load_plan,
    measured_lengths,
    measured_tree,
    plan_of,
    recorded_lengths,
)
from outloop.engine.launch.plan.report import levels
from outloop.engine.launch.plan.simulate import simulate

FILE = """
num_steps = 8
[loop]
group_size = 2
groups_per_step = 2
max_staleness = 1
pipeline_depth = 1.0
[episodes]
seconds = 5.0
[trainer]
update_s = 1.0
publish_s = 0.0
"""


def written(folder: Path, text: str) -> Path:
    """A plan's file."""
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def test_a_file_says_how_fast_its_run_is(tmp_path: Path) -> None:
    """Episodes of 5 s, an update of 1 s, a batch in advance: 3 s a step, 1200 steps an hour."""
    path = written(tmp_path, FILE)
    assert simulate(load_plan(path).scenario()).steps_per_hour == pytest.approx(1200)
    shown = CliRunner().invoke(cli, ["plan", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "1,200" in shown.output
    assert "synchronous" in shown.output


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("seconds = 5.0", "", "episodes.seconds is missing: a plan is made from measurements"),
        ("update_s = 1.0", "", "trainer.update_s is missing"),
        ("pipeline_depth = 1.0", "pipeline_depth = 2.0", "loop.pipeline_depth=2 cannot be met"),
        ("max_staleness = 1", "over_provision = 0.5", "over_provision=0.5 starts fewer groups"),
        ("[trainer]", "[trainer]\nspeed = 1", "trainer.speed is no input of a plan"),
        ("seconds = 5.0", "seconds = [{share = 1.0, low = 2.0, high = 1.0}]", "low=2 and high=1"),
        ("num_steps = 8", "cluster = {gpus = [8]}", "cluster.gpus without"),
        ("group_size = 2", "group_size = 0", "loop.group_size=0"),
    ],
)
def test_a_file_that_cannot_be_planned_is_refused_in_a_sentence(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    """It names the number, and what would do."""
    with pytest.raises(SettingsError) as caught:
        load_plan(written(tmp_path, FILE.replace(old, new)))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_of_nothing_is_refused() -> None:
    """Neither a file nor a run."""
    shown = CliRunner().invoke(cli, ["plan"])
    assert isinstance(shown.exception, SettingsError)
    assert "give a file of times, or --run" in str(shown.exception)


def test_more_runners_than_the_run_had() -> None:
    """Twice the places, where places are the limit: twice as fast; only with --run."""
    shown = CliRunner().invoke(cli, ["plan", "FILE", "--runners", "2"])
    assert isinstance(shown.exception, SettingsError)
    assert "--runners=2 goes with --run" in str(shown.exception)
    settings = build_settings(
        {
            "model": {"path": "m"},
            "env": {"max_concurrent_episodes": 4},
            "buffer": {"group_size": 4, "max_staleness": 4},
            "trainer": {"groups_per_step": 8},
        },
        source="test",
    )
    tree = measured_tree(settings, rows(4), ledger(40), source="run")
    made = plan_of(tree, source="run", lengths=measured_lengths(ledger(40), source="run"))
    twice = made.with_places(8)
    assert twice.scenario().places == 8
    ratio = simulate(twice.scenario()).steps_per_hour / simulate(made.scenario()).steps_per_hour
    assert ratio == pytest.approx(2.0, abs=0.1)


def rows(number: int) -> list[dict[str, float]]:
    """Of metrics.jsonl: a first step that waited for the start, then equal ones."""
    first = {"train/step_s": 60.0, "train/wait_s": 59.0, "train/update_s": 1.0}
    step = {
        "train/step_s": 6.5,
        "train/wait_s": 5.0,
        "train/update_s": 1.0,
        "publish/pause_s": 0.2,
        "train/groups_with_signal_share": 1.0,
    }
    return [first, *[step] * number]


def ledger(number: int) -> Ledger:
    """Of attempts of 4 s on average."""
    column = LedgerColumn(
        num_attempts=number,
        duration_s=4.0 * number,
        num_tokens=10 * number,
        by_duration={3.0: number // 2, 10.0: number - number // 2},
        by_tokens={10.0: number},
    )
    return Ledger(num_started=number, columns={"trained": column}, training={"trained": column})


def test_a_run_s_records_are_a_plan(tmp_path: Path) -> None:
    """Settings, medians of its steps and the lengths of its attempts."""
    settings = Settings(model={"path": tmp_path}, buffer={"max_staleness": 0})  # type: ignore[arg-type]
    tree = measured_tree(settings, rows(4), ledger(40), source="run")
    lengths = measured_lengths(ledger(40), source="run")
    assert lengths.seconds.mean() == pytest.approx(4.0)
    plan = plan_of(tree, source="run", lengths=lengths)
    scenario = plan.scenario()
    assert scenario.rules.groups_per_step == settings.trainer.groups_per_step
    assert scenario.update_s == 1.0
    assert scenario.publish_s == pytest.approx(0.5)
    assert scenario.pause_s == pytest.approx(0.2)
    assert scenario.places == settings.env.max_concurrent_episodes
    assert [level.name for level in levels(plan, (0, 1))] == [
        "synchronous",
        "synchronous, over_provision 1.5",
        "max_staleness 1",
    ]


def test_archived_attempts_keep_their_lengths_and_how_alike_a_group_s_are() -> None:
    """The distribution is the sample; attempts by task differ from attempts by chance."""
    rng = np.random.default_rng(0)
    groups = [f"g{i // 8}" for i in range(8000)]
    by_chance = rng.random(8000)
    own = rng.random(8000) < 0.5
    half = np.where(own, by_chance, np.repeat(rng.random(1000), 8))
    tokens = np.full(8000, 10.0)
    alone = recorded_lengths(groups, by_chance, tokens)
    assert alone.seconds.mean() == pytest.approx(by_chance.mean(), rel=1e-3)
    assert (alone.seconds.values > 0.9).mean() == pytest.approx(0.1, abs=0.01)
    assert alone.by_task < 0.2
    assert recorded_lengths(groups, half, tokens).by_task == pytest.approx(0.5, abs=0.05)
    assert recorded_lengths(groups, np.repeat(rng.random(1000), 8), tokens).by_task > 0.98


def test_a_run_that_measured_nothing_is_no_plan(tmp_path: Path) -> None:
    """Two steps after the first, or no attempt that ended."""
    settings = Settings(model={"path": tmp_path})  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="made 2 steps after its first"):
        measured_tree(settings, rows(2), ledger(40), source="run")
    with pytest.raises(SettingsError, match="no attempt that ended"):
        measured_lengths(ledger(0), source="run")
