"""Self-play: the rules, who sits where, and a run against versions that it keeps."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from outloop.buffer.trajectories.query import query
from outloop.cli.ratings import ratings
from outloop.engine.kept_versions import kept_versions
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
    rows = train_example(
        "self_play",
        model__path="runs/self-play-warm-start/hf",
        trainer__num_steps=4,
        server__frozen_every=2,
        trainer__groups_per_step=8,
        env__max_concurrent_episodes=32,
        buffer__drop_zero_signal=False,
    )
    assert [row["train/failed_share"] for row in rows if "train/loss" in row] == [0] * 4
    run = tmp_path / "runs/short"
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
