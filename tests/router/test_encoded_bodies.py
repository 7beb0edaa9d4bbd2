"""Bodies that clients compress: read as what they are, within the limit of any body."""

import gzip
import json
import zlib

import pytest

ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}
MAX_BYTES = 8 * 1024 * 1024


def deflated(data: bytes, window: int) -> bytes:
    """`data` compressed with this window, whose sign and size say which format."""
    made = zlib.compressobj(wbits=window)
    return made.compress(data) + made.flush()


async def send(stage, path: str, encoding: str, body: bytes, key: str):
    """The answer to a body of this encoding."""
    headers = {"authorization": f"Bearer {key}", "content-encoding": encoding}
    return await stage.http.post(path, content=body, headers=headers)


@pytest.mark.parametrize("path", ASKED)
async def test_every_dialect_reads_what_is_compressed(stage, path: str) -> None:
    """By gzip, zlib and bare deflate, in any case of letters, small and of many pieces."""
    stage.server.answer = lambda request: stage.script("fine")
    episode = await stage.open()
    plain = json.dumps({"model": "policy", **ASKED[path], "ignored": "x" * 1_000_000}).encode()
    for encoding, body in (
        ("gzip", gzip.compress(plain)),
        ("GZip", gzip.compress(plain, 0)),
        ("x-gzip", gzip.compress(plain)),
        ("deflate", deflated(plain, 15)),
        ("deflate", deflated(plain, -15)),
        ("identity", plain),
    ):
        answer = await send(stage, path, encoding, body, episode["api_key"])
        assert answer.status_code == 200, (encoding, answer.text)


async def test_a_runner_may_compress_too(stage) -> None:
    """Its routes read bodies the same way."""
    body = gzip.compress(json.dumps({"runner_id": "r"}).encode())
    answer = await send(stage, "/runners/heartbeat", "gzip", body, "ol-runner-x")
    assert (answer.status_code, answer.json()) == (200, {"max_silence_s": 20.0})


def error_of(path: str, answer) -> dict:
    """What is wrong, out of the dialect's own envelope."""
    error = answer.json()
    assert answer.headers["x-should-retry"] == "false"
    if path.startswith("/v1/messages"):
        assert error["type"] == "error"
    else:
        assert set(error["error"]) == {"message", "type", "code", "param"}
    return error["error"]


@pytest.mark.parametrize("path", ASKED)
async def test_what_cannot_be_read_is_refused_by_name(stage, path: str) -> None:
    """Another encoding, several, one that breaks, ends early or goes on after its end."""
    episode = await stage.open()
    plain = json.dumps({"model": "policy", **ASKED[path]}).encode()
    whole = gzip.compress(plain)
    for encoding, body, status, words in (
        ("br", plain, 415, "gzip, deflate"),
        ("zstd", plain, 415, "gzip, deflate"),
        ("gzip, gzip", gzip.compress(whole), 415, "gzip, deflate"),
        ("gzip", plain, 400, "gzip"),
        ("gzip", b"", 400, "gzip"),
        ("gzip", whole[:-1], 400, "gzip"),
        ("gzip", whole[:-9] + bytes(9), 400, "gzip"),
        ("gzip", whole + b"more", 400, "gzip"),
        ("gzip", whole + bytes(1_000_000), 400, "gzip"),
        ("deflate", plain, 400, "deflate"),
    ):
        answer = await send(stage, path, encoding, body, episode["api_key"])
        assert answer.status_code == status, (encoding, body, answer.text)
        assert words in error_of(path, answer)["message"]
    assert stage.server.requests == []


@pytest.mark.medium
@pytest.mark.parametrize(
    ("path", "encoding"), [("/v1/chat/completions", "gzip"), ("/v1/messages", "deflate")]
)
async def test_a_bomb_is_refused_like_any_body_that_is_too_large(
    stage, path: str, encoding: str
) -> None:
    """However little of it came over the wire, and only as much of it is unfolded."""
    episode = await stage.open()
    bomb = deflated(bytes(MAX_BYTES + 2**22), 31 if encoding == "gzip" else 15)
    assert len(bomb) < 200_000
    # What comes after the limit is not looked at: that it breaks there is not noticed.
    for body in (bomb, bomb[:-500]):
        answer = await send(stage, path, encoding, body, episode["api_key"])
        assert answer.status_code == 413
        assert str(MAX_BYTES) in error_of(path, answer)["message"]
