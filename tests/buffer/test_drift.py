"""`outloop doctor --drift`: causes, costs, advice."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from fakes.records import trajectory_of
from outloop.buffer.branch_report import EXPLANATIONS, measure
from outloop.buffer.records import Trajectory, Turn
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.settings.trajectories import TrajectorySettings
from outloop.buffer.trajectories.archiver import Archiver
from outloop.buffer.trajectories.folder import FOLDER, writing
from outloop.buffer.trajectories.tables import Decoder
from outloop.cli import cli


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """The server of the run in `tmp_path`/t."""
    with EmbeddedRedis(tmp_path / "t" / "redis", max_memory_mb=64) as server:
        yield server


def build(make_turn: Callable[..., Turn], *causes: str, purpose: str = "train") -> Trajectory:
    """An episode whose turns have these causes; extensions continue the turn before."""
    turns = []
    for index, cause in enumerate(causes):
        parent = index - 1 if cause == "extension" else None
        turn = make_turn("e", index, parent=parent)
        turns.append(replace(turn, branch_cause=cause, prompt_ids=np.zeros(10, np.int32)))
    return trajectory_of(turns, purpose=purpose)


def test_costs_are_summed_by_cause(make_turn: Callable[..., Turn]) -> None:
    """The dearest cause first; SFT is left out; what has no loss is counted by its reason."""
    masked = build(make_turn, "root")
    turn = replace(masked.turns[0], loss_spans=((0, 1),), mask_reason="after_stop")
    drift = measure(
        [
            build(make_turn, "root", "extension", "template", "extension"),
            build(make_turn, "root", "history_rewritten", "template"),
            build(make_turn, "root", "template", purpose="sft"),
            replace(masked, turns=(turn,)),
        ]
    )
    assert (drift.num_episodes, drift.num_turns, drift.num_branches) == (3, 8, 6)
    assert [(c.cause, c.num_turns, c.num_prompt_tokens, c.num_episodes) for c in drift.costs] == [
        ("template", 2, 20, 1),
        ("history_rewritten", 1, 10, 1),
    ]
    assert drift.cost_share == pytest.approx(30 / 80)
    assert drift.masked == {"after_stop": 3}


def test_every_cause_is_explained() -> None:
    """Each explanation is of a cause that the router writes, and says what to do."""
    router = Path(__file__).parents[2] / "router"
    source = "".join(
        (router / name).read_text() for name in ("episodes/turn_tree.py", "turns/recorder.py")
    )
    for cause in EXPLANATIONS:
        assert f'"{cause}"' in source
    assert all(explanation and advice for explanation, advice in EXPLANATIONS.values())


@pytest.mark.medium
async def test_the_doctor_explains_a_run(
    redis: EmbeddedRedis,
    loop_on: Callable[..., Any],
    make_turn: Callable[..., Turn],
    tmp_path: Path,
) -> None:
    """The command names the cause, its cost and what to change, on a run that is not up too."""
    loop = await loop_on(redis.url)
    for number, claim in enumerate((await loop.claim(2)).claims):
        episode_id = await loop.open(claim)
        for index in range(2):
            cause = ("root", "template")[index] if number else "root"
            turn = replace(make_turn(episode_id, index), branch_cause=cause)
            await loop.writer.append_turn(turn)
        await loop.close(episode_id)
    redis.stop()
    result = CliRunner().invoke(cli, ["doctor", "--drift", str(tmp_path / "t")])
    assert result.exit_code == 0, result.output
    assert "2 episodes, 4 turns, 4 branches" in result.output
    assert "template" in result.output
    assert "thinking_retention" in result.output


@pytest.mark.medium
async def test_the_doctor_knows_what_redis_has_freed(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """Episodes of the archive and of Redis, each once; the archive alone when Redis is gone."""
    loop = await loop_on(redis.url, buffer__max_staleness=1)
    loop.reader.trajectories.open(10**6)
    played = await loop.play_all()
    leases = loop.take(1)
    loop.reader.acknowledge(loop.train(leases, 1))
    with writing(tmp_path / "t" / FOLDER) as folder:
        archiver = Archiver(loop.reader.trajectories, folder, TrajectorySettings(), Decoder(None))
        archiver.open()
        archiver.flush()
    command = ["doctor", "--drift", str(tmp_path / "t")]
    assert f"{len(played)} episodes, {len(played)} turns" in CliRunner().invoke(cli, command).output
    redis.stop()
    shutil.rmtree(tmp_path / "t" / "redis")
    assert "2 episodes, 2 turns" in CliRunner().invoke(cli, command).output
