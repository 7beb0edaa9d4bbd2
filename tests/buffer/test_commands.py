"""`outloop buffer`: on a run that is up and on one that is not."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fakes.full_disk import longest_file
from outloop.buffer.errors import BufferUnavailable, Conflict, NotFound, SettingsError
from outloop.buffer.records import Reward
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import key
from outloop.buffer.run import Run, load_run
from outloop.buffer.runner_keys import decode_keys, digest_of
from outloop.cli import cli

Outloop = Callable[..., str]


@pytest.fixture
def outloop(monkeypatch: pytest.MonkeyPatch) -> Outloop:
    """Runs `outloop buffer ...` in this process and returns what it prints; raises its errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str | Path, said: str = "") -> str:
        result = CliRunner().invoke(
            cli, ["buffer", *map(str, words)], input=said, catch_exceptions=False
        )
        if result.exit_code:
            raise AssertionError(result.output)
        return result.output

    return run


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """The server of the run in `tmp_path`/t, as the launcher would start it."""
    with EmbeddedRedis(tmp_path / "t" / "redis", max_memory_mb=64) as server:
        yield server


async def test_a_resumed_episode_names_the_one_it_resumes(
    redis: EmbeddedRedis,
    loop_on: Callable[..., Any],
    make_turn: Callable[..., Any],
    tmp_path: Path,
    outloop: Outloop,
) -> None:
    """`show` of the new episode leads to the lost one, which can be shown too."""
    loop = await loop_on(redis.url)
    (claim,) = (await loop.claim(1)).claims
    lost = await loop.open(claim)
    await loop.writer.append_turn(make_turn(lost))
    await loop.close(lost, None, failure_kind="infrastructure", outcome="failed")
    (claim,) = (await loop.claim(1)).claims
    resumed = await loop.open(claim)
    run = ("--run", tmp_path / "t")
    assert f"resumes the lost episode {lost}" in outloop("show", resumed, *run)
    assert f"{lost}.0" in outloop("show", lost, *run)
    shown = outloop("stats", *run)
    assert "buffer/resumed_share" in shown
    assert "attempts started" in shown
    assert "by duration" in shown


@pytest.mark.medium
async def test_a_run_that_is_not_up_is_looked_at(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path, outloop: Outloop
) -> None:
    """Its server is started for the time of a command; requeued slots are there afterwards."""
    loop = await loop_on(redis.url, env__max_replacements=0)
    await loop.play_all()
    loop.take()
    claims = (await loop.claim(2)).claims
    assert not claims
    loop.reader.drop("g0-1", "malformed", fence=loop.fence, error="[bold]odd[/bold]")
    run = ("--run", tmp_path / "t")
    assert "g0-1" in outloop("dead", "list", *run)
    redis.stop()

    assert "buffer/dead_letters" in outloop("stats", *run)
    shown = outloop("show", "g1-2-0", *run)
    assert "completed" in shown
    assert "g1-2-0.0" in shown
    assert "[bold]odd[/bold]" in outloop("dead", "list", *run)
    shown = outloop("dead", "inspect", "g0-1", *run)
    assert "2 of 2 scored" in shown
    assert "g0-1-1.0" in shown
    assert "4 trajectories written" in outloop("export", tmp_path / "a.jsonl", *run)
    imported = outloop("import", tmp_path / "a.jsonl", "--skip-bad", *run)
    assert "0 trajectories stored, 4 lines left out" in imported
    assert "played again" in outloop("dead", "requeue", "g0-1", *run)
    with pytest.raises(NotFound, match="g0-1"):
        outloop("dead", "drop", "g0-1", *run)
    with pytest.raises(NotFound, match="no episode_id=g9"):
        outloop("show", "g9", *run)


@pytest.mark.medium
async def test_the_limits_of_a_run_are_changed(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path, outloop: Outloop
) -> None:
    """While it goes on: the next claim goes by them."""
    loop = await loop_on(redis.url, buffer__max_staleness=2, buffer__pipeline_depth=0)
    run = ("--run", tmp_path / "t")
    assert len(await loop.play_all()) == 4
    shown = outloop("limits", *run)
    assert "2 groups for a step and 0 beyond them (0 steps) may be live, 2 are" in shown
    shown = outloop("limits", "--pipeline-depth", "1.5", *run)
    assert "pipeline_depth=1.5 max_staleness=2" in shown
    assert len(await loop.play_all()) == 6
    shown = outloop("limits", "--pipeline-depth", "auto", "--max-staleness", "0", *run)
    assert "pipeline_depth=auto max_staleness=0" in shown
    with pytest.raises(SettingsError, match="pipeline_depth='deep'"):
        outloop("limits", "--pipeline-depth", "deep", *run)


