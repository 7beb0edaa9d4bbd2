"""Evaluations of the RL loop, and the checkpoint that they choose."""

import dataclasses
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing
import torch

from fakes.bandit_run import FAST, Setup
from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.evaluations import results
from outloop.buffer.settings import build_settings

MakeRun = Callable[..., Setup]


@pytest.mark.medium
def test_evaluations_follow_their_schedule(setup: MakeRun) -> None:
    """Ends and every second version; greedy at the ends; each done before the next publish."""
    made = setup(
        trainer=FAST | {"num_steps": 5},
        eval={"every": 2, "num_episodes": 16, "final_num_episodes": 32},
    )
    rows = made.train()
    assert [value for kind, value in made.events if kind == "eval"] == [
        ("0:sampled", 32, 1.0),
        ("0:greedy", 32, 0.0),
        ("2:sampled", 16, 1.0),
        ("4:sampled", 16, 1.0),
        ("5:sampled", 32, 1.0),
        ("5:greedy", 32, 0.0),
    ]
    kinds = [kind for kind, _ in made.events]
    for index, kind in enumerate(kinds):
        if kind == "eval" and "announce" in kinds[index:]:
            assert "eval_progress" in kinds[index : kinds.index("announce", index)]
    answers = {row["step"]: row for row in rows if "eval/sampled_reward" in row}
    assert sorted(answers) == [0, 2, 4, 5]
    assert answers[5]["eval/greedy_reward"] == 0.75
    assert answers[5]["eval/sampled_se"] == pytest.approx((0.75 * 0.25 / 31) ** 0.5)


@pytest.mark.medium
def test_suites_follow_schedules_of_their_own(setup: MakeRun) -> None:
    """Each with its samples, its temperature and its row; none is more than its list of tasks, and
    what every sample got is in the run's folder."""
    suites = {
        "often": {"every": 1, "samples_per_task": 4, "temperature": 0.5},
        "seldom": {"every": 3, "num_tasks": 1, "samples_per_task": 2},
    }
    made = setup(
        trainer=FAST | {"num_steps": 4}, eval={"suites": suites}, env={"eval_tasks": "t.jsonl"}
    )
    made.buffer.eval_rewards = {f"{n}:suite-often": (1.0, 0.0, 0.0, 0.0) for n in range(4)}
    rows = [row for row in made.train() if "train/loss" not in row]
    asked = [value for kind, value in made.events if kind == "eval"]
    assert [name for name, _, _ in asked if "often" in name] == [
        f"{version}:suite-often" for version in range(5)
    ]
    assert [name for name, _, _ in asked if "seldom" in name] == [
        f"{version}:suite-seldom" for version in (0, 3, 4)
    ]
    assert {value[2] for value in asked if "often" in value[0]} == {0.5}
    often = {row["step"]: row for row in rows if "eval/often/reward" in row}
    # 128 tasks were asked for, the list has one.
    assert often[0]["eval/often/episodes"] == 4
    assert often[0]["eval/often/tasks"] == 1
    assert often[0]["eval/often/pass_at_1"] == 0.25
    assert often[0]["eval/often/pass_at_4"] == 1.0
    assert [row["step"] for row in rows if "eval/seldom/reward" in row] == [0, 3, 4]
    assert "eval/sampled_reward" not in {name for row in rows for name in row}
    kept = {(one.step, one.name): one for one in results.read(made.run.dir)}
    assert sorted(kept) == sorted(
        [(step, "often") for step in range(5)] + [(step, "seldom") for step in (0, 3, 4)]
    )
    assert kept[3, "often"].rewards == {"e0": (1.0, 0.0, 0.0, 0.0)}
    assert kept[4, "often"].policy_version == 4
    assert kept[4, "often"].temperature == 0.5


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"suites": {"sampled": {}}}, "none of validation, test, sampled, greedy"),
        ({"suites": {"a b": {}}}, "small letters"),
        ({"suites": {"hard": {}}}, "eval.suites.hard has no tasks"),
        ({"num_episodes": 128, "samples_per_task": 3}, "does not divide num_episodes=128"),
    ],
)
def test_a_suite_that_cannot_be_played_is_refused(plan: dict[str, Any], words: str) -> None:
    """Before the start."""
    with pytest.raises(SettingsError, match=re.escape(words)):
        build_settings({"model": {"path": "."}, "eval": plan}, source="test")


