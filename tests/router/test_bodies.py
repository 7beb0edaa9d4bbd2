"""Bodies that no client should send: refused with a sentence, never a failure of ours."""

import json
import random

import msgspec
import pytest

from outloop.router.dialects.base import TurnRequest
from outloop.router.dialects.table import DIALECTS, Served
from outloop.router.errors import Refusal
from outloop.router.rendering.renderer import PolicyRenderer

NAMES = (
    *("type", "role", "content", "text", "name", "function", "input", "arguments", "id", "output"),
    *("parameters", "input_schema", "format", "call_id", "tool_use_id", "strict", "description"),
)
WORDS = (
    *("text", "function", "tool_use", "tool_result", "function_call", "function_call_output"),
    *("reasoning", "message", "thinking", "user", "assistant", "tool", "system", "auto"),
    *("required", "any", "none", "", "x"),
)
NESTED = ("messages", "input", "tools", "tool_choice", "prompt", "system", "text", "thinking")
VALID = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}


def wild(rng: random.Random, depth: int):
    """Any JSON value, made of words that the dialects know."""
    kind = rng.randrange(8 if depth else 5)
    if kind < 3:
        return rng.choice(WORDS)
    if kind < 5:
        return rng.choice((None, True, False, 0, -1, 1, 10**20, 0.5, 1e300))
    if kind == 5:
        return [wild(rng, depth - 1) for _ in range(rng.randrange(3))]
    return wild_object(rng, depth)


def wild_object(rng: random.Random, depth: int) -> dict:
    """Any object, with a type and a role more often than not."""
    found = {rng.choice(NAMES): wild(rng, depth - 1) for _ in range(rng.randrange(4))}
    if rng.random() < 0.7:
        found |= {"type": rng.choice(WORDS), "role": rng.choice(("user", "assistant", "x"))}
    return found


def decoded(served: Served, body: bytes, renderer: PolicyRenderer) -> TurnRequest | Refusal:
    """What comes of a body."""
    try:
        request = served.dialect.decode(body)
        if request.prompt is None:
            assert renderer.render(request.messages, request.tools)
        return request
    except Refusal as refusal:
        return refusal


@pytest.mark.parametrize("path", DIALECTS)
def test_any_body_is_a_request_or_refused(renderer, path: str) -> None:
    """Whatever a field holds: a turn request that renders, or 400 in the dialect's words."""
    rng, served = random.Random(path), DIALECTS[path]
    names = [field.encode_name for field in msgspec.structs.fields(served.body)]
    nested = [name for name in names if name in NESTED]
    num_served = 0
    for number in range(3000):
        body = {"model": "policy", **VALID[path]}
        if number % 2:
            body[rng.choice(names)] = wild(rng, 3)
        else:
            objects = [wild_object(rng, 3) for _ in range(rng.randrange(3))]
            body[rng.choice(nested)] = rng.choice((objects, wild_object(rng, 3)))
        result = decoded(served, json.dumps(body).encode(), renderer)
        if isinstance(result, Refusal):
            assert result.status == 400
            assert json.loads(served.errors.envelope(result))["error"]["message"]
        else:
            assert result.messages or result.prompt
            num_served += 1
    assert 100 < num_served < 2900


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": "\\ud800"}', b"null"])
def test_what_is_no_json_object_is_refused(path: str, body: bytes) -> None:
    """400, in every dialect."""
    with pytest.raises(Refusal) as caught:
        DIALECTS[path].dialect.decode(body)
    assert caught.value.status == 400


def nested(levels: int) -> str:
    """An object in an object in an object."""
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, {**body, "metadata": "DEEP"}) for path, body in VALID.items()),
        *((path, {**body, "tools": ["DEEP"]}) for path, body in VALID.items()),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [
                    {"role": "user", "content": "hi"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "x", "name": "f", "input": "DEEP"}],
                    },
                ],
            },
        ),
        ("/v1/responses", {"input": "hi", "text": {"format": "DEEP"}}),
        ("/v1/messages/count_tokens", {"messages": VALID["/v1/messages"]["messages"], "x": "DEEP"}),
        ("/tasks", {"tasks": [{"task_id": "t", "payload": "DEEP"}], "eval_tasks": []}),
        ("/trajectories", {"key": "k", "trajectories": [{"messages": "DEEP", "metadata": {}}]}),
    ],
)
async def test_depth_is_the_senders_fault(stage, path: str, body: dict) -> None:
    """A policy may write a call that nests without end; its refusal is final, in every dialect."""
    stage.server.answer = lambda request: stage.script("fine")
    key = (await stage.open())["api_key"] if path.startswith("/v1") else "ol-runner-x"
    for levels in (900, 3000, 200_000):
        text = json.dumps({"model": "policy", **body}).replace('"DEEP"', nested(levels))
        headers = {"Authorization": f"Bearer {key}"}
        answer = await stage.http.post(path, content=text, headers=headers)
        assert answer.status_code in ((400,) if levels == 200_000 else (200, 400, 422)), answer.text
        if answer.status_code == 400:
            assert answer.headers["x-should-retry"] == "false"
            assert answer.json()["error"]["message"]


async def test_a_retry_count_of_any_length_is_read(stage) -> None:
    """It is a header that anybody may send."""
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open()
    body = {"model": "policy", **VALID["/v1/chat/completions"]}
    for count, num_turns in (("0" * 5000, 1), ("9" * 5000, 1), ("-1", 2), ("00", 3)):
        headers = {"x-stainless-retry-count": count}
        answer = await stage.post("/v1/chat/completions", body, episode["api_key"], **headers)
        assert answer.status_code == 200
        assert len(stage.turns(episode)) == num_turns
