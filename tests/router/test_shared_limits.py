"""One key's limits over two routers that meet in a real Redis, with several choices and retries."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from fakes.fake_server import FakeServer, Script, serving
from fakes.live_router import live_router
from fakes.served_policy import publish
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run

LIMITS = {
    "num_processes": 2,
    "max_concurrent_turns_per_episode": 4,
    "max_turns_per_episode": 9,
}
RUNNER = {"Authorization": "Bearer ol-runner-x"}


@pytest.fixture
def live_run(make_run, tmp_path: Path):
    """A run with these limits, in a Redis of its own."""
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as redis:
        run = create_run(make_run(router=LIMITS).settings, tmp_path / "run", redis.url)
        run = replace(run, keys=replace(run.keys, runner_key="ol-runner-x"))
        init_run(run)
        yield run


class Played:
    """An episode, and the two routers that it is played through."""

    def __init__(self, urls: list[str], http: httpx.AsyncClient, episode: dict) -> None:
        self.urls = urls
        self.http = http
        self.episode = episode

    async def ask(self, router: int, number: int, n: int = 1, **headers: str) -> httpx.Response:
        """A request for `n` choices; the same number is the same request."""
        messages = [{"role": "user", "content": f"number {number}"}]
        key = {"Authorization": f"Bearer {self.episode['api_key']}"}
        return await self.http.post(
            f"{self.urls[router]}/v1/chat/completions",
            json={"model": "policy", "messages": messages, "n": n},
            headers={**key, **headers},
        )

    async def close(self) -> dict:
        """Close the episode; what is recorded of it."""
        path = f"{self.urls[0]}/episodes/{self.episode['episode_id']}"
        body = {"outcome": "completed", "reward": {"value": 1.0}, "key": "c"}
        await self.http.post(f"{path}/close", json=body, headers=RUNNER)
        return (await self.http.get(path, headers=RUNNER)).json()


@pytest.mark.medium
async def test_choices_retries_and_other_routers_share_one_keys_limits(live_run, renderer) -> None:
    """Choices count one by one: at once at each router, in all wherever they are sampled; a retry
    counts nothing, at whichever router, and no answer of a refused request is sampled."""
    stop = renderer.stop_ids[0]
    ids = [*renderer.tokenizer.encode("x"), stop]
    script = Script(ids=ids, finish={"type": "stop", "matched": stop})
    server = FakeServer(lambda request: script)
    async with AsyncExitStack() as stack:
        server_url = await stack.enter_async_context(serving(server))
        urls = [await stack.enter_async_context(live_router(live_run)) for _ in range(2)]
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        publish(live_run, server_url)
        tasks = {"tasks": [{"task_id": "t", "payload": {}}], "eval_tasks": []}
        await http.post(f"{urls[0]}/tasks", json=tasks, headers=RUNNER)
        claim = {"key": "k", "count": 1, "open": True}
        answer = await http.post(f"{urls[0]}/tasks/claim", json=claim, headers=RUNNER)
        played = Played(urls, http, answer.json()["claims"][0]["episode"])

        server.gate.clear()
        three = asyncio.create_task(played.ask(0, 1, n=3))
        async with asyncio.timeout(20):
            while len(server.requests) < 3:
                await asyncio.sleep(0.005)
        refused = await played.ask(0, 2, n=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            404,
            "concurrency_exceeded",
        )
        one = asyncio.create_task(played.ask(1, 3))
        async with asyncio.timeout(20):
            while len(server.requests) < 4:
                await asyncio.sleep(0.005)
        server.gate.set()
        first = await three
        assert (first.status_code, (await one).status_code) == (200, 200)

        again = {"x-stainless-retry-count": "1"}
        for where in (0, 1):
            retried = await played.ask(where, 1, n=3, **again)
            assert retried.json() == first.json()
        # Four turns so far, four more at once, the ninth, and none beyond it.
        assert (await played.ask(1, 4, n=4)).status_code == 200
        refused = await played.ask(1, 5, n=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "turn_budget_spent")
        assert refused.headers["x-should-retry"] == "false"
        assert (await played.ask(0, 6)).status_code == 200
        assert (await played.ask(0, 7)).status_code == 404
        retried = await played.ask(1, 1, n=3, **again)
        assert (retried.status_code, retried.json()) == (200, first.json())
        assert len(server.requests) == 9
        read = await played.close()
    assert read["outcome"] == "truncated"
    reader = BufferReader.connect(live_run)
    turns = reader.load_episode(played.episode["episode_id"]).turns
    reader.close()
    assert len(turns) == 9
    assert len({turn.turn_id for turn in turns}) == 9
    assert sorted(turn.choice_index for turn in turns) == [0] * 4 + [1, 1, 2, 2, 3]
