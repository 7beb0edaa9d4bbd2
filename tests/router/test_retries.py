"""Retries are not new turns, repeats are."""

import asyncio
import json

import pytest

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def ask(stage, episode, body=BODY, **headers):
    """One raw request."""
    return await stage.post(
        "/v1/chat/completions",
        body,
        episode["api_key"],
        **{name.replace("_", "-"): value for name, value in headers.items()},
    )


async def leave(stage, episode, body=BODY) -> None:
    """Send a request and hang up while it is generated; return when the router knows."""
    stage.server.gate.clear()
    num_before = len(stage.server.requests)
    task = asyncio.create_task(ask(stage, episode, body))
    while len(stage.server.requests) == num_before:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_waited_for(stage, episode, False)


async def until_waited_for(stage, episode, has_client: bool) -> None:
    """Somebody waits for the episode's last turn, which is generated, or nobody does."""
    known = stage.app.state.parts.episodes.known(episode["episode_id"])
    async with asyncio.timeout(60):
        while [*known.turns.values()][-1][0].has_client != has_client:
            await asyncio.sleep(0.005)


async def test_a_fresh_identical_request_is_a_fresh_sample(stage) -> None:
    """Two equal requests without a retry marker are two turns."""
    stage.says("one", "two")
    episode = await stage.open()
    texts = [(await ask(stage, episode)).json()["choices"][0] for _ in range(2)]
    assert [t["message"]["content"] for t in texts] == ["one", "two"]
    assert len(stage.turns(episode)) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"x_stainless_retry_count": "1"}),
        ({"idempotency_key": "k"}, {"idempotency_key": "k"}),
    ],
)
async def test_a_retry_gets_the_recorded_turn(stage, first, second) -> None:
    """The same bytes come back and nothing is generated again."""
    stage.says("one", "two")
    episode = await stage.open()
    answers = [await ask(stage, episode, **headers) for headers in (first, second)]
    assert answers[0].content == answers[1].content
    assert len(stage.server.requests) == 1
    assert len(stage.turns(episode)) == 1


async def test_another_body_under_the_same_idempotency_key_is_another_turn(stage) -> None:
    """A key covers one body."""
    stage.says("one", "two")
    episode = await stage.open()
    other = {"model": "policy", "messages": [{"role": "user", "content": "ho"}]}
    await ask(stage, episode, idempotency_key="k")
    await ask(stage, episode, other, idempotency_key="k")
    assert len(stage.turns(episode)) == 2


@pytest.mark.parametrize("headers", [{"x_stainless_retry_count": "1"}, {}])
async def test_a_retry_joins_the_turn_in_flight(stage, headers) -> None:
    """A client that left and comes back gets what was being generated; it is trained."""
    stage.says("one", "two")
    episode = await stage.open()
    await leave(stage, episode)
    again = asyncio.create_task(ask(stage, episode, **headers))
    await until_waited_for(stage, episode, True)
    stage.server.gate.set()
    answer = await again
    assert answer.json()["choices"][0]["message"]["content"] == "one"
    assert len(stage.server.requests) == 1
    assert stage.turns(episode)[0].loss_spans


@pytest.mark.medium
async def test_an_undelivered_turn_has_no_loss(stage) -> None:
    """The client left for good: its turn is recorded at the close, without loss."""
    stage.says("one")
    episode = await stage.open()
    await leave(stage, episode)
    ((turn,),) = stage.app.state.parts.episodes.known(episode["episode_id"]).turns.values()
    stage.server.gate.set()
    async with asyncio.timeout(60):
        while not turn.is_generated:
            await asyncio.sleep(0.005)
    path = f"/episodes/{episode['episode_id']}/close"
    answer = await stage.post(path, {"outcome": "failed", "failure_kind": "agent", "key": "c"})
    assert answer.status_code == 200
    (turn,) = stage.turns(episode)
    assert turn.loss_spans == ()
    assert turn.mask_reason == "undelivered"


async def test_closing_aborts_what_is_still_generated(stage) -> None:
    """An episode that is closed mid-turn frees its server."""
    stage.says("one")
    episode = await stage.open()
    await leave(stage, episode)
    path = f"/episodes/{episode['episode_id']}/close"
    answer = await stage.post(path, {"outcome": "truncated", "key": "c"})
    assert answer.status_code == 200
    async with asyncio.timeout(60):
        while not stage.server.aborted:
            await asyncio.sleep(0.01)
    assert stage.server.aborted == [stage.server.requests[0]["rid"]]
    assert not stage.turns(episode)


async def test_a_retry_after_a_router_restart_gets_the_recorded_turn(make_stage, stage) -> None:
    """The answer is rebuilt from the buffer, byte for byte."""
    stage.says("one")
    episode = await stage.open()
    first = await ask(stage, episode)
    other = await make_stage(beside=stage)
    second = await ask(other, episode, x_stainless_retry_count="1")
    assert second.content == first.content
    assert len(stage.turns(episode)) == 1


