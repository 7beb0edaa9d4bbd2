"""`outloop status` and `outloop tail`: how a run stands, and its episodes as they close."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outloop.buffer.records import ServerEntry
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.run import load_run
from outloop.buffer.trajectories.archiver import archive_run
from outloop.cli import cli


def outloop(*words: str | Path) -> str:
    """What a command prints."""
    result = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """The server of the run in `tmp_path`/t."""
    with EmbeddedRedis(tmp_path / "t" / "redis", max_memory_mb=64) as server:
        yield server


async def test_status_names_every_part_and_what_is_waited_for(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """Versions, servers, waits with their time, and the queue; for people and for programs."""
    loop = await loop_on(redis.url)
    registry = loop.reader.registry
    registry.register_server(
        ServerEntry(
            server_id="s1", url="http://s1", kind="torch", policy_version=0, is_quarantined=True
        )
    )
    registry.register_part("router", {"url": "http://r"})
    registry.report_status("trainer", {"waiting_for": "ready groups 1/2", "since": "100.0"})
    await loop.play_all()
    loop.take(1)
    (tmp_path / "t" / "metrics.jsonl").write_text(
        json.dumps({"step": 7, "time": 1.0, "train/loss": 0.1, "train/reward_mean": 0.5,
                    "train/step_s": 2.0}) + "\n"
    )  # fmt: skip
    shown = outloop("status", tmp_path / "t")
    for words in (
        "t: running, no launcher on this machine",
        "step 7 of",
        "reward 0.500",
        "waits for ready groups 1/2 since",
        "http://r",
        "version 0, quarantined",
        "1 ready to be trained",
        "1 leased to the trainer",
    ):
        assert words in shown
    found = json.loads(outloop("status", tmp_path / "t", "--json"))
    assert found["queue"]["leased to the trainer"] == 1
    assert found["statuses"]["trainer"]["waiting_for"] == "ready groups 1/2"


@pytest.mark.medium
async def test_status_of_a_run_that_is_not_up(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """It starts nothing."""
    await loop_on(redis.url)
    redis.stop()
    assert outloop("status", tmp_path / "t").startswith("t: not up, no launcher")
    row = {"step": 10**9, "time": 1.0, "train/loss": 0.1, "train/reward_mean": 0.5,
           "train/step_s": 2.0}  # fmt: skip
    (tmp_path / "t" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert outloop("status", tmp_path / "t").startswith("t: finished, no launcher")


@pytest.mark.medium
async def test_tail_shows_each_episode_once_and_ends_with_the_run(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """As text; what was there before is left out unless it is asked for."""
    words = {"one ": 0, "two ": 1, "three ": 2, "four ": 3}
    Tokenizer(WordLevel(words, unk_token="one ")).save(str(tmp_path / "tokenizer.json"))
    loop = await loop_on(redis.url)
    claims = await loop.play_all()
    loop.reader.set_run_state("finished")
    shown = outloop("tail", tmp_path / "t", "--old")
    assert shown.count("completed  reward 1.000") == len(claims)
    assert "turn 0 output (version 0, stop): 'one" in shown
    assert "the run is not up; `outloop episodes --run" in outloop("tail", tmp_path / "t")


@pytest.mark.medium
async def test_episodes_are_read_from_the_archive_and_from_redis(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """Those in a checkpoint, and one that failed since; its text cannot command the terminal."""
    words = {"one ": 0, "two ": 1, "three ": 2, "four ": 3}
    Tokenizer(WordLevel(words, unk_token="one ")).save(str(tmp_path / "tokenizer.json"))
    loop = await loop_on(redis.url)
    loop.reader.trajectories.open(10**6)
    await loop.play_all()
    loop.reader.acknowledge(loop.train(loop.take(2), 1))
    stop = threading.Event()
    stop.set()
    archive_run(load_run(tmp_path / "t"), stop=stop)
    (claim,) = (await loop.claim(1)).claims
    await loop.open(claim, "hostile")
    await loop.close("hostile", 0.0, outcome="failed", failure_kind="agent", error="\x1b[31mred")
    shown = outloop("episodes", "--run", tmp_path / "t")
    assert shown.count("completed  reward 1.000") == 4
    assert shown.count("turn 0 output (version 0, stop): 'one") == 4
    assert r"error: \x1b[31mred" in shown
    assert shown.rstrip().endswith("5 episodes shown")
    last = outloop("episodes", "--limit", "1", "--run", tmp_path / "t")
    assert last.startswith("hostile")
    assert "1 episode shown; --limit 0 shows all" in last
    assert "1 failed episode shown" in outloop("episodes", "--failed", "--run", tmp_path / "t")


@pytest.mark.parametrize("is_archived", [True, False])
async def test_refused_calls_are_shown_wherever_a_run_is_looked_at(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path, is_archived: bool
) -> None:
    """An episode with refused calls alone is neither silent nor one that continued its branch."""
    words = {"one ": 0, "two ": 1}
    Tokenizer(WordLevel(words, unk_token="one ")).save(str(tmp_path / "tokenizer.json"))
    loop = await loop_on(redis.url)
    loop.reader.trajectories.open(10**6)
    (claim,) = (await loop.claim(1)).claims
    await loop.open(claim, "refused")
    put = loop.writer.refusal_notes.put
    for _ in range(2):
        await put("refused", "context_length_exceeded", "785 > 512", is_budget=False)
    await loop.close("refused", 0.0)
    if is_archived:
        stop = threading.Event()
        stop.set()
        archive_run(load_run(tmp_path / "t"), stop=stop)
    shown = outloop("episodes", "--run", tmp_path / "t")
    assert "refused model calls: 2 context_length_exceeded; the last: 785 > 512" in shown
    (found,) = (
        json.loads(line)
        for line in outloop("episodes", "--json", "--run", tmp_path / "t").splitlines()
        if line.startswith("{")
    )
    assert found["refused"] == {"context_length_exceeded": 2}
    drift = outloop("doctor", "--drift", tmp_path / "t")
    if is_archived:
        assert "refused model calls: 2 context_length_exceeded" in drift
        assert "no turn was recorded" in drift
    assert "every turn continued" not in drift
    row = {"step": 1, "time": 1.0, "train/loss": 0.1, "train/reward_mean": 0.5,
           "train/step_s": 2.0, "refused/context_length_exceeded": 64.0}  # fmt: skip
    (tmp_path / "t" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    status = outloop("status", tmp_path / "t")
    assert "refused model calls of its episodes: 64 context_length_exceeded" in status
