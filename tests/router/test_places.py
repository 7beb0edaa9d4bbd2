"""Turns at once of one key, counted over all router processes: three routers on one buffer."""

import asyncio
import random

import pytest

from outloop.router.peers import concurrency

LIMIT = 6
SETTINGS = {"num_processes": 3, "max_concurrent_turns_per_episode": LIMIT}
TIMEOUT_S = 20.0


@pytest.fixture
async def routers(make_stage):
    """Three routers of one run; each has a share of two."""
    first = await make_stage(router=SETTINGS)
    first.server.answer = lambda request: first.script("x")
    return [first, *[await make_stage(buffer=first.buffer, router=SETTINGS) for _ in range(2)]]


def begin(stage, episode, number: int) -> asyncio.Task:
    """A turn of its own."""
    messages = [{"role": "user", "content": f"number {number}"}]
    body = {"model": "policy", "messages": messages}
    return asyncio.create_task(stage.post("/v1/chat/completions", body, episode["api_key"]))


async def begun(first, number: int) -> None:
    """As many turns have reached the server."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(first.server.requests) < number:
            await asyncio.sleep(0.005)


async def refused(flood: list[asyncio.Task]) -> None:
    """All but as many as are allowed have their answer."""
    async with asyncio.timeout(TIMEOUT_S):
        while sum(task.done() for task in flood) < len(flood) - LIMIT:
            await asyncio.sleep(0.005)


def codes(answers) -> dict[str, int]:
    """How many answers there are of each kind."""
    found = [
        "ok" if answer.status_code == 200 else answer.json()["error"]["code"] for answer in answers
    ]
    return {code: found.count(code) for code in found}


@pytest.mark.parametrize("seed", range(4))
async def test_a_flood_over_all_routers_gets_exactly_its_limit(routers, seed: int) -> None:
    """Twice as many as are allowed, at once, anyhow spread: as many as are allowed are drawn, the
    others are refused for good, and another key is served beside them."""
    first, *_ = routers
    episode, other = await first.open(), await first.open()
    first.server.gate.clear()
    draw = random.Random(seed)
    flood = [begin(draw.choice(routers), episode, number) for number in range(2 * LIMIT)]
    await refused(flood)
    await begun(first, LIMIT)
    beside = begin(first, other, 0)
    await begun(first, LIMIT + 1)
    first.server.gate.set()
    answers = await asyncio.gather(*flood)
    assert codes(answers) == {"ok": LIMIT, "concurrency_exceeded": LIMIT}
    assert (await beside).status_code == 200
    told = next(answer for answer in answers if answer.status_code == 404)
    assert told.headers["x-should-retry"] == "false"


async def test_one_router_may_use_what_the_others_do_not(routers) -> None:
    """All of a key's connections may reach one process; then no other has a place left, and when
    its turns are over, every router is on its own again."""
    first, other, third = routers
    episode = await first.open()
    first.server.gate.clear()
    running = [begin(first, episode, number) for number in range(LIMIT)]
    await begun(first, LIMIT)
    for stage in routers:
        assert codes([await begin(stage, episode, 7)]) == {"concurrency_exceeded": 1}
    first.server.gate.set()
    assert codes(await asyncio.gather(*running)) == {"ok": LIMIT}
    for number, stage in enumerate((other, third)):
        assert codes([await begin(stage, episode, 8 + number)]) == {"ok": 1}
    num_said = len(first.buffer.channel.said)
    for number, stage in enumerate(routers):
        assert codes([await begin(stage, episode, 10 + number)]) == {"ok": 1}
    assert len(first.buffer.channel.said) == num_said


async def test_within_its_share_a_router_asks_nobody(routers) -> None:
    """Six turns at once, two at each, without a message."""
    first, *_ = routers
    episode = await first.open()
    first.server.gate.clear()
    running = [begin(routers[number % 3], episode, number) for number in range(LIMIT)]
    await begun(first, LIMIT)
    first.server.gate.set()
    assert codes(await asyncio.gather(*running)) == {"ok": LIMIT}
    assert first.buffer.channel.said == []


async def test_turns_of_a_router_that_died_do_not_count(routers) -> None:
    """Its connection to Redis is gone, and with it its turns."""
    first, other, _ = routers
    episode = await first.open()
    first.server.gate.clear()
    lost = [begin(first, episode, number) for number in range(LIMIT)]
    await begun(first, LIMIT)
    assert codes([await begin(other, episode, 7)]) == {"concurrency_exceeded": 1}
    del first.buffer.channel.listeners[0]
    running = [begin(other, episode, 8 + number) for number in range(LIMIT)]
    await begun(first, 2 * LIMIT)
    first.server.gate.set()
    assert codes(await asyncio.gather(*lost, *running)) == {"ok": 2 * LIMIT}


async def test_a_router_that_never_answers_has_no_turns(
    routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped dead is waited for once, with a deadline."""
    monkeypatch.setattr(concurrency, "ANSWER_S", 0.1)
    first, *_ = routers
    episode = await first.open()
    first.buffer.channel.listeners.append({concurrency.EVERYBODY: lambda _: None})
    first.server.gate.clear()
    running = [begin(first, episode, number) for number in range(LIMIT)]
    await begun(first, LIMIT)
    first.server.gate.set()
    assert codes(await asyncio.gather(*running)) == {"ok": LIMIT}
    first.buffer.channel.listeners.pop()


async def test_routers_that_were_started_by_hand_are_counted(make_stage) -> None:
    """No setting tells how many share the port: Redis does."""
    settings = {**SETTINGS, "num_processes": 1}
    first = await make_stage(router=settings)
    first.server.answer = lambda request: first.script("x")
    other = await make_stage(buffer=first.buffer, router=settings)
    for stage in (first, other):
        await stage.app.state.parts.places.keep()
    episode = await first.open()
    first.server.gate.clear()
    flood = [begin((first, other)[number % 2], episode, number) for number in range(2 * LIMIT)]
    await refused(flood)
    first.server.gate.set()
    answers = await asyncio.gather(*flood)
    assert codes(answers) == {"ok": LIMIT, "concurrency_exceeded": LIMIT}


async def test_rubbish_is_passed_over(routers) -> None:
    """What is no message of ours, or answers no question, changes nothing."""
    first, *_ = routers
    episode = await first.open()
    channel = first.buffer.channel
    answer = concurrency._encode(concurrency.Running("nobody", 1, 100, True))
    for message in (b"", b"\xff", b"\x93\x01\x02\x03", answer):
        for name in {name for hear in channel.listeners for name in hear if "places" in name}:
            await channel.publish(name, message)
    assert codes([await begin(first, episode, 0)]) == {"ok": 1}