@pytest.mark.medium
async def test_purge_removes_a_stopped_run_only(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path, outloop: Outloop
) -> None:
    """A run that is up is refused; afterwards nothing of it is left."""
    loop = await loop_on(redis.url)
    await loop.play_all()
    run = ("--run", tmp_path / "t")
    with pytest.raises(Conflict, match="is up"):
        outloop("purge", "--yes", *run)
    assert loop.reader.stats()["buffer/ready_groups"] == 2
    redis.stop()
    with pytest.raises(AssertionError, match="Aborted"):
        outloop("purge", *run, said="n\n")
    assert "keys removed" in outloop("purge", *run, said="y\n")
    with pytest.raises(BufferUnavailable, match="holds nothing of this run"):
        outloop("stats", *run)


async def test_purge_on_a_shared_redis_leaves_other_runs(
    server: EmbeddedRedis,
    loop_on: Callable[..., Any],
    clock: Any,
    tmp_path: Path,
    outloop: Outloop,
) -> None:
    """With buffer.redis_url the run counts as up while a trainer renews its leases."""
    shared = {"buffer__redis_url": server.url}
    other = await loop_on(server.url, run__name="other", **shared)
    clock.now = time.time()
    loop = await loop_on(server.url, **shared)
    await loop.play_all()
    loop.take()
    with pytest.raises(Conflict, match="is up"):
        outloop("purge", "--yes", "--run", tmp_path / "t")
    clock.now -= 1000
    loop.reader.renew(loop.fence)
    assert "keys removed" in outloop("purge", "--yes", "--run", tmp_path / "t")
    client = other.reader.client
    assert not list(client.scan_iter(match=f"{loop.reader.prefix}*", count=1000))
    other.reader.stats()
    assert len((await other.claim()).claims) == 4


def test_a_folder_without_a_run_is_refused(tmp_path: Path, outloop: Outloop) -> None:
    """A sentence says what a run folder is."""
    with pytest.raises(SettingsError, match="holds no run.json"):
        outloop("stats", "--run", tmp_path)


@pytest.mark.medium
async def test_a_run_without_its_data_is_refused(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path, outloop: Outloop
) -> None:
    """No empty server is started in its place."""
    await loop_on(redis.url)
    redis.stop()
    (tmp_path / "t" / "redis").rename(tmp_path / "elsewhere")
    with pytest.raises(BufferUnavailable, match="does not exist"):
        outloop("stats", "--run", tmp_path / "t")
    assert not (tmp_path / "t" / "redis").exists()


@pytest.mark.medium
async def test_show_has_scores_error_and_output(
    redis: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path, outloop: Outloop
) -> None:
    """What is known of an episode's end: scores of turns, what failed, what was written."""
    loop = await loop_on(redis.url)
    claim = (await loop.claim(1)).claims[0]
    episode_id = await loop.open(claim)
    await loop.close(
        episode_id,
        outcome="failed",
        failure_kind="agent",
        reward=Reward(value=0.5, components={"form": 0.25}, turns={"t1": 0.125}),
        error="exit code 3",
        output="Traceback [/bold]",
    )
    shown = outloop("show", episode_id, "--run", tmp_path / "t")
    for words in ("exit code 3", "Traceback [/bold]", "form", "0.25", "t1", "0.125"):
        assert words in shown


@pytest.mark.medium
def test_a_new_admin_key_is_in_the_file_and_its_digest_in_redis(
    redis: EmbeddedRedis, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Nothing else of the file changes; nothing of the key is printed, or kept in Redis."""
    run = make_run(redis.url)
    words = ["keys", "replace-admin", "--run", str(tmp_path / "t")]
    answer = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert answer.exit_code == 0
    keys = load_run(tmp_path / "t").keys
    assert keys.admin_key not in (run.keys.admin_key, "")
    assert keys.admin_key not in answer.output
    assert (keys.runner_key, keys.episode_secret) == (run.keys.runner_key, run.keys.episode_secret)
    assert (tmp_path / "t/secrets.json").stat().st_mode & 0o777 == 0o600
    client = connect_sync(redis.url)
    found = decode_keys(client.hgetall(key(run.run_id, "runner_keys")))
    client.close()
    assert found.admin_digest == digest_of(keys.admin_key)
    assert not found.by_digest


@pytest.mark.medium
def test_keys_that_cannot_be_written_are_not_replaced(
    redis: EmbeddedRedis, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Where they are mounted: routers keep the old one."""
    path = tmp_path / "mounted/keys.json"
    path.parent.mkdir()
    make_run(redis.url, run__name="t", run__dir=str(tmp_path), run__keys_file=str(path))
    before = path.read_text()
    words = ["keys", "replace-admin", "--run", str(tmp_path / "t")]
    with (
        longest_file(0),
        pytest.raises(SettingsError, match="replace admin_key in what is mounted"),
    ):
        CliRunner().invoke(cli, words, catch_exceptions=False)
    assert path.read_text() == before
