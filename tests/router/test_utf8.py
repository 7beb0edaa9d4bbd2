"""Bytes that are no text, wherever they stand: refused for good, or another server is asked."""

import pytest

from fakes.fake_server import FakeServer, serving

TEXT = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}]'
BROKEN = {
    "/v1/chat/completions": [
        TEXT + b', "tools": [{"type": "function", "function": {"name": "\xff"}}]}',
        b'{"model": "policy", "messages": [{"role": "user", "content": "\xff"}]}',
        TEXT + b', "unknown": "\xc3\x28"}',
        b'\xff\xfe{"model"',
    ],
    "/v1/completions": [b'{"model": "policy", "prompt": "\xed\xa0\x80"}'],
    "/v1/responses": [b'{"model": "policy", "input": "hi", "tools": [{"name": "\xff"}]}'],
    "/v1/messages": [
        b'{"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}, '
        b'{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", '
        b'"input": {"a": "\xff"}}]}, {"role": "user", "content": "go"}]}',
    ],
    "/v1/messages/count_tokens": [
        b'{"model": "policy", "messages": [{"role": "user", "content": "\xff"}]}'
    ],
}
RUNNERS = {
    "/trajectories": b'{"trajectories": [{"messages": [{"role": "user", "content": "\xff"}]}], '
    b'"key": "k", "final": true}',
    "/tasks": b'{"tasks": [{"task_id": "t", "payload": {"a": "\xff"}}]}',
    "/episodes": b'{"task_id": "t", "deadline_s": 9, "purpose": "eval", "metadata": {"a": "\xff"}}',
}


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, bodies in BROKEN.items() for body in bodies]
)
async def test_a_body_that_is_not_utf8_is_refused_for_good(stage, path: str, body: bytes) -> None:
    """In any part of it, in any dialect; the SDK does not repeat what cannot help."""
    episode = await stage.open()
    headers = {"Authorization": f"Bearer {episode['api_key']}"}
    answer = await stage.http.post(path, content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", RUNNERS)
async def test_a_runners_body_that_is_not_utf8_is_refused_for_good(stage, path: str) -> None:
    """So are the runner's."""
    headers = {"Authorization": "Bearer ol-runner-x"}
    answer = await stage.http.post(path, content=RUNNERS[path], headers=headers)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_half_a_surrogate_is_no_server_error(stage, path: str) -> None:
    """JSON may escape what no text holds: a 4xx, or an answer, but nothing to be repeated."""
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open()
    messages = rb'[{"role": "user", "content": "\ud800"}]'
    body = b'{"model": "policy", "max_tokens": 9, "messages": ' + messages + b"}"
    headers = {"Authorization": f"Bearer {episode['api_key']}"}
    answer = await stage.http.post(path, content=body, headers=headers)
    assert answer.status_code < 500, answer.text


async def test_a_server_whose_answer_is_not_utf8_is_left_for_another(stage) -> None:
    """The turn is generated elsewhere."""

    async def broken(scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"output_ids": [1], "error": "\xff"}'})

    fine = FakeServer(lambda request: stage.script("fine"))
    fine.url = await stage.stack.enter_async_context(serving(fine))
    url = await stage.stack.enter_async_context(serving(broken))
    stage.buffer.serve(url)
    await stage.app.state.parts.pool.refresh()
    stage.buffer.serve(fine.url, server_id="server-1")
    episode = await stage.open()
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    answer = await stage.post("/v1/chat/completions", body, episode["api_key"])
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
