"""Servers that hold an earlier version of a run, with a real torch server."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import PublishFailed, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import Opening, Reward, ServerEntry, Task
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import build_settings
from outloop.buffer.writer import BufferWriter
from outloop.engine.models.kept_versions import (
    due_version,
    kept_versions,
    remove_from,
    remove_needless,
    version_folder,
)
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.serve.main import serve_frozen


def settings_of(folder: Path, **server: Any) -> Any:
    """Settings of a run with such servers."""
    return build_settings({"model": {"path": str(folder)}, "server": server}, source="test")


def keep(run_dir: Path, policy_version: int, folder: Path) -> None:
    """As the trainer does: the folder appears complete."""
    shutil.copytree(folder, run_dir / "versions/incoming.writing")
    (run_dir / "versions/incoming.writing").rename(version_folder(run_dir, policy_version))


@pytest.fixture
async def followed(
    make_model: Callable[..., Path], tmp_path: Path
) -> AsyncIterator[tuple[Run, BufferReader, asyncio.Task[None]]]:
    """A run with one server of earlier versions, which runs in this process."""
    settings = settings_of(make_model(), num_frozen=1, frozen_every=10)
    with EmbeddedRedis(tmp_path / "redis", fsync="no", max_memory_mb=64) as redis:
        run = create_run(settings, tmp_path / "run", redis.start())
        init_run(run)
        reader = BufferReader.connect(run)
        stop = asyncio.Event()
        task = asyncio.create_task(serve_frozen(run, 0, stop=stop, on_ready=lambda url: None))
        yield run, reader, task
        stop.set()
        await asyncio.gather(task, return_exceptions=True)
        assert [one.policy_version for one in reader.registry.frozen_servers()] == [None]
        reader.close()


async def holds(reader: BufferReader, policy_version: int | None) -> ServerEntry:
    """The server once it is entered with this version."""
    deadline = time.monotonic() + 60
    while True:
        entries = await asyncio.to_thread(reader.registry.frozen_servers)
        if entries and entries[0].policy_version == policy_version:
            return entries[0]
        assert time.monotonic() < deadline, entries
        await asyncio.sleep(0.05)


async def first_logprob(run: Run, url: str) -> tuple[str, float]:
    """The version that a server names, and what its weights make of a prompt."""
    client = ServerClient("test", url, key=run.server_key)
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await asyncio.to_thread(client.generate, body, time.monotonic() + 30)
    client.close()
    meta = answer["meta_info"]
    return meta["weight_version"], meta["input_token_logprobs"][1][0]


@pytest.mark.medium
async def test_it_holds_what_is_kept_and_moves_on(followed: Any, make_model: Any) -> None:
    """Nothing before a version is kept; then that one, and a newer one when that is there. Each
    under its own name, with its own weights; publishes do not see it."""
    run, reader, task = followed
    assert (await holds(reader, None)).is_frozen
    keep(run.dir, 0, make_model())
    url = (await holds(reader, 0)).url
    first = await first_logprob(run, url)
    keep(run.dir, 10, make_model(seed=1))
    await holds(reader, 10)
    second = await first_logprob(run, url)
    assert (first[0], second[0]) == ("0", "10")
    assert abs(first[1] - second[1]) > 1e-3
    assert reader.registry.servers() == ()
    assert not task.done()


@pytest.mark.medium
async def test_a_folder_of_another_model_ends_it(followed: Any, make_model: Any) -> None:
    """With a sentence, and without serving it."""
    run, reader, task = followed
    await holds(reader, None)
    keep(run.dir, 0, make_model("llama", tied=False))
    with pytest.raises(PublishFailed):
        await asyncio.wait_for(asyncio.shield(task), 60)


async def test_an_index_beyond_the_settings_is_refused(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """With how many there are."""
    run = create_run(settings_of(make_model()), tmp_path / "run", "unix:///none")
    with pytest.raises(SettingsError, match=r"index=0 of server.num_frozen=0"):
        await serve_frozen(run, 0, stop=asyncio.Event(), on_ready=lambda url: None)


def test_servers_take_turns(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    """One moves at a time, so that the others' versions last; what none is to hold is removed, and
    so are versions with numbers that this run has never given."""
    server = settings_of(make_model(), num_frozen=2, frozen_every=5).server
    assert [version for version in range(21) if server.keeps(version)] == [0, 5, 10, 15, 20]
    due = []
    for version in (0, 5, 10, 15):
        keep(tmp_path, version, make_model())
        remove_needless(server, tmp_path)
        due.append([due_version(server, tmp_path, index) for index in range(2)])
    assert due == [[0, None], [0, 5], [10, 5], [10, 15]]
    assert kept_versions(tmp_path) == [10, 15]
    remove_from(tmp_path, 12)
    assert kept_versions(tmp_path) == [10]
    alone = settings_of(make_model(), num_frozen=1).server
    assert [version for version in range(21) if alone.keeps(version)] == [0]
    assert not any(settings_of(make_model()).server.keeps(version) for version in range(21))


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"server": {"frozen_every": 5}}, "without server.num_frozen"),
        ({"server": {"num_frozen": 2}}, "without server.frozen_every"),
        ({"server": {"num_frozen": 1, "device": "cuda"}}, "are started on a CPU"),
        ({"server": {"num_frozen": 1, "kind": "sglang"}}, "are started on a CPU"),
        (
            {"server": {"num_frozen": 1, "num_servers": 0, "urls": ["http://h:1"]}},
            "are started on a CPU",
        ),
        ({"server": {"num_frozen": 1}, "trainer": {"mode": "sft"}}, "trainer.mode='sft'"),
    ],
)
def test_settings_that_contradict_are_refused(tree: dict[str, Any], sentence: str) -> None:
    """Each with what is allowed."""
    with pytest.raises(SettingsError, match=sentence):
        build_settings({"model": {"path": "model"}, **tree}, source="test")


async def test_it_stays_while_its_version_is_evaluated(followed: Any, make_model: Any) -> None:
    """A newer version waits for the last episode of the evaluation; one of another version holds
    nobody up."""
    run, reader, _ = followed
    keep(run.dir, 0, make_model())
    await holds(reader, 0)
    writer = await BufferWriter.connect(run)
    await writer.register_tasks(
        [Task(task_id="t", payload={"n": 0})], [Task(task_id="e", payload={"n": 1})]
    )
    fence = reader.acquire_fence()
    reader.recover(None, fence=fence)
    reader.announce_version(0, None)
    reader.acknowledge_version(0)
    for name, version in (("0:sampled", 0), ("3:sampled", 3)):
        reader.request_eval(
            name, policy_version=version, num_episodes=1, sampling={}, blocks_training=True
        )
    assert [reader.is_evaluated(version) for version in (0, 3, 10)] == [True, True, False]
    keep(run.dir, 10, make_model(seed=1))
    await asyncio.sleep(2.0)
    assert (await holds(reader, 0)).policy_version == 0
    (claim,) = [
        one for one in (await writer.claim(key="k", count=2)).claims if one.eval_name == "0:sampled"
    ]
    opening = Opening(
        episode_id="e0",
        task_id="e",
        group_id=None,
        attempt=claim.attempt,
        purpose="eval",
        deadline_at=1e12,
        eval_name=claim.eval_name,
        opened_at=0.0,
    )
    await writer.open_episode(opening)
    await writer.close_episode(
        "e0",
        outcome="completed",
        failure_kind=None,
        reward=Reward(value=1.0),
        error="",
        key="close",
    )
    await writer.close()
    assert not reader.is_evaluated(0)
    await holds(reader, 10)
