"""What one episode may use."""

import asyncio

import pytest

from fakes.fake_server import FakeServer, Script, serving

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def ask(stage, episode, **fields):
    """One raw request."""
    return await stage.post("/v1/chat/completions", {**BODY, **fields}, episode["api_key"])


def check_final(answer, code: str, status: int = 404) -> None:
    """No SDK retries it."""
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-should-retry"] == "false"


async def closed(stage, episode, **fields) -> dict:
    """The episode as it is recorded after its runner closed it."""
    path = f"/episodes/{episode['episode_id']}"
    body = {"outcome": "completed", "reward": {"value": 1.0}, "key": "c", **fields}
    for _ in range(2):
        assert (await stage.post(f"{path}/close", body)).status_code == 200
    return (await stage.get(path)).json()


async def test_tokens_are_bounded_to_the_last_one(make_stage) -> None:
    """A turn generates what is left; then no turn is served, for good, and the outcome says so."""
    stage = await make_stage(router={"max_tokens_per_episode": 60})
    stage.server.answer = lambda request: stage.script("x")
    episode = await stage.open()
    assert (await ask(stage, episode)).status_code == 200
    used = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in stage.turns(episode))
    prompt = len(stage.turns(episode)[0].prompt_ids)
    answer = await ask(stage, episode)
    assert answer.status_code == 200
    asked = [request["sampling_params"]["max_new_tokens"] for request in stage.server.requests]
    assert asked == [60 - prompt, 60 - used - prompt]
    for _ in range(8):
        answer = await ask(stage, episode)
        if answer.status_code != 200:
            break
    check_final(answer, "token_budget_spent")
    assert "max_tokens_per_episode=60" in answer.json()["error"]["message"]
    read = await closed(stage, episode)
    assert (read["outcome"], read["error"]) == ("truncated", "token_budget_spent")
    assert read["reward"]["value"] == 1.0


async def test_choices_share_what_is_left(make_stage) -> None:
    """Generated to their limit, the choices of one request spend the budget and no token more."""
    stage = await make_stage(router={"max_tokens_per_episode": 100})
    stage.server.answer = lambda request: Script(
        ids=stage.renderer.tokenizer.encode("x" * 99)[
            : request["sampling_params"]["max_new_tokens"]
        ],
        finish={"type": "length"},
    )
    episode = await stage.open()
    assert (await ask(stage, episode, n=3)).status_code == 200
    turns = stage.turns(episode)
    assert len({len(turn.output_ids) for turn in turns}) == 1
    used = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in turns)
    assert 100 - len(turns) < used <= 100
    check_final(await ask(stage, episode), "token_budget_spent")


async def test_a_prompt_that_spends_the_budget_is_not_served(make_stage) -> None:
    """What is known before the server is asked costs it nothing."""
    stage = await make_stage(router={"max_tokens_per_episode": 10})
    episode = await stage.open()
    check_final(await ask(stage, episode), "token_budget_spent")
    assert not stage.server.requests


async def test_turns_at_once_are_bounded_per_key(make_stage) -> None:
    """One episode's flood is refused; another's turn is served beside it."""
    stage = await make_stage(router={"max_concurrent_turns_per_episode": 2})
    stage.server.answer = lambda request: stage.script("x")
    stage.server.gate.clear()
    episode, other = await stage.open(), await stage.open()
    running = [asyncio.create_task(ask(stage, episode, seed=n)) for n in range(2)]
    while len(stage.server.requests) < 2:
        await asyncio.sleep(0.005)
    check_final(await ask(stage, episode, seed=3), "concurrency_exceeded")
    beside = asyncio.create_task(ask(stage, other, n=2))
    while len(stage.server.requests) < 4:
        await asyncio.sleep(0.005)
    stage.server.gate.set()
    answers = await asyncio.gather(*running, beside)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert (await ask(stage, episode)).status_code == 200
    failed = await closed(stage, episode, outcome="failed", failure_kind="agent", error="403")
    assert (failed["outcome"], failed["error"]) == ("failed", "concurrency_exceeded: 403")
    assert (await closed(stage, other))["outcome"] == "completed"