@pytest.mark.medium
def test_an_evaluation_that_never_ends_names_who_is_awaited(setup: MakeRun) -> None:
    """The deadline passes with the number of episodes done."""
    made = setup(trainer=FAST | {"num_steps": 1}, eval={"every": 1, "timeout_s": 0.2})
    made.buffer.eval_rewards = None
    with pytest.raises(DeadlineExceeded, match=r"0 of 256 episodes.*runner"):
        made.train()


@pytest.mark.medium
def test_an_evaluation_whose_attempts_are_alive_is_awaited(setup: MakeRun) -> None:
    """However long it takes: eval.timeout_s counts only while nothing is in flight."""
    made = setup(trainer=FAST | {"num_steps": 1}, eval={"every": 1, "timeout_s": 0.2})
    made.buffer.may_evaluate.clear()
    timer = threading.Timer(1.0, made.buffer.may_evaluate.set)

    def begin(sentence: str) -> None:
        if sentence.startswith("evaluation") and not timer.is_alive():
            made.buffer.on_wait = lambda sentence: None
            timer.start()

    made.buffer.on_wait = begin
    rows = made.train()
    timer.join()
    (step,) = [row for row in rows if "train/evaluation_wait_s" in row]
    assert step["train/evaluation_wait_s"] > 0.5
    assert step["train/step_s"] >= step["train/evaluation_wait_s"] + step["train/wait_s"]


@pytest.mark.medium
def test_an_evaluation_may_go_on_beside_training(setup: MakeRun) -> None:
    """blocks_publish = false: no publish waits; the row says by which versions its tokens were
    sampled, and the run ends with all of them recorded."""
    made = setup(
        trainer=FAST | {"num_steps": 3}, eval={"every": 2, "greedy": False, "blocks_publish": False}
    )
    made.buffer.may_evaluate.clear()

    def allow(policy_version: int) -> None:
        if policy_version == 3:
            made.buffer.may_evaluate.set()

    made.buffer.on_trained = allow
    rows = made.train()
    answers = {row["step"]: row for row in rows if "eval/sampled_reward" in row}
    assert {step: row["eval/num_publishes"] for step, row in answers.items()} == {0: 3, 2: 1, 3: 0}
    assert {step: row["eval/mixed_share"] for step, row in answers.items()} == {0: 1, 2: 1, 3: 0}
    # All were played in the end, by the last version.
    assert {row["eval/oldest_version"] for row in answers.values()} == {3}
    assert {row["eval/newest_version"] for row in answers.values()} == {3}
    kept = results.read(made.run.dir)
    assert [one.versions for one in kept] == ["3, not 0", "3, not 2", "3"]
    assert [row["train/policy_version"] for row in rows if "train/loss" in row] == [1, 2, 3]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"every": 0}, "eval.blocks_publish=false has no effect with eval.every=0"),
        ({"every": 1, "chooses_checkpoint": True}, "must be played by its weights alone"),
    ],
)
def test_what_needs_one_version_blocks_the_publish(plan: dict[str, Any], words: str) -> None:
    """And without evaluations there is nothing to unblock."""
    tree = {"model": {"path": "."}, "eval": plan | {"blocks_publish": False}, "env": SPLIT}
    with pytest.raises(SettingsError, match=re.escape(words)):
        build_settings(tree, source="test")


CHOOSES = {"every": 1, "num_episodes": 16, "final_num_episodes": 32, "chooses_checkpoint": True}
SPLIT = {"split": {"train": 8, "validation": 1, "test": 1}}