async def test_a_streamed_retry_gets_the_same_stream(stage) -> None:
    """A retried stream has the same text under the same id, in pieces of its own."""
    stage.says("Hello there, friend.")
    episode = await stage.open()
    body = {**BODY, "stream": True}
    first = await ask(stage, episode, body)
    second = await ask(stage, episode, body, x_stainless_retry_count="2")
    streams = []
    for answer in (first, second):
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        finish = [c["choices"][0]["finish_reason"] for c in chunks][-1]
        streams.append((text, finish, {c["id"] for c in chunks}))
    assert streams[0] == streams[1]
    assert streams[0][0] == "Hello there, friend."
    assert len(stage.server.requests) == 1


async def test_choices_of_which_some_were_recorded_are_generated_together_again(make_stage) -> None:
    """Redis took one of two choices and went away: the retry gets two answers to one request, and
    none of them twice."""
    stage = await make_stage(router={"buffer_timeout_s": 0})
    stage.says("a", "b", "c", "d")
    episode = await stage.open()
    stage.writer.refuses = lambda turn: turn.choice_index > 0
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "n": 2}
    path, key = "/v1/chat/completions", episode["api_key"]
    refused = await stage.post(path, body, key)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
    assert len(stage.turns(episode)) == 1
    stage.writer.refuses = lambda turn: False
    retry = {"x-stainless-retry-count": "1"}
    answers = [(await stage.post(path, body, key, **retry)).json() for _ in range(2)]
    assert answers[0] == answers[1]
    texts = [choice["message"]["content"] for choice in answers[0]["choices"]]
    assert sorted(texts) == ["c", "d"]
    assert len(stage.turns(episode)) == 3
    other = await make_stage(beside=stage)
    assert (await other.post(path, body, key, **retry)).json() == answers[0]


def text_of(answer) -> str:
    """What a plain answer says."""
    return answer.json()["choices"][0]["message"]["content"]


async def test_the_retry_of_a_refused_second_sample_is_a_fresh_sample(make_stage) -> None:
    """The router is full when a request is repeated on purpose: its retry is no retry of the turn
    that was answered before, and a retry of that retry is one of it."""
    stage = await make_stage(router={"max_queued_turns": 1})
    stage.says("one", "other", "two")
    episode, other = await stage.open(), await stage.open()
    assert text_of(await ask(stage, episode)) == "one"
    stage.server.gate.clear()
    busy = asyncio.create_task(ask(stage, other))
    while len(stage.server.requests) == 1:
        await asyncio.sleep(0.005)
    for headers in ({}, {"x_stainless_retry_count": "1"}):
        assert (await ask(stage, episode, **headers)).status_code == 503
    stage.server.gate.set()
    assert text_of(await busy) == "other"
    for attempt in ("2", "3"):
        assert text_of(await ask(stage, episode, x_stainless_retry_count=attempt)) == "two"
    assert len(stage.turns(episode)) == 2


async def test_a_retry_of_an_answered_turn_that_meets_a_full_router_stays_one(make_stage) -> None:
    """What was refused was marked already: it asks for the turn that was answered before."""
    stage = await make_stage(router={"max_queued_turns": 1})
    stage.says("one", "other", "two")
    episode, other = await stage.open(), await stage.open()
    assert text_of(await ask(stage, episode)) == "one"
    stage.server.gate.clear()
    busy = asyncio.create_task(ask(stage, other))
    while len(stage.server.requests) == 1:
        await asyncio.sleep(0.005)
    assert text_of(await ask(stage, episode, x_stainless_retry_count="1")) == "one"
    stage.server.gate.set()
    await busy
    assert text_of(await ask(stage, episode, x_stainless_retry_count="2")) == "one"
    assert len(stage.turns(episode)) == 1


@pytest.mark.parametrize("has_other_router", [False, True])
async def test_a_retry_of_a_turn_that_was_continued_is_a_fresh_sample(
    make_stage, stage, has_other_router: bool
) -> None:
    """Whoever goes on from an answer has read it: the step is asked again, and its first attempt
    never arrived."""
    stage.says("one", "then", "two")
    episode = await stage.open()
    assert text_of(await ask(stage, episode)) == "one"
    messages = [
        *BODY["messages"],
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "go on"},
    ]
    assert text_of(await ask(stage, episode, {**BODY, "messages": messages})) == "then"
    elsewhere = await make_stage(beside=stage) if has_other_router else stage
    for attempt in ("1", "2"):
        answer = await ask(elsewhere, episode, x_stainless_retry_count=attempt)
        assert text_of(answer) == "two"
    assert len(stage.turns(episode)) == 3


async def test_an_idempotency_key_names_one_turn_for_good(stage) -> None:
    """Also after that was continued."""
    stage.says("one", "then", "two")
    episode = await stage.open()
    assert text_of(await ask(stage, episode, idempotency_key="k")) == "one"
    messages = [
        *BODY["messages"],
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "go on"},
    ]
    assert text_of(await ask(stage, episode, {**BODY, "messages": messages})) == "then"
    assert text_of(await ask(stage, episode, idempotency_key="k")) == "one"
    assert len(stage.turns(episode)) == 2
