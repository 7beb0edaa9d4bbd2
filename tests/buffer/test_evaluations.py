"""Estimates from several samples of several tasks, and what a run's folder keeps of them."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from outloop.buffer.errors import RecordError
from outloop.buffer.evaluations import results
from outloop.buffer.evaluations.estimates import (
    change_between,
    majority_passes,
    mean_and_error,
    pass_at_k,
    student_quantile,
)
from outloop.buffer.evaluations.results import Evaluation, TaskResult
from outloop.cli.evaluations import evaluations


@pytest.mark.parametrize(("num_samples", "num_passed"), [(1, 1), (4, 0), (5, 2), (6, 5)])
def test_pass_at_k_is_the_share_of_subsets_with_a_sample_that_passes(
    num_samples: int, num_passed: int
) -> None:
    """Counted over every subset; 1 - (1 - c/n)^k, the biased estimate, differs."""
    passes = [True] * num_passed + [False] * (num_samples - num_passed)
    for k in range(1, num_samples + 1):
        subsets = [any(chosen) for chosen in itertools.combinations(passes, k)]
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(np.mean(subsets), abs=1e-12)
    with pytest.raises(ValueError, match="num_samples"):
        pass_at_k(num_samples, num_passed, num_samples + 1)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over draws of 6 samples is the chance that one of 3 passes; the plug-in's is not."""
    chance, generator = 0.3, np.random.default_rng(0)
    passed = generator.binomial(6, chance, 40_000)
    wanted = 1 - (1 - chance) ** 3
    assert np.mean([pass_at_k(6, int(c), 3) for c in passed]) == pytest.approx(wanted, abs=0.006)
    assert abs(np.mean(1 - (1 - passed / 6) ** 3) - wanted) > 0.03


def test_an_error_counts_tasks() -> None:
    """One value a task: that of a mean of independent values. Eight times the same values say no
    more about other tasks; where only samples of one task differ there is no error by task."""
    values = [0.0, 1.0, 1.0, 0.5, 0.25]
    mean, error = mean_and_error([[value] for value in values])
    assert mean == pytest.approx(np.mean(values))
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))
    repeated = mean_and_error([[value] * 8 for value in values])
    assert repeated == pytest.approx((mean, error))
    assert mean_and_error([[0.0, 1.0]] * 5) == pytest.approx((0.5, 0.0))
    assert mean_and_error([[0.0, 1.0, 1.0]])[1] == pytest.approx(np.std([0, 1, 1], ddof=1) / 3**0.5)
    assert all(math.isnan(number) for number in mean_and_error([[], []]))


