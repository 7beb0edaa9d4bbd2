"""What a router does beside its requests ends the process when it ends, and says why."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from outloop.buffer.errors import PartFailed
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import key
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import Run, create_run
from outloop.router.background import BackgroundWork
from outloop.router.main import serve


async def fail() -> None:
    """Ends with an unexpected error."""
    raise ValueError("a registry entry is rubbish")


async def end() -> None:
    """Ends by itself."""


async def go_on(ended: list[str]) -> None:
    """Goes on until cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


@pytest.mark.parametrize(
    ("work", "sentence"),
    [(fail, "ValueError: a registry entry is rubbish"), (end, "ended by itself")],
)
async def test_the_first_that_ends_ends_all(work, sentence: str) -> None:
    """The sentence names it and how it ended."""
    background, ended = BackgroundWork(), []
    background.start({"reports its status": go_on(ended), "follows the registry": work()})
    async with asyncio.timeout(30):
        await background.has_failed.wait()
    assert "no longer follows the registry" in background.failure
    assert sentence in background.failure
    await background.stop()
    assert ended == ["ended"]


async def test_what_is_stopped_has_not_failed() -> None:
    """Stopping cancels all of it, once and again."""
    background, ended = BackgroundWork(), []
    background.start({"a": go_on(ended), "b": go_on(ended)})
    for _ in range(3):
        await asyncio.sleep(0)
    await background.stop()
    await background.stop()
    assert (ended, background.failure) == (["ended", "ended"], "")


@pytest.fixture
def live_run(make_run, tmp_path: Path) -> Iterator[Run]:
    """A run in a Redis of its own."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as redis:
        run = create_run(make_run().settings, tmp_path / "run", redis.url)
        init_run(run)
        yield run


@pytest.mark.medium
async def test_a_router_that_cannot_follow_the_registry_ends(live_run: Run) -> None:
    """It would go on with servers that are gone: the process ends with a sentence instead."""
    run = live_run
    ready = asyncio.Event()
    serving = asyncio.create_task(
        serve(run, stop=asyncio.Event(), on_ready=lambda url: ready.set())
    )
    async with asyncio.timeout(60):
        await ready.wait()
        client = connect_sync(run.redis_url)
        client.hset(key(run.run_id, "servers"), "server-0", b"rubbish")
        client.close()
        with pytest.raises(PartFailed, match="no longer follows the registry: DecodeError"):
            await serving


async def test_ready_says_what_has_failed(stage) -> None:
    """Readiness says so until the process has ended."""
    background = stage.app.state.parts.background
    background.failure = "the router no longer follows the registry: ValueError: x"
    answer = await stage.http.get("/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "router_failed")
    assert "follows the registry" in answer.json()["error"]["message"]
