"""What an upstream may do with an episode's requests, and an episode with an upstream."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fakes.fake_server import serving

Answer = Callable[[dict], tuple[int, list[tuple[bytes, bytes]], bytes]]


class Judge:
    """An upstream that answers as the test says; redirects lead to itself."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, str], bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append((scope["path"], headers, body))
        status, kind, content = self.answer({"path": scope["path"]})
        await send({"type": "http.response.start", "status": status, "headers": kind})
        await send({"type": "http.response.body", "body": content})


JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream")]


@pytest.fixture
def judged(make_stage, monkeypatch) -> Callable:
    """Start a stage with an upstream called judge that answers like this."""
    monkeypatch.setenv("JUDGE_KEY", "secret")

    @asynccontextmanager
    async def start(answer: Answer, **limits: float) -> AsyncIterator[tuple[Any, Judge]]:
        judge = Judge(answer)
        async with serving(judge) as url:
            upstream = {"base_url": f"{url}/v1", "api_key_env": "JUDGE_KEY", **limits}
            yield await make_stage(router={"upstreams": {"judge": upstream}}), judge

    return start


async def ask(stage, episode, path: str = "/v1/chat/completions", **headers: str):
    """A request to the judge."""
    body = {"model": "judge", "messages": []}
    return await stage.post(path, body, episode["api_key"], **headers)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed(judged, status: int) -> None:
    """Neither the key nor the request goes where an upstream points: it is refused for good."""
    elsewhere = [(b"location", b"/internal"), *JSON]
    async with judged(lambda _: (status, elsewhere, b"{}")) as (stage, judge):
        episode = await stage.open()
        answer = await ask(stage, episode, "/v1/messages", **{"anthropic-version": "2023-06-01"})
        assert answer.status_code == 400, answer.text
        assert "upstream_redirects" in answer.text
        assert answer.headers["x-should-retry"] == "false"
        assert [path for path, *_ in judge.asked] == ["/v1/messages"]


async def test_the_model_that_is_asked_is_the_one_that_was_checked(judged) -> None:
    """Of a name that is given twice the upstream sees one, whichever its parser takes."""
    async with judged(lambda _: (200, JSON, b"{}")) as (stage, judge):
        episode = await stage.open()
        answer = await stage.http.post(
            "/v1/chat/completions",
            content=b'{"model": "expensive", "messages": [], "model": "judge"}',
            headers={"Authorization": f"Bearer {episode['api_key']}"},
        )
        assert answer.status_code == 200
        assert judge.asked[0][2].count(b'"model"') == 1
        assert json.loads(judge.asked[0][2])["model"] == "judge"


@pytest.mark.parametrize("kind", [JSON, EVENTS], ids=["plain", "stream"])
async def test_an_answer_without_end_is_not_handed_on(judged, kind: list) -> None:
    """It is bounded in memory and on the wire."""
    content = b"data: x\n\n" * 400_000
    async with judged(lambda _: (200, kind, content), max_answer_mb=1) as (stage, _):
        answer = await ask(stage, await stage.open())
        assert "upstream_answer_too_large" in answer.text
        assert len(answer.content) < 2 * 2**20


async def test_an_episode_asks_an_upstream_only_so_often(judged) -> None:
    """Its own requests are counted, and final when they are spent; another's are not."""
    async with judged(lambda _: (200, JSON, b"{}"), max_requests_per_episode=2) as (stage, judge):
        episode, other = await stage.open(), await stage.open()
        statuses = [(await ask(stage, episode)).status_code for _ in range(3)]
        assert statuses == [200, 200, 404]
        assert (await ask(stage, other)).status_code == 200
        assert len(judge.asked) == 3
        refused = await ask(stage, episode)
        assert refused.json()["error"]["code"] == "upstream_budget_spent"
        assert refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (JSON, b'{"usage": {"prompt_tokens": 70, "completion_tokens": 40, "total_tokens": 110}}'),
        (JSON, b'{"usage": {"input_tokens": 70, "output_tokens": 40}}'),
        (JSON, b'{"choices": "' + b"x" * 440 + b'"}'),
        (EVENTS, b'data: {"usage": null}\n\ndata: {"usage": {"total_tokens": 110}}\n\n'),
        (EVENTS, b"data: {}\n\n" * 44),
    ],
    ids=["openai", "anthropic", "unsaid", "stream", "unsaid-stream"],
)
async def test_an_episodes_tokens_at_an_upstream_are_bounded(judged, kind, content) -> None:
    """As the answers say, or as their size does where they do not."""
    limits = {"max_tokens_per_episode": 200}
    async with judged(lambda _: (200, kind, content), **limits) as (stage, _):
        episode = await stage.open()
        statuses = [(await ask(stage, episode)).status_code for _ in range(4)]
        assert statuses == [200, 200, 404, 404]
