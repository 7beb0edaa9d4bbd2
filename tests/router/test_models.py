"""Names of models (rule 6)."""

import asyncio
import json

import openai
import pytest

from fakes.fake_server import FakeServer, serving
from outloop.buffer.errors import SettingsError


async def ask(stage, episode, model: str):
    """One raw request."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return await stage.post("/v1/chat/completions", body, episode["api_key"])


async def test_a_version_is_served_by_a_server_that_holds_it(stage) -> None:
    """policy@VERSION goes to that version only, policy to any."""
    other = FakeServer(lambda request: stage.script("newer"))
    other.url, other.version = await stage.stack.enter_async_context(serving(other)), "1"
    stage.server.answer = lambda request: stage.script("older")
    stage.buffer.serve(other.url, server_id="server-1", version=1)
    stage.buffer.serve(stage.server.url, version=0)
    episode = await stage.open()
    stage.buffer.announce(1)
    await stage.app.state.parts.pool.refresh()
    for version, text in ((0, "older"), (1, "newer"), (0, "older"), (1, "newer")):
        answer = await ask(stage, episode, f"policy@{version}")
        assert answer.json()["choices"][0]["message"]["content"] == text
        assert answer.json()["model"] == f"policy@{version}"
        span = stage.turns(episode)[-1].version_spans[-1]
        assert span.policy_version == version


async def test_a_version_that_is_asked_for_by_name_is_not_trained(stage) -> None:
    """A frozen opponent or judge at the agent's own base URL is recorded without loss, also in a
    stream, as several choices and for a retry; what the policy says before and after it in the same
    conversation is trained."""
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open()
    path, said = "/v1/chat/completions", {"role": "assistant", "content": "fine"}
    messages = [{"role": "user", "content": "hi"}]
    for model, more in (
        ("policy", {}),
        ("policy@0", {}),
        ("policy@0", {"n": 2}),
        ("policy@0", {"stream": True}),
        ("policy", {}),
    ):
        body = {"model": model, "messages": messages, **more}
        for headers in ({}, {"x-stainless-retry-count": "1"}):
            answer = await stage.post(path, body, episode["api_key"], **headers)
            assert answer.status_code == 200, answer.text
        messages = [*messages, said, {"role": "user", "content": "more"}]
    turns = stage.turns(episode)
    assert [turn.branch_cause for turn in turns].count("extension") == 4
    masked = [turn.mask_reason for turn in turns if not turn.loss_spans]
    assert masked == ["frozen"] * 4
    assert [bool(turn.loss_spans) for turn in turns] == [True, *[False] * 4, True]
    assert all(turn.behavior_logprobs.all() for turn in turns)
    assert len(stage.server.requests) == 6


@pytest.mark.parametrize("model", ["policy@7", "policy@", "policy@x", "policy@-1", "judge@0", "@0"])
async def test_a_version_that_no_server_holds_is_refused(stage, model: str) -> None:
    """With the names that are served, for good, and without a turn."""
    episode = await stage.open()
    answer = await ask(stage, episode, model)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    assert "'policy', 'policy@0'" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert not stage.server.requests


async def test_a_version_published_away_in_the_middle_is_refused(stage) -> None:
    """No token of other weights is passed off as that version's."""
    script = stage.script("one two three")
    num = len(script.ids)
    script.spans = [
        {"version": "0", "start": 0, "end": 2},
        {"version": "1", "start": 2, "end": num},
    ]
    stage.server.answer = lambda request: script
    episode = await stage.open()
    answer = await ask(stage, episode, "policy@0")
    assert answer.json()["error"]["code"] == "model_not_found"
    assert not stage.turns(episode)
    assert (await ask(stage, episode, "policy")).status_code == 200


class FakeUpstream:
    """A judge that answers in pieces and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict, dict]] = []
        self.status = 200
        self.gate = asyncio.Event()
        self.is_abandoned = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        body = (await receive())["body"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append((scope["path"], headers, json.loads(body)))
        kind = [(b"content-type", b"text/event-stream"), (b"x-internal", b"hidden")]
        await send({"type": "http.response.start", "status": self.status, "headers": kind})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        gate, left = asyncio.create_task(self.gate.wait()), asyncio.create_task(receive())
        await asyncio.wait((gate, left), return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            self.is_abandoned.set()
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})


@pytest.fixture
async def judged(make_stage, monkeypatch):
    """A stage with an upstream called judge."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = FakeUpstream()
    async with serving(judge) as url:
        upstream = {"base_url": f"{url}/v1", "model": "big-1", "api_key_env": "JUDGE_KEY"}
        away = {"base_url": "http://127.0.0.1:1/v1"}
        stage = await make_stage(router={"upstreams": {"judge": upstream, "away": away}})
        stage.judge = judge
        yield stage


@pytest.mark.medium
@pytest.mark.parametrize("path", ["chat/completions", "responses", "completions", "messages"])
async def test_an_upstream_is_asked_and_never_recorded(judged, path: str) -> None:
    """The body goes on unread but for the name, with the upstream's key and not the episode's."""
    judged.judge.gate.set()
    episode = await judged.open()
    body = {"model": "judge", "messages": [{"role": "user", "content": [{"type": "image"}]}]}
    for prefix in ("", f"/episodes/{episode['episode_id']}"):
        answer = await judged.post(f"{prefix}/v1/{path}", body, episode["api_key"])
        assert (answer.status_code, answer.text) == (200, "data: 1\n\ndata: 2\n\n")
        assert answer.headers["content-type"] == "text/event-stream"
        assert "x-internal" not in answer.headers
        asked_path, headers, asked = judged.judge.asked[-1]
        assert (asked_path, asked) == (f"/v1/{path}", {**body, "model": "big-1"})
        assert headers["authorization"] == "Bearer secret"
        assert episode["api_key"] not in str(headers)
    assert not judged.turns(episode)
    assert not judged.server.requests