def test_the_interval_of_a_change_covers_as_often_as_it_says() -> None:
    """95% of intervals hold the true difference, with few tasks, which differ much more from each
    other than the two evaluations do."""
    generator = np.random.default_rng(1)
    covered = []
    for _ in range(2000):
        ease = generator.normal(0.0, 3.0, 6)
        before, after = (
            {str(t): (ease[t] + gain + generator.normal(0, 0.3, 4)).tolist() for t in range(6)}
            for gain in (0.0, 0.2)
        )
        change = change_between(before, after)
        covered.append(change.low <= 0.2 <= change.high)
        assert change.high - change.low < 2.0
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_quantiles_of_student() -> None:
    """Tabulated values, and the normal's for many degrees."""
    for degrees, wanted in ((1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (200, 1.9719)):
        assert student_quantile(0.975, degrees) == pytest.approx(wanted, abs=1e-4)
    assert student_quantile(0.975, 500) == pytest.approx(1.9647, abs=1e-4)
    assert student_quantile(0.025, 9) == pytest.approx(-2.2622, abs=1e-4)


def test_a_majority_is_of_answers() -> None:
    """The most frequent answer decides, not the most frequent score; ties are shared; samples
    without an answer have no vote."""
    assert majority_passes(["7", "8", "8 ", "9"], [True, False, False, True]) == 0.0
    assert majority_passes(["7", "7", "", "", ""], [True, True, False, False, False]) == 1.0
    assert majority_passes(["7", "8"], [True, False]) == 0.5
    assert majority_passes(["", " "], [True, True]) is None


def task(name: str, rewards: list[float], **more: object) -> TaskResult:
    """A task whose samples got `rewards`."""
    count = len(rewards)
    values = {
        "task_id": name,
        "rewards": tuple(rewards),
        "answers": ("",) * count,
        "num_tokens": (3,) * count,
        "num_turns": (1,) * count,
        "is_truncated": (False,) * count,
        "components": ({},) * count,
    }
    return TaskResult(**(values | more))  # type: ignore[arg-type]


EVALUATION = Evaluation(
    step=4,
    policy_version=4,
    name="sampled",
    temperature=1.0,
    pass_reward=1.0,
    tasks=(
        task("a", [1.0, 0.0, 0.0], source="x", answers=("1", "2", "2"), num_tokens=(1, 2, 6)),
        task(
            "b", [1.0, 1.0, 0.5], source="y", answers=("5", "5", ""), components=({"c": 2.0},) * 3
        ),
    ),
)


def test_the_figures_of_an_evaluation() -> None:
    """By hand."""
    row = EVALUATION.metrics()
    assert row["reward"] == pytest.approx(3.5 / 6)
    assert row["pass_at_1"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert row["pass_at_2"] == pytest.approx((2 / 3 + 1) / 2)
    assert row["pass_at_3"] == 1.0
    assert "pass_at_4" not in row
    assert row["majority_at_3"] == 0.5
    assert (row["tasks"], row["episodes"]) == (2.0, 6.0)
    assert row["generated_tokens_mean"] == pytest.approx(18 / 6)
    assert row["component/c"] == 2.0
    assert row["truncated_share"] == 0.0
    assert row["source/x/reward"] == pytest.approx(1 / 3)
    assert row["source/y/tasks"] == 1.0
    assert row["reward_se"] == pytest.approx(abs(1 - 3.5 / 2) / 6 * math.sqrt(2) * math.sqrt(2))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """The last line of a step and name counts; one that a kill cut off is left out."""
    assert results.read(tmp_path) == []
    later = dataclasses.replace(EVALUATION, step=8)
    again = dataclasses.replace(EVALUATION, policy_version=9)
    for one in (EVALUATION, later, again):
        results.append(tmp_path, one)
    assert results.read(tmp_path) == [again, later]
    with (tmp_path / results.FILE).open("a") as file:
        file.write('{"step": 12, "na')
    assert results.read(tmp_path) == [again, later]
    with (tmp_path / results.FILE).open("a") as file:
        file.write("\n")
    with pytest.raises(RecordError, match="line 4"):
        results.read(tmp_path)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with three evaluations: better at step 4, much worse at step 8."""
    for step, ease in ((0, 0.4), (4, 0.7), (8, 0.1)):
        tasks = tuple(
            task(f"t{n}", [ease + n / 100, ease + (n % 3) / 50], answers=("a", "b"))
            for n in range(12)
        )
        results.append(tmp_path, dataclasses.replace(EVALUATION, step=step, tasks=tasks))
    return tmp_path


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `outloop evaluations`; errors are their sentences."""
    found = CliRunner().invoke(evaluations, [str(argument) for argument in arguments])
    return found.exit_code, found.output or str(found.exception)


def test_two_checkpoints_are_compared_task_by_task(run_dir: Path) -> None:
    """A fall that its interval shows is exit code 1 where that is asked for; a rise is not."""
    code, text = invoke(run_dir)
    assert code == 0
    assert text.count("sampled") == 3
    code, text = invoke(run_dir, "--against", "4", "--fail-on-regression")
    assert code == 1
    assert "step 4 -> 8, 12 tasks: -0.6000" in text
    assert text.count("fell: t") == 5
    assert invoke(run_dir, "--against", "4")[0] == 0
    code, text = invoke(
        *(run_dir, "--step", 4, "--against", "first", "--fail-on-regression", "--json")
    )
    assert code == 0
    assert json.loads(text)["difference"] == pytest.approx(0.3)
    assert "step 4 -> 8" in invoke(run_dir, "--against", "best")[1]
    assert "step 0 -> 8" in invoke(run_dir, "--against", f"{run_dir}@0")[1]


def test_what_cannot_be_compared_is_a_sentence(run_dir: Path, tmp_path: Path) -> None:
    """Other names, steps and folders are answered with those that there are."""
    for arguments, words in (
        (("--name", "aime", "--against", "4"), "sampled"),
        (("--against", "5"), "has 0, 4, 8"),
        (("--against", "nowhere"), "is no folder"),
        (("--step", "4"), "--against"),
    ):
        code, text = invoke(run_dir, *arguments)
        assert code != 0
        assert words in text
    (tmp_path / "empty").mkdir()
    assert "no evaluation was complete" in invoke(tmp_path / "empty")[1]


def test_an_evaluation_of_several_versions_says_so_wherever_it_is_shown(
    run_dir: Path, tmp_path: Path
) -> None:
    """In the list, in JSON and beside a comparison; one of its own version alone is named after
    it."""
    found = results.read(run_dir)
    results.append(
        tmp_path,
        dataclasses.replace(
            found[-1], oldest_version=5, newest_version=17, mixed_share=0.9, policy_version=5
        ),
    )
    _, text = invoke(run_dir)
    assert [line.split()[:5] for line in text.splitlines()[1:]] == [
        ["0", str(found[0].policy_version), "sampled", "12", "2"],
        ["4", str(found[1].policy_version), "sampled", "12", "2"],
        ["8", "5", "to", "17,", "mixed"],
    ]
    _, text = invoke(run_dir, "--json")
    shares = [json.loads(line)["mixed_share"] for line in text.splitlines()]
    assert shares == [0.0, 0.0, 0.9]
    for arguments, is_warned in (
        (("--against", "4"), True),
        (("--step", "4", "--against", "8"), True),
        (("--step", "4", "--against", "0"), False),
    ):
        result = CliRunner().invoke(evaluations, [str(run_dir), *arguments])
        assert ("step 8 is of versions 5 to 17, mixed" in result.stderr) == is_warned
        as_json = CliRunner().invoke(evaluations, [str(run_dir), *arguments, "--json"])
        row = json.loads(as_json.stdout)
        assert (max(row["mixed_before"], row["mixed_after"]) > 0) == is_warned


def test_an_evaluation_of_an_older_release_is_read(tmp_path: Path) -> None:
    """Its line says nothing of the versions that sampled it."""
    results.append(tmp_path, EVALUATION)
    row = json.loads((tmp_path / results.FILE).read_text())
    for name in ("oldest_version", "newest_version", "mixed_share"):
        del row[name]
    (tmp_path / results.FILE).write_text(json.dumps(row) + "\n")
    (found,) = results.read(tmp_path)
    assert found == EVALUATION
    assert found.versions == str(EVALUATION.policy_version)
