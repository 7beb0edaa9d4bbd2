"""Malformed requests, over HTTP onto a real Redis: refused by name, and the loop goes on."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fakes.fake_server import Script
from fakes.served_policy import publish
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.keys import key
from outloop.buffer.redis.run_meta import init_run


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), max_memory_mb=64) as server:
        yield server.url


@dataclass
class Whole:
    """A router over a real buffer, a trainer's face of it, and two open attempts of one group."""

    stage: Any
    reader: BufferReader
    fence: int
    claims: list[dict]

    async def send(self, path: str, body: object, key: str | None = None) -> tuple[int, dict]:
        """Status and error of a request; text is sent as it is."""
        headers = {"Authorization": f"Bearer {key or 'ol-runner-x'}"}
        words = {"content": body} if isinstance(body, str) else {"json": body}
        answer = await self.stage.http.post(path, headers=headers, **words)
        return answer.status_code, answer.json().get("error", {})

    def episode(self, index: int) -> dict:
        """One of the two."""
        return self.claims[index]["episode"]

    async def goes_on(self) -> None:
        """Both attempts are scored as if nothing had been, and the reader takes their group."""
        for index in range(2):
            path = f"/episodes/{self.episode(index)['episode_id']}/close"
            body = {"outcome": "completed", "reward": {"value": 1.0}, "key": "end"}
            assert (await self.send(path, body))[0] == 200
        (lease,) = self.reader.take(
            1,
            fence=self.fence,
            policy_version=0,
            timeout_s=0.0,
            on_wait=lambda sentence: None,
            should_stop=lambda: False,
        )
        assert len(lease.group.trajectories) == 2


@pytest.fixture
async def whole(
    make_stage: Callable, make_run: Callable, redis_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[Whole]:
    """See Whole; each test has a run of its own."""
    run = make_run(
        buffer={"group_size": 2, "max_staleness": 0},
        trainer={"groups_per_step": 1},
        router={"turn_timeout_s": 1.0},
    )
    run = replace(run, run_id=request.node.name.replace("/", "-"), redis_url=redis_url)
    init_run(run)
    reader = BufferReader.connect(run)
    stage = await make_stage(run=run)
    body = {"tasks": [{"task_id": "t", "payload": {"n": 1}}], "eval_tasks": []}
    assert (await stage.post("/tasks", body)).status_code == 200
    fence = reader.acquire_fence()
    reader.recover(None, fence=fence)
    publish(run, stage.server.url)
    answer = await stage.post("/tasks/claim", {"key": "k", "count": 2, "open": True})
    yield Whole(stage, reader, fence, answer.json()["claims"])
    reader.close()


SCORE = {"value": 0.5, "key": "r"}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        ('{"value": NaN, "key": "r"}', 400, ""),
        ('{"value": 1e999, "key": "r"}', 400, "value"),
        ('{"value": 1, "components": {"form": -1e999}, "key": "r"}', 400, "components"),
        ('{"value": "1", "key": "r"}', 400, "value"),
        ('{"value": 1}', 400, "key"),
        ('{"value": 1, "key": ""}', 400, "key"),
    ],
)
async def test_a_reward_that_is_no_number_is_refused(
    whole: Whole, body: str, status: int, names: str
) -> None:
    """NaN, infinity, text, no key: 4xx that names the field, and no reward is kept."""
    episode_id = whole.episode(0)["episode_id"]
    seen, error = await whole.send(f"/episodes/{episode_id}/reward", body)
    assert seen == status
    assert names in error["message"]
    assert (await whole.stage.get(f"/episodes/{episode_id}")).json()["reward"] is None
    await whole.goes_on()


async def test_two_rewards_under_one_key_are_a_conflict(whole: Whole) -> None:
    """The same again is nothing new; another value is refused and the first stays."""
    path = f"/episodes/{whole.episode(0)['episode_id']}/reward"
    assert (await whole.send(path, SCORE))[0] == 200
    assert (await whole.send(path, SCORE))[0] == 200
    status, error = await whole.send(path, {**SCORE, "value": 0.75})
    assert status == 422
    assert "key=r" in error["message"]
    await whole.goes_on()


async def test_what_is_not_known_is_not_found(whole: Whole) -> None:
    """Episodes, groups and attempts never opened or claimed: 404 or 410, by their names."""
    for path, body in (
        ("/episodes/ep-none/reward", SCORE),
        ("/episodes/ep-none/close", {"outcome": "completed", "key": "c"}),
    ):
        status, error = await whole.send(path, body)
        assert status == 404
        assert "ep-none" in error["message"]
    opening = {"task_id": "t", "purpose": "train", "deadline_s": 9.0, "attempt": 0}
    status, error = await whole.send("/episodes", {**opening, "group_id": "g9-9"})
    assert (status, "g9-9" in error["message"]) == (404, True)
    group_id = whole.claims[0]["group_id"]
    status, error = await whole.send("/episodes", {**opening, "group_id": group_id, "attempt": 7})
    assert (status, f"t:{group_id}:7" in error["message"]) == (410, True)
    status, error = await whole.send("/episodes", {**opening, "group_id": group_id, "task_id": "u"})
    assert (status, "task_id=t, not u" in error["message"]) == (422, True)
    await whole.goes_on()


