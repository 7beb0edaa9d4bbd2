"""A retry that reaches another router process than its turn: two routers on one buffer."""

import asyncio
import hashlib
import json

import httpx
import pytest

from outloop.router.peers.turn_locator import (
    EVERYBODY,
    Answer,
    Ask,
    Left,
    Over,
    decode,
    encode,
)
from outloop.router.timings import Timings

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
RETRY = {"x-stainless-retry-count": "1"}
TIMEOUT_S = 20.0


async def ask(stage, episode, body=BODY, **headers):
    """One raw request."""
    return await stage.post("/v1/chat/completions", body, episode["api_key"], **headers)


async def until(is_so) -> None:
    """Return when it is so."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():
            await asyncio.sleep(0.005)


def messages(stage) -> list:
    """Every message of a router, with its channel."""
    reply = [(name.rpartition("}:")[2], message) for name, message in stage.buffer.twin.published]
    return [(name, decode(message)) for name, message in reply if name.startswith("router")]


def reply(stage, kind):
    """The messages between routers, of one kind."""
    return [message for _, message in messages(stage) if isinstance(message, kind)]


async def begin(stage, episode, body=BODY, **headers):
    """A request whose turn is held at the server."""
    stage.server.gate.clear()
    num_before = len(stage.server.requests)
    task = asyncio.create_task(ask(stage, episode, body, **headers))
    await until(lambda: len(stage.server.requests) > num_before)
    return task


async def leave(stage, episode) -> None:
    """Send a request and hang up; return when its router knows."""
    task = await begin(stage, episode)
    ((turn,),) = stage.app.state.parts.episodes.known(episode["episode_id"]).turns.values()
    task.cancel()
    await until(lambda: not turn.has_client)


async def retry_elsewhere(stage, other, episode, body=BODY):
    """A retry at another router, which has learned that the turn is being generated."""
    task = asyncio.create_task(ask(other, episode, body, **RETRY))
    await until(lambda: any(answer.generates for answer in reply(stage, Answer)))
    return task


@pytest.fixture
async def pair(make_stage, stage):
    """Two routers of one run."""
    return stage, await make_stage(beside=stage)


def text_of(answer) -> str:
    """The text of a plain or a streamed answer."""
    if answer.headers["content-type"].startswith("application/json"):
        return answer.json()["choices"][0]["message"]["content"]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert choices[-1]["finish_reason"] == "stop"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_waits_for_the_turn_of_another_router(pair, stream: bool) -> None:
    """The client left; its retry, elsewhere, gets the turn, generated once and trained. The
    same request without a mark is then a fresh sample wherever it arrives."""
    first, other = pair
    first.says("one", "two", "three")
    episode = await first.open()
    body = {**BODY, "stream": stream}
    left = await begin(first, episode, body)
    left.cancel()
    again = await retry_elsewhere(first, other, episode, body)
    first.server.gate.set()
    answer = await again
    assert text_of(answer) == "one"
    assert len(first.server.requests) == 1
    (turn,) = first.turns(episode)
    assert turn.loss_spans
    assert turn.turn_id in answer.text
    assert [text_of(await ask(one, episode, body)) for one in (first, other)] == ["two", "three"]


async def test_a_retry_is_of_the_last_such_turn(pair) -> None:
    """Two fresh samples of one request at two routers: a retry anywhere gets the later one, also
    while it is generated."""
    first, other = pair
    first.says("one", "two", "three")
    episode = await first.open()
    assert [text_of(await ask(stage, episode)) for stage in (other, first)] == ["one", "two"]
    assert text_of(await ask(other, episode, **RETRY)) == "two"
    stayed = await begin(first, episode)
    again = await retry_elsewhere(first, other, episode)
    first.server.gate.set()
    assert [text_of(await task) for task in (stayed, again)] == ["three", "three"]


@pytest.mark.medium
async def test_whoever_waits_gets_the_same_bytes(pair) -> None:
    """The client that stayed and retries at both routers get one turn."""
    first, other = pair
    first.says("one")
    episode = await first.open()
    stayed = await begin(first, episode)
    tasks = [await retry_elsewhere(first, other, episode)]
    tasks += [asyncio.create_task(ask(one, episode, **RETRY)) for one in pair]
    first.server.gate.set()
    answers = [await task for task in (stayed, *tasks)]
    assert len({answer.content for answer in answers}) == 1
    assert len(first.turns(episode)) == 1


async def test_retries_that_reach_all_routers_at_once_are_generated_once(make_stage, pair) -> None:
    """Three routers get one turn at once: the first to ask the others generates it."""
    first, other = pair
    third = await make_stage(beside=first)
    first.says("one", "two", "three")
    episode = await first.open()
    stages = (first, other, third, first, other)
    answers = await asyncio.gather(*(ask(stage, episode, **RETRY) for stage in stages))
    assert len({answer.content for answer in answers}) == 1
    assert len(first.server.requests) == len(first.turns(episode)) == 1


async def test_a_turn_that_its_router_gives_up_is_generated_by_the_router_that_waits(pair) -> None:
    """A router that stops in the middle of a turn lets the waiting one go on at once."""
    first, other = pair
    first.says("one", "two")
    episode = await first.open()
    stayed = await begin(first, episode)
    again = await retry_elsewhere(first, other, episode)
    await first.app.state.parts.service.close()
    assert (await stayed).status_code == 503
    await until(lambda: len(first.server.requests) == 2)
    first.server.gate.set()
    assert text_of(await again) == "two"
    assert len(first.turns(episode)) == 1


async def test_a_wait_for_a_turn_that_failed_is_not_answered_with_an_earlier_one(pair) -> None:
    """An equal request was answered before; the retry is of the one that its router gave up, which
    is a sample of its own."""
    first, other = pair
    first.says("earlier", "given up", "sampled again")
    episode = await first.open()
    assert text_of(await ask(first, episode)) == "earlier"
    stayed = await begin(first, episode)
    again = await retry_elsewhere(first, other, episode)
    await first.app.state.parts.service.close()
    assert (await stayed).status_code == 503
    await until(lambda: len(first.server.requests) == 3)
    first.server.gate.set()
    assert text_of(await again) == "sampled again"
    assert len(first.turns(episode)) == 2


async def listening(stage, handle=lambda message: None):
    """Another process, which handles what routers ask all of them."""
    writer = await stage.buffer.connect()
    stage.stack.push_async_callback(writer.close)
    task = asyncio.create_task(writer.channel.listen({EVERYBODY: handle}))
    assert await writer.channel.is_listening(TIMEOUT_S)
    return task


async def test_a_router_that_never_answers_holds_a_retry_up_once(make_stage) -> None:
    """One that is stopped dead still listens, as far as Redis knows; the deadline decides."""
    stage = await make_stage(timings=Timings(peer_answer_s=0.1))
    stage.says("one")
    episode = await stage.open()
    dead = await listening(stage)
    assert text_of(await ask(stage, episode, **RETRY)) == "one"
    dead.cancel()


@pytest.mark.medium
async def test_a_router_that_generates_and_falls_silent_is_not_waited_for(make_stage) -> None:
    """It said that it has the turn in flight, and then nothing more: the waiting router generates
    it."""
    stage = await make_stage(timings=Timings(peer_answer_s=1.0, peer_round_s=0.05))
    stage.says("one")
    episode = await stage.open()
    channel, num_answers = stage.writer.channel, 0

    def handle(message: bytes) -> None:
        asked = decode(message)
        if isinstance(asked, Ask) and asked.round <= 3:
            answer = Answer("other", asked.number, asked.round, True)
            answers.append(channel.publish(f"router:{asked.process}", encode(answer)))

    answers: list = []
    other = await listening(stage, handle)
    again = asyncio.create_task(ask(stage, episode, **RETRY))
    while not again.done():
        if answers:
            await answers.pop()
            num_answers += 1
        await asyncio.sleep(0.005)
    other.cancel()
    assert (num_answers, text_of(await again)) == (3, "one")


async def test_a_turn_generated_elsewhere_for_longer_than_a_turn_may_take_is_given_up(
    make_stage, stage
) -> None:
    """The wait has a deadline: a 503 that may be retried names what it waited for."""
    timings = Timings(peer_round_s=0.05)
    other = await make_stage(beside=stage, timings=timings, router={"turn_timeout_s": 0.01})
    stage.says("one")
    episode = await stage.open()
    stayed = await begin(stage, episode)
    answer = await (await retry_elsewhere(stage, other, episode))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert "another router process that has it in flight" in answer.json()["error"]["message"]
    stage.server.gate.set()
    assert (await stayed).status_code == 200


async def test_a_turn_whose_waiting_client_leaves_elsewhere_is_recorded_without_loss(
    make_stage, stage
) -> None:
    """Who waited at the other router hung up too: no client has the answer."""
    first = stage
    other = await make_stage(beside=stage, timings=Timings(peer_round_s=0.05))
    first.says("one")
    episode = await first.open()
    (await begin(first, episode)).cancel()
    (await retry_elsewhere(first, other, episode)).cancel()
    await until(lambda: not reply(first, Ask)[-1].has_client)
    first.server.gate.set()
    path = f"/episodes/{episode['episode_id']}/close"
    ((turn,),) = first.app.state.parts.episodes.known(episode["episode_id"]).turns.values()
    await until(lambda: turn.is_generated)
    answer = await first.post(path, {"outcome": "failed", "failure_kind": "agent", "key": "c"})
    assert answer.status_code == 200
    (recorded,) = first.turns(episode)
    assert (recorded.loss_spans, recorded.mask_reason) == ((), "undelivered")


async def test_who_left_and_asks_again_elsewhere_without_a_mark_gets_the_turn(pair) -> None:
    """The answer was generated and never handed over; its router waits for the client to come back,
    which it does at another one. Then the same request is a fresh sample."""
    first, other = pair
    first.says("one", "two")
    episode = await first.open()
    assert (await other.get("/v1/models", episode["api_key"])).status_code == 200
    await leave(first, episode)
    first.server.gate.set()
    await until(lambda: reply(first, Left))
    assert [text_of(await ask(other, episode)) for _ in range(2)] == ["one", "two"]
    assert len(first.server.requests) == 2
    assert all(turn.loss_spans for turn in first.turns(episode))


@pytest.mark.medium
async def test_an_undelivered_turn_answers_after_a_restart(
    make_stage,
) -> None:
    """The client did not come back in time: the turn is recorded without loss, and is still the
    answer to the same request, once, by a router that did not generate it."""
    stage = await make_stage(timings=Timings(return_grace_s=0.01))
    stage.says("one", "two")
    episode = await stage.open()
    await leave(stage, episode)
    stage.server.gate.set()
    await until(lambda: stage.turns(episode))
    other = await make_stage(beside=stage)
    assert [text_of(await ask(other, episode)) for _ in range(2)] == ["one", "two"]
    assert [bool(turn.loss_spans) for turn in stage.turns(episode)] == [False, True]


async def test_a_router_that_gets_no_messages_serves_alone(make_stage) -> None:
    """Its user may not listen, or Redis is back a moment ago: turns are generated, retries get what
    is recorded, and turns at once are bounded by what it runs itself."""
    settings = {"num_processes": 4, "max_concurrent_turns_per_episode": 4}
    stage = await make_stage(router=settings, timings=Timings(peer_answer_s=0.05), may_listen=False)
    stage.says("one", "two", "three", "four", "five")
    episode = await stage.open()
    assert text_of(await ask(stage, episode)) == "one"
    assert text_of(await ask(stage, episode, **RETRY)) == "one"
    bodies = [{**BODY, "seed": number} for number in range(4)]
    stage.server.gate.clear()
    tasks = [asyncio.create_task(ask(stage, episode, body)) for body in bodies]
    await until(lambda: len(stage.server.requests) == 5)
    assert (await ask(stage, episode)).status_code == 404
    stage.server.gate.set()
    texts = [text_of(await task) for task in tasks]
    assert sorted(texts) == ["five", "four", "three", "two"]


async def test_a_fresh_turn_tells_the_other_routers_nothing(pair) -> None:
    """Asking is for retries: the plain path sends no message."""
    first = pair[0]
    first.says("one", "two")
    episode = await first.open()
    for stage in pair:
        assert (await ask(stage, episode)).status_code == 200
    assert messages(first) == []


async def test_rubbish_on_the_channel_is_passed_over(pair) -> None:
    """What is no message of ours, or answers no question, changes nothing."""
    first, other = pair
    first.says("one", "two")
    episode = await first.open()
    await ask(other, episode, **RETRY)
    names = {f"router:{one.process}" for one in reply(first, Ask)}
    for message in (b"", b"\xff", b"\x93\x01\x02\x03", b"{}", encode(Over(7))):
        for name in (EVERYBODY, *names):
            await first.writer.channel.publish(name, message)
    assert text_of(await ask(other, episode, **RETRY)) == "one"


async def test_a_client_elsewhere_may_wait_for_two_equal_turns(make_stage) -> None:
    """The turn that it waited for is over, and an equal one is in flight when it asks again."""
    timings = Timings(peer_round_s=0.02)
    first = await make_stage(timings=timings)
    other = await make_stage(beside=first, timings=timings)
    first.says("one", "two")
    episode = await first.open()
    stayed = [await begin(first, episode)]
    again = await retry_elsewhere(first, other, episode)
    stayed.append(await begin(first, episode))
    first.server.gate.set()
    texts = [text_of(await task) for task in (*stayed, again)]
    assert texts[:2] == ["one", "two"]
    assert texts[2] in texts[:2]
    assert not first.app.state.parts.background.failure


async def test_a_question_that_is_put_again_keeps_its_place(stage) -> None:
    """Another router asked before this one did: asked again, it is not asked to wait for this one,
    which waits for it."""
    stage.says("one")
    episode = await stage.open()
    channel = stage.writer.channel
    content = httpx.Request("POST", "http://x", json=BODY).read()
    key = hashlib.sha256(b"chat/completions\0" + content).hexdigest()[:32]

    def question(round_: int) -> bytes:
        return encode(Ask("other", 1, round_, episode["episode_id"], key, True))

    def answers() -> list[Answer]:
        return [answer for answer in reply(stage, Answer) if answer.process != "other"]

    await channel.publish(EVERYBODY, question(1))
    await until(lambda: len(answers()) == 1)
    silent = await listening(stage)
    # It waits for the other's answer now.
    again = asyncio.create_task(ask(stage, episode, **RETRY))
    await until(lambda: len(reply(stage, Ask)) == 2)
    await channel.publish(EVERYBODY, question(2))
    await until(lambda: len(answers()) == 2)
    assert [(answer.round, answer.generates) for answer in answers()] == [(1, False), (2, False)]
    again.cancel()
    silent.cancel()