async def test_an_upstream_streams_and_is_left_when_the_client_leaves(judged) -> None:
    """The first piece comes before the last is written; without a reader nothing is generated."""
    episode = await judged.open()
    headers = {"Authorization": f"Bearer {episode['api_key']}"}
    async with judged.http.stream(
        "POST", "/v1/chat/completions", json={"model": "judge"}, headers=headers
    ) as answer:
        assert await anext(answer.aiter_bytes()) == b"data: 1\n\n"
    await asyncio.wait_for(judged.judge.is_abandoned.wait(), 5)


async def test_a_trace_reaches_an_upstream_as_it_came(judged) -> None:
    """Its OpenTelemetry context, and none where the client has none; nothing else of the client."""
    judged.judge.gate.set()
    episode = await judged.open()
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "x=1"}
    body = {"model": "judge", "messages": []}
    for told in (trace, {}):
        own = {**told, "x-own": "1", "cookie": "c=1", "x-stainless-retry-count": "2"}
        await judged.post("/v1/chat/completions", body, episode["api_key"], **own)
        _, headers, _ = judged.judge.asked[-1]
        assert {n: v for n, v in headers.items() if n.startswith("trace")} == told
        assert not headers.keys() & {"x-own", "cookie", "x-stainless-retry-count"}


@pytest.mark.medium
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_upstream_that_breaks_off_is_no_answer(make_stage, is_streamed: bool) -> None:
    """Half a body is a failure that may be retried; a stream that has begun ends in an error."""
    kind = b"text/event-stream" if is_streamed else b"application/json"
    num_asked = 0

    async def breaks_off(scope, receive, send) -> None:
        nonlocal num_asked
        if scope["type"] != "http":
            return
        num_asked += 1
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        half = b'data: {"id": 1}\n\n' if is_streamed else b'{"id": "chatcmpl-1", "choi'
        await send({"type": "http.response.body", "body": half, "more_body": True})
        raise ConnectionError("scripted")

    async with serving(breaks_off) as url:
        stage = await make_stage(router={"upstreams": {"judge": {"base_url": f"{url}/v1"}}})
        episode = await stage.open()
        answer = await ask(stage, episode, "judge")
        if is_streamed:
            assert answer.text.startswith('data: {"id": 1}\n\n')
            assert "router.upstreams.judge" in answer.text
        else:
            assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
            client = await stage.client(episode, max_retries=1)
            with pytest.raises(openai.InternalServerError, match=r"router\.upstreams\.judge"):
                await client.chat.completions.create(model="judge", messages=[])
            assert num_asked == 3


async def test_upstreams_are_for_open_episodes_and_their_failures_are_named(judged) -> None:
    """Its own status is passed on; one that is away is a retryable 503; names are listed."""
    judged.judge.gate.set()
    judged.judge.status = 429
    episode = await judged.open()
    client = await judged.client(episode, max_retries=0)
    assert [model.id for model in (await client.models.list()).data] == ["policy", "judge", "away"]
    assert (await ask(judged, episode, "judge")).status_code == 429
    answer = await ask(judged, episode, "away")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert "router.upstreams.away" in answer.json()["error"]["message"]
    answer = await ask(judged, {"api_key": "ol-ep-none-x"}, "judge")
    assert answer.status_code == 401
    close = {"outcome": "completed", "key": "k"}
    await judged.post(f"/episodes/{episode['episode_id']}/close", close)
    assert (await ask(judged, episode, "judge")).status_code == 404
    assert len(judged.judge.asked) == 1


async def test_an_upstream_needs_an_episode(make_stage) -> None:
    """Where traffic without a key is served, the policy is: the run's own key to an upstream, which
    may cost money, is not lent to whoever reaches the port."""
    judge = FakeUpstream()
    judge.gate.set()
    async with serving(judge) as url:
        upstreams = {"judge": {"base_url": f"{url}/v1"}}
        stage = await make_stage(router={"unkeyed": "serve", "upstreams": upstreams})
        stage.server.answer = lambda request: stage.script("fine")
        for key in ("sk-mine", "none"):
            answer = await ask(stage, {"api_key": key}, "judge")
            assert (answer.status_code, answer.headers["x-should-retry"]) == (401, "false")
            assert "episode key" in answer.json()["error"]["message"]
            assert (await ask(stage, {"api_key": key}, "policy")).status_code == 200
        assert not judge.asked
        assert (await ask(stage, await stage.open(), "judge")).status_code == 200


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("policy", {}, "has the name of the policy"),
        ("policy@3", {}, "has the name of the policy"),
        ("judge", {"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
    ],
)
async def test_upstreams_that_cannot_be_are_refused_at_the_start(
    make_stage, name, fields, said
) -> None:
    """Before the router listens, with the setting's name."""
    upstream = {"base_url": "http://127.0.0.1:1/v1", **fields}
    with pytest.raises(SettingsError, match=said):
        await make_stage(router={"upstreams": {name: upstream}})
