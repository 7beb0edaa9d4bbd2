"""OpenEnv's protocol against a server of our own that also misbehaves; the real package's server is
in test_openenv_server.py."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import WSMsgType, web

PlayWith = Callable[..., Any]
Serve = Callable[[web.Application], Awaitable[str]]

SOURCE = """
from outloop.envs.adapters import openenv
from outloop.envs.adapters.openenv import OpenEnv

def games():
    return openenv.tasks({servers}, seeds=range(5), action={action!r}, observation="shown")
"""


class EchoServer:
    """Rewards the word that the seed asks for; `num_sessions` at a time."""

    def __init__(self, num_sessions: int = 100) -> None:
        self.num_sessions = num_sessions
        self.num_open = 0
        self.num_refused = 0
        self.seeds: list[int] = []
        self.break_at: str | None = None
        """The kind of message at which the connection breaks."""
        self.reward: Any = 1.0
        self.url = ""

    def app(self) -> web.Application:
        """What serves `/ws`."""
        app = web.Application()
        app.router.add_get("/ws", self._serve)
        return app

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_open >= self.num_sessions:
            self.num_refused += 1
            await socket.send_json(_error("CAPACITY_REACHED", "no session is free"))
            await socket.close()
            return socket
        self.num_open += 1
        try:
            async for message in socket:
                if message.type != WSMsgType.TEXT:
                    break
                found = json.loads(message.data)
                if found["type"] in ("close", self.break_at):
                    break
                await socket.send_json(self._answer(found["type"], found["data"]))
        finally:
            self.num_open -= 1
        return socket

    def _answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            self.seeds.append(data["seed"])
            return _observation({"shown": "say hello"}, None, done=False)
        if "word" not in data:
            return _error("VALIDATION_ERROR", "the action needs a word")
        return _observation({"shown": "thanks"}, self.reward, done=True)


def _observation(shown: dict[str, Any], reward: Any, *, done: bool) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": shown, "reward": reward, "done": done},
    }


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}


@pytest.fixture
async def server(serve: Serve) -> EchoServer:
    """A started server."""
    echo = EchoServer()
    echo.url = await serve(echo.app())
    return echo


def source(*servers: str, action: str = "word") -> str:
    """The user's module with tasks on these servers."""
    return SOURCE.format(servers=list(servers), action=action)


def says(text: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """A policy that always says `text`."""
    return lambda messages: {"role": "assistant", "content": text}


OPTIONS = {"tasks": "user:games", "rollout_function_path": "user:OpenEnv"}


async def test_episodes_are_played_and_their_sessions_end(
    router: Any, play_with: PlayWith, server: EchoServer
) -> None:
    """Every seed is sent, rewards come back, and no connection is left."""
    router.num_episodes = 5
    router.answer = says("hello")
    await play_with(router, source(server.url), **OPTIONS)
    assert [reward["value"] for reward in router.closed("reward")] == [1.0] * 5
    assert sorted(server.seeds) == list(range(5))
    assert server.num_open == 0


@pytest.mark.medium
async def test_a_full_server_is_asked_again(
    router: Any, play_with: PlayWith, server: EchoServer
) -> None:
    """More episodes than sessions: each waits for one."""
    server.num_sessions = 1
    router.num_episodes = 4
    router.answer = says("hello")
    await play_with(router, source(server.url), **OPTIONS)
    assert router.closed("outcome") == ["completed"] * 4
    assert server.num_refused > 0


async def test_episodes_are_spread_over_the_servers(
    router: Any, play_with: PlayWith, server: EchoServer, serve: Serve
) -> None:
    """A second server of the same environment gets half of what is played at once."""
    other = EchoServer()
    other.url = await serve(other.app())
    router.num_episodes = 4
    router.answer = says("hello")
    await play_with(router, source(server.url, other.url), **OPTIONS)
    assert len(server.seeds) == len(other.seeds) == 2


async def test_an_action_may_be_written_as_json(
    router: Any, play_with: PlayWith, server: EchoServer
) -> None:
    """An action that the server refuses is the policy's; it may write another."""

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        texts = ["no JSON", 'I act: {"wrong": 1}', '{"word": "hello"}']
        return {"role": "assistant", "content": texts[(len(messages) - 1) // 2]}

    router.num_episodes = 1
    router.answer = answer
    await play_with(router, source(server.url, action=""), **OPTIONS)
    assert [reward["value"] for reward in router.closed("reward")] == [1.0]


@pytest.mark.parametrize("failure", ["reset", "step", "reward", "absent"])
async def test_what_the_server_fails_at_is_no_reward(
    router: Any, play_with: PlayWith, server: EchoServer, failure: str
) -> None:
    """A dead socket, a malformed observation and a server that is not there: the environment's."""
    url = server.url
    if failure == "reward":
        server.reward = "much"
    elif failure == "absent":
        url = "http://127.0.0.1:9"
    else:
        server.break_at = failure
    router.num_episodes = 1
    router.answer = says("hello")
    await play_with(router, source(url), **OPTIONS)
    (close,) = router.closes.values()
    assert (close["outcome"], close["failure_kind"]) == ("failed", "environment")
    assert close["reward"] is None
    assert f"OpenEnv server {url}/ws" in close["error"]
