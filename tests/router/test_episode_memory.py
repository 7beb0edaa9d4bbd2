"""What a router keeps of episodes, and how often it asks for them."""

import asyncio

from outloop.router.timings import Timings

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def ask(stage, episode, **fields):
    """One raw request."""
    return await stage.post("/v1/chat/completions", {**BODY, **fields}, episode["api_key"])


async def close(stage, episode) -> None:
    """The runner ends an episode."""
    path = f"/episodes/{episode['episode_id']}/close"
    assert (await stage.post(path, {"outcome": "completed", "key": "c"})).status_code == 200


async def test_a_closed_episode_is_forgotten(make_stage) -> None:
    """Long before its deadline; its key stays refused, and then costs no more than a mark."""
    stage = await make_stage(timings=Timings(forget_after_s=0.0))
    stage.server.answer = lambda request: stage.script("fine")
    episodes = stage.app.state.parts.episodes
    opened = [await stage.open(deadline_s=3600.0) for _ in range(3)]
    for episode in opened[:2]:
        assert (await ask(stage, episode)).status_code == 200
        await close(stage, episode)
    assert (await ask(stage, opened[2])).status_code == 200
    assert len(episodes) == 1
    await asyncio.sleep(0.01)
    episodes.forget_ended()
    assert episodes.known(opened[0]["episode_id"]) is None
    assert episodes.known(opened[2]["episode_id"]) is not None
    for _ in range(2):
        answer = await ask(stage, opened[0])
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "episode_closed")
    again = episodes.known(opened[0]["episode_id"])
    assert again is not None
    assert not again.tree.nodes
    assert len(episodes) == 1