@pytest.mark.medium
def test_validation_chooses_and_test_is_reported_once(setup: MakeRun) -> None:
    """The best step's weights are published, tested and written; going on again tests no more."""
    made = setup(trainer=FAST | {"num_steps": 4, "keep_checkpoints": 1}, eval=CHOOSES, env=SPLIT)
    made.buffer.eval_rewards = {
        "0:sampled": (1.0, 1.0),  # the weights that the run began with are no checkpoint of it
        "1:sampled": (0.5, 0.5),
        "2:sampled": (1.0, 0.5),
        "3:sampled": (1.0, 0.5),
        "4:sampled": (0.0, 0.0),
        "5:test-sampled": (0.0, 0.5),
    }
    weights: dict[int, torch.Tensor] = {}

    def keep(policy_version: int) -> None:
        weights[policy_version] = next(made.policy.model.parameters()).detach().clone()

    made.server.on_publish = keep
    rows = made.train()
    evals = [value for kind, value in made.events if kind == "eval"]
    assert evals[-2:] == [("5:test-sampled", 32, 1.0), ("5:test-greedy", 32, 0.0)]
    assert [value for kind, value in made.events if kind == "announce"][-1] == (5, 2)
    assert torch.equal(weights[5], weights[2])
    assert not torch.equal(weights[5], weights[4])
    (row,) = [row for row in rows if "test/sampled_reward" in row]
    assert (row["step"], row["test/sampled_reward"]) == (2, 0.25)
    assert json.loads((made.run.dir / "best/choice.json").read_text())["is_reported"]
    assert [path.name for path in (made.run.dir / "checkpoints").iterdir()] == ["step_4"]
    again = [row for row in made.train() if "test/sampled_reward" in row]
    assert len(again) == 1
    assert torch.equal(weights[max(weights)], weights[2])


def test_a_choice_needs_both_splits() -> None:
    """Nothing to choose by, or a test split that would choose, is a sentence before the start."""
    for values, words in (
        ({"eval": CHOOSES}, "env.split = {train = 8, validation = 1, test = 1}"),
        ({"eval": CHOOSES | {"every": 0}, "env": SPLIT}, "eval.every=0"),
        ({"eval": CHOOSES, "env": SPLIT | {"eval_split": "test"}}, "must not choose"),
    ):
        with pytest.raises(SettingsError, match=re.escape(words)):
            build_settings({"model": {"path": "."}} | values, source="test")


@pytest.mark.parametrize(("num_tasks", "is_warned"), [(7, False), (8, True)])
def test_a_fall_over_eight_tasks_is_a_warning(
    setup: MakeRun, num_tasks: int, is_warned: bool
) -> None:
    """Over fewer an interval by task says little. A step that is evaluated again, after a resume,
    is compared with the step before it, not with itself."""
    made = setup(
        trainer=FAST | {"num_steps": 1},
        eval={"every": 1, "num_episodes": 16, "final_num_episodes": 16, "greedy": False},
    )
    made.buffer.num_validation_tasks = num_tasks
    made.buffer.eval_rewards = {"0:sampled": (1.0,), "1:sampled": (0.25,)}
    task = results.TaskResult(
        task_id="e0",
        rewards=(0.25,),
        answers=("",),
        num_tokens=(1,),
        num_turns=(1,),
        is_truncated=(False,),
        components=({},),
    )
    abandoned = results.Evaluation(
        step=1,
        policy_version=1,
        name="sampled",
        temperature=1.0,
        pass_reward=1.0,
        tasks=tuple(dataclasses.replace(task, task_id=f"e{n}") for n in range(num_tasks)),
    )
    results.append(made.run.dir, abandoned)
    with structlog.testing.capture_logs() as logs:
        rows = made.train()
    (row,) = [row for row in rows if row["step"] == 1 and "eval/sampled_reward" in row]
    assert row["eval/sampled/change"] == pytest.approx(-0.75)
    assert ("evaluation_fell" in [entry["event"] for entry in logs]) == is_warned


def test_an_evaluation_is_compared_with_the_one_before_it(setup: MakeRun) -> None:
    """Not with the first of the run, nor with another sampling."""
    made = setup(
        trainer=FAST | {"num_steps": 3},
        eval={"every": 1, "num_episodes": 8, "final_num_episodes": 8, "greedy": False},
    )
    made.buffer.num_validation_tasks = 2
    made.buffer.eval_rewards = {
        f"{version}:sampled": rewards
        for version, rewards in enumerate([(0.0, 0.0), (1.0, 1.0), (0.5, 0.5), (0.75, 0.75)])
    }
    rows = made.train()
    found = {row["step"]: row for row in rows if "eval/sampled_reward" in row}
    assert "eval/sampled/change" not in found[0]
    changes = [found[step]["eval/sampled/change"] for step in (1, 2, 3)]
    assert changes == pytest.approx([1.0, -0.5, 0.25])
