"""Several choices of one request."""

import asyncio
from dataclasses import replace

from fakes.fake_server import serving

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
RECORDED = {"governance_by_parameter": {"seed": "record"}}


async def ask(stage, episode, **fields):
    """One raw request."""
    return await stage.post("/v1/chat/completions", {**BODY, **fields}, episode["api_key"])


async def test_choices_with_a_seed_differ(make_stage) -> None:
    """Each choice has a seed of its own, which is what is recorded of it: a server that samples by
    seed alone would say the same n times, and a group of equal answers has no signal."""
    stage = await make_stage(sampling=RECORDED)
    stage.server.answer = lambda request: stage.script(
        f"seed {request['sampling_params']['sampling_seed']}"
    )
    episode = await stage.open()
    answer = (await ask(stage, episode, n=4, seed=7)).json()
    assert [c["message"]["content"] for c in answer["choices"]] == [
        f"seed {seed}" for seed in (7, 8, 9, 10)
    ]
    assert sorted(turn.sampling.seed for turn in stage.turns(episode)) == [7, 8, 9, 10]
    largest = (await ask(stage, episode, n=2, seed=2**63 - 1)).json()
    assert [c["message"]["content"] for c in largest["choices"]] == [
        f"seed {2**63 - 1}",
        f"seed {-(2**63)}",
    ]


async def test_an_evaluations_own_seed_gives_choices_that_differ(stage) -> None:
    """The seed of the episode's own sampling, too."""
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open(purpose="eval", group_id=None, sampling={"seed": 3})
    assert (await ask(stage, episode, n=3)).status_code == 200
    seeds = [request["sampling_params"]["sampling_seed"] for request in stage.server.requests]
    assert sorted(seeds) == [3, 4, 5]


async def test_choices_of_a_turn_that_fails_are_given_up(make_stage) -> None:
    """One choice is refused for good: the others are aborted at their servers, not left alone."""
    stage = await make_stage()
    fine = stage.script("fine")
    paths: list[str] = []

    async def app(scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        paths.append(scope["path"])
        if paths.count("/generate") == 2 and scope["path"] == "/generate":
            await stage.server.answer_whole(send, 400, b'{"error": {"message": "no"}}')
            return
        await stage.server(scope, receive, send)

    stage.server.gate.clear()
    stage.server.answer = lambda request: replace(fine)
    url = await stage.stack.enter_async_context(serving(app))
    stage.buffer.serve(url)
    await stage.app.state.parts.pool.refresh()
    episode = await stage.open()
    answer = await ask(stage, episode, n=3)
    assert answer.status_code == 400, answer.text
    async with asyncio.timeout(30):
        while len(stage.server.aborted) < 2:
            await asyncio.sleep(0.01)
    assert stage.app.state.parts.pool.num_in_flight == 0
    stage.server.gate.set()
