"""The number of model calls of an episode, those without a turn included."""

import asyncio

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def count(stage, episode) -> int:
    """What the router says of the episode."""
    return (await stage.get(f"/episodes/{episode['episode_id']}")).json()["num_calls"]


async def test_calls_are_counted_from_their_beginning(stage) -> None:
    """None before the first; a refused call and one that has no answer yet are calls."""
    stage.says("yes", "late")
    episode, other = await stage.open(), await stage.open()
    assert await count(stage, episode) == 0
    await stage.post("/v1/chat/completions", {**HI, "messages": []}, episode["api_key"])
    assert await count(stage, episode) == 1
    await stage.post("/v1/chat/completions", HI, episode["api_key"])
    assert await count(stage, episode) == 2
    stage.server.gate.clear()
    call = asyncio.create_task(stage.post("/v1/chat/completions", HI, other["api_key"]))
    async with asyncio.timeout(20):
        while await count(stage, other) == 0:
            await asyncio.sleep(0.01)
    stage.server.gate.set()
    await call
    assert await count(stage, other) == 1


async def test_a_refused_call_is_counted_once(stage) -> None:
    """Whether it was refused as it was read, or as it was rendered."""
    episode = await stage.open()
    long = {**HI, "messages": [{"role": "user", "content": "word " * 20_000}]}
    for number, body in enumerate([{**HI, "messages": []}, long, long, {**HI, "stop": [""]}], 1):
        await stage.post("/v1/chat/completions", body, episode["api_key"])
        assert await count(stage, episode) == number