@pytest.mark.parametrize(
    ("name", "value"), [("attempt", -1), ("deadline_s", 1e308), ("deadline_s", 0)]
)
async def test_an_opening_that_cannot_be_is_refused_for_good(
    whole: Whole, name: str, value: float
) -> None:
    """Numbers that no attempt and no clock has, of an evaluation too: 400 that names them."""
    for more in ({"purpose": "eval"}, {"group_id": whole.claims[0]["group_id"]}):
        opening = {"task_id": "t", "purpose": "train", "deadline_s": 9.0, "attempt": 0, **more}
        status, error = await whole.send("/episodes", {**opening, name: value})
        assert (status, name in error["message"]) == (400, True)
    named = {"purpose": "eval", "eval_name": "x", "task_id": "t", "deadline_s": 9.0}
    status, error = await whole.send("/episodes", {**named, name: value})
    assert (status, name in error["message"]) == (400, True)
    await whole.goes_on()


async def test_ids_out_of_vocabulary_are_refused(whole: Whole) -> None:
    """A prompt of ids that the policy does not have never reaches a server."""
    for ids in ([10**6], [-1], [2**31]):
        body = {"model": "policy", "prompt": ids}
        status, error = await whole.send("/v1/completions", body, whole.episode(0)["api_key"])
        assert status == 400
        assert "prompt" in (error["message"] + str(error["param"]))
    assert whole.stage.server.requests == []
    await whole.goes_on()


@pytest.mark.medium
async def test_a_server_s_unequal_arrays_are_not_recorded(whole: Whole) -> None:
    """Fewer logprobs than ids are no turn: the server is suspended, the client asked to retry."""
    whole.stage.server.answer = lambda request: Script(ids=[1, 2, 3], logprobs=[-0.5])
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    status, error = await whole.send("/v1/chat/completions", body, whole.episode(0)["api_key"])
    assert (status, error["code"]) == (503, "deadline_exceeded")
    loaded = (await whole.stage.get(f"/episodes/{whole.episode(0)['episode_id']}")).json()
    assert loaded["turns"] == []
    await whole.goes_on()


@pytest.mark.medium
async def test_too_large_a_body_is_refused(whole: Whole) -> None:
    """Before it is read whole, on the agent's routes and the runner's."""
    text = "x" * (70 * 2**20)
    path = f"/episodes/{whole.episode(0)['episode_id']}/close"
    body = {"outcome": "completed", "key": "c", "output": text}
    status, error = await whole.send(path, body)
    assert (status, error["code"]) == (413, "body_too_large")
    await whole.goes_on()


async def test_records_of_another_schema_or_damaged_are_set_aside(whole: Whole) -> None:
    """A damaged turn drops its group as a dead letter that can be looked at, not the reader."""
    episode_id = whole.episode(0)["episode_id"]
    whole.stage.says("fine")
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    assert (await whole.send("/v1/chat/completions", body, whole.episode(0)["api_key"]))[0] == 200
    client = connect_sync(whole.stage.run.redis_url)
    turns = key(whole.stage.run.run_id, f"episode:{episode_id}:turns")
    client.lset(turns, 0, b"\x09\x00" + client.lindex(turns, 0)[2:])
    answer = await whole.stage.get(f"/episodes/{episode_id}")
    assert answer.status_code == 400
    assert "schema=9, this release reads schema=4" in answer.json()["error"]["message"]
    client.lset(turns, 0, b"rubbish")
    client.close()
    for index in range(2):
        path = f"/episodes/{whole.episode(index)['episode_id']}/close"
        end = {"outcome": "completed", "reward": {"value": 1.0}, "key": "end"}
        assert (await whole.send(path, end))[0] == 200
    taken = whole.reader.take(
        1,
        fence=whole.fence,
        policy_version=0,
        timeout_s=0.0,
        on_wait=lambda sentence: None,
        should_stop=iter([False, True, True]).__next__,
    )
    assert taken == []
    (letter,) = whole.reader.dead_letters.list_all()
    assert letter.reason == "malformed"
    _, episodes = whole.reader.dead_letters.read(letter.group_id)
    assert {item.trajectory is None for item in episodes} == {True, False}
