"""Bodies that are not what a dialect reads: what is wrong is in the answer, in every dialect."""

import json

import pytest

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
CHAT = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]
RAW = [
    (b"", ["not JSON"]),
    (b"hello", ["not JSON"]),
    (b'{"model": "policy", ', ["not JSON"]),
    (b'{"model": "policy",}', ["not JSON"]),
    (b"[]", ["`object`", "`array`"]),
    (b"null", ["`object`", "`null`"]),
    (b'{"model": 5}', ["`str`", "$.model"]),
    (b"{}", ["`model`"]),
    (b'{"model": "policy"}', ["required field"]),
    (b'{"model": "\xff"}', ["not UTF-8"]),
    (b'{"model": NaN}', ["not JSON"]),
]
PAIRS = [
    (rb"\ud83d broken", rb"\ud83d", 0),
    (rb"\ud83d", rb"\ud83d", 0),
    (rb"x\ude00", rb"\ude00", 1),
    (rb"\ude00\ud83d", rb"\ude00", 0),
    (rb"\ud83d\n", rb"\ud83d", 0),
    (rb"\ud83d\u0041", rb"\ud83d", 0),
    (rb"\ud83d\ud83d\ude00", rb"\ud83d", 0),
    (rb"\ud83d\ude00\uDE00", rb"\uDE00", 12),
    (rb"\\\ud83d", rb"\ud83d", 2),
    (rb"\\ud83d\ude00\ud83d\ude00", rb"\ude00", 7),
    (rb"\ud83d\\ude00", rb"\ud83d", 0),
]


async def refused(stage, path: str, content: bytes) -> dict:
    """The error of a body that is refused for good."""
    episode = await stage.open()
    headers = {"Authorization": f"Bearer {episode['api_key']}"}
    answer = await stage.http.post(path, content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert not stage.server.requests
    return answer.json()["error"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("content", "words"), RAW)
async def test_what_is_no_request_is_said_to_be_none(stage, path, content, words) -> None:
    """Not JSON, of another type, or without what is needed."""
    message = (await refused(stage, path, content))["message"]
    assert [word for word in words if word not in message] == []


def with_text(path: str, text: bytes) -> bytes:
    """The path's body with this JSON text as what is said."""
    return json.dumps({"model": "policy", **BODIES[path]}).encode().replace(b"hi", text)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("text", "half", "at"), PAIRS)
async def test_half_a_surrogate_pair_is_named(stage, path, text, half, at) -> None:
    """With its place, so that its sender finds it in megabytes."""
    content = with_text(path, text)
    message = (await refused(stage, path, content))["message"]
    place = content.index(text) + at
    assert f"{half.decode()} at byte {place}" in message
    assert "surrogate" in message


async def test_whole_pairs_and_written_escapes_are_text(stage) -> None:
    """An escape after an escaped backslash is six characters."""
    for path in BODIES:
        stage.says("fine")
        episode = await stage.open()
        headers = {"Authorization": f"Bearer {episode['api_key']}"}
        content = with_text(path, rb"\ud83d\ude00 \\ud83d")
        answer = await stage.http.post(path, content=content, headers=headers)
        assert answer.status_code == 200, answer.text


async def test_a_runners_half_pair_is_named_too(stage) -> None:
    """Of a task, for example."""
    body = rb'{"tasks": [{"task_id": "t", "payload": {"question": "\ud83d broken"}}]}'
    answer = await stage.http.post(
        "/tasks", content=body, headers={"Authorization": "Bearer ol-runner-x"}
    )
    assert answer.status_code == 400
    assert rf"\ud83d at byte {body.index(b'ud83d') - 1}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", CHAT)
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "text", "text": None}, ["type='text'", "text is null"]),
        ({"type": "text"}, ["type='text'", "text is null"]),
        ({"type": "image_url", "image_url": {}}, ["type='image_url'", "only text"]),
        ({"type": "nonsense"}, ["type='nonsense'", "only text"]),
        ({"type": "text", "text": 5}, ["`int`"]),
        ({"type": 5}, ["`int`"]),
        ("text", ["`object`", "`str`"]),
    ],
)
async def test_a_part_that_is_no_text_is_named(stage, path, part, words) -> None:
    """What it is, and what is the matter with it."""
    body = json.loads(with_text(path, b"hi"))
    (message,) = body.get("messages") or body["input"]
    message["content"] = [part]
    found = (await refused(stage, path, json.dumps(body).encode()))["message"]
    assert [word for word in words if word not in found] == []
