"""reasoning-gym with math-verify: tasks, players, verdicts, and two steps of training."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fakes.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tasks(load_example):
    """Problems and players."""
    return load_example("math", "tasks")


@pytest.mark.medium
def test_held_out_problems_are_seen_by_nobody_else(tasks) -> None:
    """Splits share no question, and conversations come from training problems only."""
    splits = {name: {row["question"] for row in tasks.problems(name)} for name in tasks.SHARES}
    assert not splits["train"] & splits["test"]
    assert not splits["train"] & splits["validation"]
    assert sum(map(len, splits.values())) == 200
    asked = {row["messages"][1]["content"] for row in tasks.conversations()}
    assert asked == splits["train"]


@pytest.mark.medium
def test_answers_are_right(tasks) -> None:
    """What reasoning-gym calls the answer is what the sum comes to."""
    for row in tasks.problems("test")[:100]:
        expression = row["question"].rpartition(": ")[2].removesuffix(" =")
        signs, total, sign = expression.split(), 0, 1
        for word in signs:
            if word in "+-":
                sign = 1 if word == "+" else -1
            else:
                total += sign * int(word)
        assert str(total) == row["answer"]


@pytest.mark.medium
def test_players_differ_as_the_readme_says(tasks) -> None:
    """The oracle is always right, the scripted player in three cases of ten."""
    assert tasks.reward_of(tasks.oracle_player, 500) == 1.0
    assert 0.25 < tasks.reward_of(tasks.scripted_player, 3000) < 0.35


@pytest.mark.medium
async def test_an_answer_is_judged_as_mathematics(
    load_example, open_episode: Callable[..., Any], router: Any
) -> None:
    """The agent's words reach math-verify; close is not right, and nothing is not right."""
    rollout = load_example("math", "rollout")
    task, episode = open_episode({"question": "4 - 1 - 7 =", "answer": "-4"})
    rewards = []
    for words in ("\\boxed{-4}", "so it is \\boxed{-8/2}", "\\boxed{-3}", "\\boxed{", ""):
        router.answer = lambda messages, words=words: {"role": "assistant", "content": words}
        rewards.append(await rollout.play(task, episode))
    await rollout.tear_down()
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example) -> None:
    """From nothing, over the generator and the verifier's processes: two steps."""
    rows = [row for row in train_example("math") if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in rows)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_trajectories_posted_by_another_program_train(
    train_example, free_port: int, tmp_path: Path
) -> None:
    """The run starts no runner; a program that renders, samples and scores by itself feeds it."""
    folder = ROOT / "examples/math"
    address = f"http://127.0.0.1:{free_port}"
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(
            train_example, "math", env__num_runners=0, router__port=free_port, eval__every=1,
            eval__num_episodes=4, eval__final_num_episodes=4,
        )  # fmt: skip
        wait_for_port(free_port, training)
        posting = subprocess.run(
            [sys.executable, str(folder / "post.py"), "runs/short", address],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        rows = training.result(timeout=200)
    assert posting.returncode == 0, posting.stderr
    report = json.loads(posting.stdout.splitlines()[-1])
    assert report["counted"] == report["posted"] >= 24
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/episodes"] for row in steps] == [12, 12]
    assert any(row.get("eval/sampled_reward") is not None for row in rows)


def wait_for_port(port: int, training: Future) -> None:
    """Return when a router listens there."""
    deadline = time.monotonic() + 150
    while True:
        assert not training.done(), training.exception()
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)


@pytest.fixture
def free_port() -> int:
    """A port without a listener."""
    return free_ports(1)[0]