async def test_turns_of_other_processes_count(make_stage) -> None:
    """Budgets are the episode's: two routers over one buffer share them, and what was noted."""
    limits = {"max_turns_per_episode": 3}
    one = stage = await make_stage(router=limits)
    two = await make_stage(beside=stage, router=limits)
    stage.server.answer = lambda request: stage.script("x")
    episode = await stage.open()
    for router in (one, two, one):
        assert (await ask(router, episode)).status_code == 200
    check_final(await ask(one, episode), "turn_budget_spent")
    assert (await closed(two, episode))["outcome"] == "truncated"


async def test_a_deadline_that_is_met_is_recorded(stage) -> None:
    """Time is a budget like the others."""
    episode = await stage.open(deadline_s=0.01)
    await asyncio.sleep(0.02)
    check_final(await ask(stage, episode), "episode_expired")
    read = await closed(stage, episode)
    assert (read["outcome"], read["error"]) == ("truncated", "episode_expired")


@pytest.mark.parametrize("is_spent", [False, True])
async def test_exactly_the_budget_is_no_truncation(make_stage, is_spent) -> None:
    """Only asking for more than is allowed truncates."""
    stage = await make_stage(router={"max_turns_per_episode": 1})
    stage.server.answer = lambda request: stage.script("x")
    episode = await stage.open()
    assert (await ask(stage, episode)).status_code == 200
    if is_spent:
        check_final(await ask(stage, episode), "turn_budget_spent")
    assert (await closed(stage, episode))["outcome"] == ("truncated" if is_spent else "completed")


async def test_an_unacknowledged_turn_is_counted_once(make_stage) -> None:
    """A turn that Redis has, and this process has not recorded, is one turn of the budget,
    also when a rewritten history has the episode read again meanwhile."""
    stage = await make_stage(router={"max_turns_per_episode": 4})
    stage.server.answer = lambda request: stage.script("x")
    episode = await stage.open()
    assert (await ask(stage, episode)).status_code == 200
    stage.writer.may_answer.clear()
    late = asyncio.create_task(ask(stage, episode, seed=1))
    while len(stage.turns(episode)) < 2:
        await asyncio.sleep(0.005)
    rewritten = [
        {"role": "user", "content": "other"},
        {"role": "assistant", "content": "never said"},
        {"role": "user", "content": "go"},
    ]
    beside = asyncio.create_task(ask(stage, episode, messages=rewritten))
    while len(stage.turns(episode)) < 3:
        await asyncio.sleep(0.005)
    stage.writer.may_answer.set()
    assert [answer.status_code for answer in await asyncio.gather(late, beside)] == [200, 200]
    assert (await ask(stage, episode, seed=2)).status_code == 200
    check_final(await ask(stage, episode, seed=3), "turn_budget_spent")
    assert len(stage.turns(episode)) == 4


async def test_turns_in_flight_count_beside_recorded_ones_of_others(make_stage) -> None:
    """What another process recorded does not hide what is in flight here."""
    limits = {"max_turns_per_episode": 6}
    one = stage = await make_stage(router=limits)
    two = await make_stage(beside=stage, router=limits)
    stage.server.answer = lambda request: stage.script("x")
    episode = await stage.open()
    stage.server.gate.clear()
    held = [asyncio.create_task(ask(one, episode, seed=n)) for n in range(2)]
    while len(stage.server.requests) < 2:
        await asyncio.sleep(0.005)
    beside = FakeServer(lambda request: stage.script("x"))
    beside.url = await stage.stack.enter_async_context(serving(beside))
    # The server that holds them has left: others' turns go to another one.
    stage.buffer.remove_servers()
    stage.buffer.serve(beside.url, server_id="server-1")
    for router in (one, two):
        await router.app.state.parts.pool.refresh()
    for seed, router in ((8, two), (9, two), (10, one), (11, one)):
        assert (await ask(router, episode, seed=seed)).status_code == 200
    check_final(await ask(one, episode, seed=12), "turn_budget_spent")
    stage.server.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
