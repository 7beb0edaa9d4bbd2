"""Self-play: the rules, who sits where, and a run against versions that it keeps."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from outloop.buffer.trajectories.query import query
from outloop.cli.ratings import ratings
from outloop.engine.models.kept_versions import kept_versions
from outloop.engine.models.random_init import Sizes, write_policy


@pytest.mark.parametrize(
    ("stones", "moves", "winner"),
    [
        (4, ["3", "1"], 1),
        (5, ["1", "1", "3"], 0),
        (5, ["4"], 1),
        (5, ["0"], 1),
        (5, ["two"], 1),
        (5, ["1", ""], 0),
        (3, [" 3\n"], 0),
        (2, ["3"], 1),
        (3, ["³"], 1),
    ],
)
def test_the_rules(
    load_example: Callable[..., ModuleType], stones: int, moves: list[str], winner: int
) -> None:
    """The last stone wins; what is no move loses."""
    heap = load_example("self_play", "verifier").Heap(stones)
    for move in moves:
        assert heap.winner is None
        heap.take(move)
    assert heap.winner == winner


@pytest.mark.parametrize(("seat", "reward"), [(0, 1.0), (1, 0.0)])
async def test_the_policy_has_its_seat(
    load_example: Callable[..., ModuleType],
    open_episode: Callable[..., Any],
    router: Any,
    seat: int,
    reward: float,
) -> None:
    """The other is played by a version that the run keeps; both are told the same."""
    rollout = load_example("self_play", "rollout")
    seen: list[str] = []

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(messages[-1]["content"])
        return {"role": "assistant", "content": {"5 left": "1", "4 left": "1"}.get(seen[-1], "3")}

    router.answer = answer
    task, episode = open_episode({"stones": 5, "seat": seat})
    assert await rollout.play(task, episode) == reward
    assert seen == ["5 left", "4 left", "3 left"]


def test_the_best_player_wins(load_example: Callable[..., ModuleType]) -> None:
    """The tasks leave something to learn: the best player beats the random one in most games."""
    tasks = load_example("self_play", "tasks")
    assert 0.45 < tasks.wins_of(tasks.random_player, tasks.random_player, 2000) < 0.55
    assert tasks.wins_of(tasks.best_player, tasks.random_player, 2000) > 0.85


NUM_EPISODES = 8 * 4
"""Of a step."""
NUM_STEPS = 4
WAITING = f'''
"""The example's games; those of the last step begin when the test lets them."""

import asyncio
import itertools
from pathlib import Path

import rollout

HERE = Path(__file__).parent


async def play(task, episode):
    for number in itertools.count():
        try:
            (HERE / f"start-{{number}}").touch(exist_ok=False)
        except FileExistsError:
            continue
        break
    while number >= {(NUM_STEPS - 1) * NUM_EPISODES} and not (HERE / "go").exists():
        await asyncio.sleep(0.05)
    return await rollout.play(task, episode)
'''


def served_versions(run: Path) -> set[int]:
    """The kept versions that the run's router sends turns to."""
    log = run / "logs/router-0.log"
    urls = re.findall(r'"url": "(http[^"]+)"', log.read_text()) if log.exists() else []
    if not urls:
        return set()
    key = json.loads((run / "secrets.json").read_text())["admin_key"]
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{urls[0]}/servers", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        servers = json.load(answer)["servers"]
    return {server["policy_version"] for server in servers if server["is_frozen"]}


def wait_until_served(version: int, run: Path, training: Future[Any]) -> None:
    """A server has loaded the kept version, and the router knows."""
    deadline = time.monotonic() + 200
    while version not in served_versions(run):
        assert not training.done(), training.exception()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_it_trains_and_rates_its_versions(
    train_example: Callable[..., list[dict[str, Any]]],
    load_example: Callable[..., ModuleType],
    tmp_path: Path,
) -> None:
    """From a short warm start, against two kept versions, each of another publish: what they say is
    recorded under their versions and not trained, and all versions that played are rated."""
    conversations = load_example("self_play", "tasks").conversations()
    write_policy(tmp_path / "first", 0, conversations[:1000], Sizes(max_context_tokens=512))
    folder = Path(__file__).resolve().parents[2] / "examples/self_play"
    words = ['model.path="first"', "trainer.num_steps=60", "trainer.warmup_steps=5"]
    warm = subprocess.run(
        [sys.executable, "-m", "outloop.cli", "train", str(folder / "warm_start.toml")]
        + [word for setting in words for word in ("--set", setting)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert warm.returncode == 0, warm.stdout + warm.stderr
    game = Path(shutil.copytree(folder, tmp_path / "game"))
    (game / "waiting.py").write_text(WAITING)
    run = tmp_path / "runs/short"
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(
            train_example,
            "self_play",
            env__import_dir=str(game),
            env__rollout_function_path="waiting:play",
            model__path="runs/self-play-warm-start/hf",
            trainer__num_steps=NUM_STEPS,
            server__frozen_every=2,
            trainer__groups_per_step=8,
            env__max_concurrent_episodes=NUM_EPISODES,
            buffer__drop_zero_signal=False,
        )
        wait_until_served(2, run, training)
        (game / "go").touch()
        rows = training.result(timeout=200)
    assert [row["train/failed_share"] for row in rows if "train/loss" in row] == [0] * NUM_STEPS
    assert kept_versions(run) == [2, 4]
    spans = query(
        run / "trajectories",
        "SELECT DISTINCT mask_reason, version_spans[1] AS version FROM turns "
        "WHERE mask_reason = 'frozen' AND len(loss_spans) = 0",
    )
    assert {0, 2} <= {row["version"] for row in spans}
    shown = CliRunner().invoke(ratings, [str(run)])
    assert shown.exit_code == 0, shown.output
    rated = [int(line.split()[1]) for line in shown.output.splitlines() if "Elo" in line]
    assert rated[:4] == [0, 1, 2, 3]
    assert (run / "ratings.png").is_file()
